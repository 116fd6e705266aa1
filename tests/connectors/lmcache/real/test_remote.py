"""The remote connector under LMCache's own RemoteBackend."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache.integration.vllm.utils import extract_request_configs_from_sampling_params
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat
from lmcache.v1.storage_backend import RemoteBackend

from moonpool.connectors.lmcache.remote import FULL, LENT_SHARE, identity
from tests.connectors.lmcache.real.beds import CONFIG, HEAD_SIZE, HEADS, LAYERS, Backend, expected
from tests.connectors.own_node import Node
from tests.core.store_bed import until

MIB = 1 << 20
Make = Callable[..., Backend]
BY_COPY = {"local_cpu": True}  # LMCache would keep what it gets, so nothing is lent


@pytest.fixture
def make(node: Node) -> Iterator[Make]:
    made: list[Backend] = []

    def make(**options: Any) -> Backend:
        made.append(Backend(**options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """What our loggers said; LMCache's own do not hand on."""
    logger = logging.getLogger("lmcache.moonpool.remote")
    level = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield lambda: caplog.text
    logger.setLevel(level)
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("options", [{}, BY_COPY], ids=["lent", "copied"])
def test_nothing_but_the_url(options: dict[str, Any], node: Node, make: Make) -> None:
    node.start()
    backend = make(**options)
    assert backend.contains([1, 2, 3]) == 0
    assert backend.get([1]) == [None]
    backend.put([1, 2, 3])
    assert backend.contains([1, 2, 3, 4]) == 3
    assert backend.contains([1, 9, 3]) == 1
    assert backend.get([1, 2, 3, 4]) == [16, 16, 16, None]
    until(lambda: node.pinned() == 0)


def test_the_single_calls(node: Node, make: Make) -> None:
    node.start()
    backend = make()
    (key,) = backend.keys(7)
    assert not backend.backend.contains(key)
    assert not backend.connector.exists_sync(key)
    backend.backend.submit_put_task(key, backend.chunk(7)).result(10)
    assert backend.backend.contains(key)
    assert backend.connector.exists_sync(key)
    memory = backend.backend.get_blocking(key)
    assert memory is not None
    assert memory.tensor.shape[2] == 16
    assert backend.run(backend.connector.list()) == [key.to_string()]
    assert backend.backend.remove(key)
    assert not backend.backend.remove(key)
    assert backend.run(backend.connector.list()) == []


def test_the_forms_of_save_chunk_meta_share(node: Node, make: Make) -> None:
    node.start()
    first, second = make(), make(extra_config={"save_chunk_meta": False})
    assert (first.connector.save_chunk_meta, second.connector.save_chunk_meta) == (True, False)
    first.put([1])
    second.put([2])
    assert second.get([1, 2]) == first.get([1, 2]) == [16, 16]


def test_a_chunk_that_is_not_full(node: Node, make: Make) -> None:
    node.start()
    first, second = make(), make()
    first.put([1, 2])
    first.put([3], tokens=5)
    assert second.contains([1, 2, 3]) == 3
    assert second.get([1, 2, 3, 4]) == [16, 16, 5, None]


@pytest.mark.parametrize("options", [{}, BY_COPY], ids=["lent", "copied"])
def test_prefixes_without_waiting(options: dict[str, Any], node: Node, make: Make) -> None:
    node.start()
    backend = make(**options)
    backend.put([1, 2, 4])
    keys = backend.keys(1, 2, 3, 4)
    connector = backend.connector
    assert backend.run(connector.batched_async_contains("lookup", keys)) == 2
    free = backend.memory.memory_allocator.pin_allocator.address_manager.get_free_size()
    chunks = backend.run(connector.batched_get_non_blocking("lookup", keys))
    assert len(chunks) == 2
    for chunk in chunks:
        chunk.ref_count_down()
    until(lambda: node.pinned() == 0)
    assert backend.memory.memory_allocator.pin_allocator.address_manager.get_free_size() == free


def test_compressed_bytes(node: Node, make: Make) -> None:
    node.start()
    backend = make()
    (key,) = backend.keys(6)
    backend.run(backend.connector.put(key, BytesBufferMemoryObj(b"compressed")))
    found = backend.run(backend.connector.get(key))
    assert (found.get_memory_format(), bytes(found.byte_array)) == (MemoryFormat.BINARY_BUFFER, b"compressed")


def test_what_has_a_header_takes_two_calls_for_all(node: Node, make: Make) -> None:
    node.start()
    backend = make(**BY_COPY)
    backend.put([1, 2, 3, 4], tokens=5)
    calls = []
    look = backend.connector._views

    async def views(names: list[str]) -> Any:
        calls.append(len(names))
        return await look(names)

    backend.connector._views = views
    assert backend.get([1, 2, 3, 4]) == [5, 5, 5, 5]
    assert calls == [4]


class Group:
    """As LMCache describes layers that are moved together."""

    def __init__(self, layers: int, hidden: int, dtype: torch.dtype) -> None:
        self.num_layers, self.hidden_dim_size, self.dtype = layers, hidden, dtype
        self.shape_desc = SimpleNamespace(kv_size=2)


def test_groups_that_lmcache_learns_of_later(node: Node, make: Make) -> None:
    """At its first transfer, when the connector exists already."""
    node.start()
    first, second, plain = make(), make(), make()
    groups = [Group(1, 32, torch.bfloat16), Group(1, 8, torch.float32)]
    for backend in (first, second):
        backend.metadata.kv_layer_groups_manager = SimpleNamespace(
            kernel_groups=groups, num_kernel_groups=len(groups)
        )
    shapes, dtypes = first.metadata.get_shapes(), first.metadata.get_dtypes()
    chunk = first.memory.allocate(shapes, dtypes, MemoryFormat.KV_2LTD)
    chunk.raw_data.fill_(7)
    (key,) = first.keys(1)
    first.run(first.connector.put(key, chunk))
    assert second.contains([1]) == 1
    found = second.run(second.connector.get(key))
    assert found.get_shapes() == shapes
    assert bytes(found.byte_array) == b"\7" * chunk.get_size()
    assert plain.get([1]) == [None]
    groups[1].dtype = torch.uint8  # of whatever 8 bits
    assert second.get([1]) == [None]
    second.run(second.connector.put(key, chunk))
    assert 'set the option "form"' in second.connector._refusal


# In place


def test_chunks_are_lent_in_place(node: Node, make: Make) -> None:
    node.start()
    backend = make()
    backend.put([1, 2])
    manager = backend.memory.memory_allocator.pin_allocator.address_manager
    free = manager.get_free_size()
    chunks = backend.run(backend.connector.batched_get(backend.keys(1, 2)))
    assert manager.get_free_size() == free
    assert node.pinned() == 2
    assert backend.connector._lent.nbytes == 2 * chunks[0].get_size()
    for number in range(100, 2100, 100):  # more than the pool holds
        backend.put(range(number, number + 100))
    for number, chunk in zip((1, 2), chunks, strict=True):
        wanted = expected(number, chunk.tensor.shape, torch.bfloat16)
        assert torch.equal(chunk.tensor.view(torch.int16), wanted.view(torch.int16))
        assert len(chunk.byte_array) == chunk.get_size()
        chunk.ref_count_down()
    until(lambda: node.pinned() == 0)
    assert backend.connector._lent.nbytes == 0


def test_what_is_lent_has_a_limit(node: Node, make: Make) -> None:
    node.start(1 * MIB)
    backend = make()
    backend.put(range(100))
    lendable = MIB // LENT_SHARE // backend.connector.full_chunk_size_bytes
    assert 0 < lendable < 90
    chunks = backend.run(backend.connector.batched_get(backend.keys(*range(90))))
    assert all(chunk is not None for chunk in chunks)
    assert node.pinned() == lendable
    for chunk in chunks:
        chunk.ref_count_down()
    until(lambda: node.pinned() == 0)


@pytest.mark.parametrize("options", [BY_COPY, {"enable_blending": True}])
def test_nothing_is_lent_to_who_keeps_it_or_writes(options: dict[str, Any], node: Node, make: Make) -> None:
    node.start()
    assert make().connector._may_lend
    assert not make(**options).connector._may_lend


def test_lent_chunks_outlive_the_connector(node: Node, make: Make) -> None:
    node.start()
    backend = Backend()
    backend.put([1])
    (chunk,) = backend.run(backend.connector.batched_get(backend.keys(1)))
    backend.close()
    wanted = expected(1, chunk.tensor.shape, torch.bfloat16)
    assert torch.equal(chunk.tensor.view(torch.int16), wanted.view(torch.int16))
    chunk.ref_count_down()
    until(lambda: node.pinned() == 0)


# The same keys, other bytes


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"model": "org/other"},
    "world size": {"metadata": {"world_size": 2}},
    "worker": {"metadata": {"worker_id": 1}},
    "type": {"dtype": torch.float16},
    "layers": {"metadata": {"kv_shape": (2 * LAYERS, 2, 16, HEADS // 2, HEAD_SIZE)}},  # all of one size
    "heads": {"metadata": {"kv_shape": (LAYERS, 2, 16, HEADS // 2, 2 * HEAD_SIZE)}},
    "mla": {"metadata": {"use_mla": True}},
    "chunk size": {"chunk_size": 32},
    "hash": {"pre_caching_hash_algorithm": "sha256_cbor"},
    "blending": {"enable_blending": True},
    "form": {"remote_url": "moonpool://?form=mine"},
    "namespace": {"remote_url": "moonpool://?namespace=other"},
    "adapter": {"tags": {"lora": "a"}},
    "one more tag": {"tags": {"user": "b"}},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_is_not_the_same_is_not_there(other: dict[str, Any], node: Node, make: Make) -> None:
    """Under one hash of the tokens; a full chunk, and one that is not."""
    node.start()
    first, stranger = make(), make(**other)
    first.put([1])
    first.put([2], tokens=5)
    for number in (1, 2):
        assert stranger.contains([number]) == 0
        assert stranger.run(stranger.connector.batched_async_contains("", stranger.keys(number))) == 0
    assert stranger.get([1, 2]) == [None, None]
    stranger.put([1])
    stranger.put([2], tokens=5)
    assert node.objects() == 4
    assert stranger.contains([1, 2]) == first.contains([1, 2]) == 2


MARKED: dict[str, tuple[str, Any]] = {
    "model": ("model_name", "org/other"),
    "world size": ("world_size", 2),
    "type": ("kv_dtype", torch.float16),
    "layers": ("kv_shape", (2 * LAYERS, 2, 16, HEADS // 2, HEAD_SIZE)),
    "heads": ("kv_shape", (LAYERS, 2, 16, HEADS // 2, 2 * HEAD_SIZE)),
    "mla": ("use_mla", True),
    "chunk size": ("chunk_size", 32),
    "serde": ("remote_serde", "cachegen"),
    "hash": ("pre_caching_hash_algorithm", "sha256_cbor"),
    "blending": ("enable_blending", True),
    "form": ("form", "mine"),
}


def marks_of(**other: Any) -> bytes:
    config = LMCacheEngineConfig.from_dict(CONFIG)
    metadata = Backend.metadata_of(config, torch.bfloat16, "org/model")
    for name, value in other.items():
        if name != "form":
            setattr(config if hasattr(config, name) else metadata, name, value)
    return identity(config, metadata, other.get("form", ""))


@pytest.mark.parametrize(("name", "value"), MARKED.values(), ids=MARKED)
def test_the_fingerprint_has_each_of_them(name: str, value: Any) -> None:
    """Also what LMCache's key says, in which a name or a value may hold the sign that parts its fields."""
    assert marks_of(**{name: value}) != marks_of()


def test_the_fingerprint_has_the_separator_of_blending() -> None:
    on = {"enable_blending": True}
    assert marks_of(**on, blend_special_str="#") != marks_of(**on, blend_special_str="%")
    assert marks_of(blend_special_str="#") == marks_of(blend_special_str="%")  # not used


def test_ranks_have_their_own_bytes_and_one_fingerprint(node: Node, make: Make) -> None:
    node.start()
    ranks = [make(metadata={"world_size": 2, "worker_id": rank}) for rank in (0, 1)]
    marks = {identity(rank.config, rank.metadata) for rank in ranks}
    assert len(marks) == 1
    for rank, backend in enumerate(ranks):
        chunk = backend.chunk(100 + rank)
        (key,) = backend.keys(1)
        backend.run(backend.connector.put(key, chunk))
        chunk.ref_count_down()
    for rank, backend in enumerate(ranks):
        found = backend.run(backend.connector.get(*backend.keys(1)))
        wanted = expected(100 + rank, found.tensor.shape, torch.bfloat16)
        assert torch.equal(found.tensor.view(torch.int16), wanted.view(torch.int16))
        found.ref_count_down()
    assert node.objects() == 2


# LoRA


def test_lmcache_takes_a_tag_of_the_request_and_nothing_else() -> None:
    """The remedy that docs/lmcache.md gives: LMCache's own way from vLLM's request to its key."""
    told = {"lmcache.tag.lora": "a", "remote_host": "not of LMCache"}
    request = SimpleNamespace(extra_args={"kv_transfer_params": told}, cache_salt="b")
    configs = extract_request_configs_from_sampling_params(request)
    key = CacheEngineKey("m", 1, 0, 1, torch.bfloat16, configs)
    assert key.tags == (("lora", "a"),)
    assert key.to_string() == "m@1@0@1@bfloat16@lora%a"


def test_an_engine_with_adapters_shares_what_says_which(
    node: Node, make: Make, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start()
    plain = make()
    plain.put([1])
    vllm = ModuleType("vllm.config")
    monkeypatch.setitem(sys.modules, "vllm.config", vllm)
    for current, serves in ((None, False), (SimpleNamespace(lora_config=None), False)):
        vllm.get_current_vllm_config_or_none = lambda current=current: current  # type: ignore[attr-defined]
        assert make().contains([1]) == (not serves)
    vllm.get_current_vllm_config_or_none = lambda: SimpleNamespace(lora_config=object())  # type: ignore[attr-defined]
    untold, first, second = make(), make(tags={"lora": "a"}), make(tags={"lora": "b"})
    untold.put([1, 2])
    assert node.objects() == 1
    assert untold.contains([1]) == 0
    assert untold.run(untold.connector.batched_async_contains("", untold.keys(1))) == 0
    assert untold.get([1]) == [None]
    assert said().count('"lmcache.tag.lora"') == 1
    first.put([1])
    assert (first.contains([1]), second.contains([1])) == (1, 0)
    assert (first.get([1]), second.get([1])) == ([16], [None])


def test_types_of_one_byte_need_a_form(node: Node, make: Make) -> None:
    """vLLM keeps fp8_e4m3 and fp8_e5m2 as uint8, and so does LMCache."""
    node.start()
    with pytest.raises(IrrecoverableException, match="several types of 8 bits"):
        make(dtype=torch.uint8)
    first = make(dtype=torch.uint8, remote_url="moonpool://?form=fp8_e4m3")
    same = make(dtype=torch.uint8, remote_url="moonpool://?form=fp8_e4m3")
    other = make(dtype=torch.uint8, remote_url="moonpool://?form=fp8_e5m2")
    (key,) = first.keys(1)
    chunk = first.memory.allocate(
        first.metadata.get_shapes(), first.metadata.get_dtypes(), MemoryFormat.KV_2LTD
    )
    first.run(first.connector.put(key, chunk))
    assert (same.contains([1]), other.contains([1])) == (1, 0)
    assert other.run(other.connector.get(key)) is None
    found = same.run(same.connector.get(key))
    assert found.get_size() == chunk.get_size()
    found.ref_count_down()


def test_layers_by_themselves_are_refused(node: Node, make: Make) -> None:
    with pytest.raises(IrrecoverableException, match="use_layerwise must be off"):
        make(use_layerwise=True)


def test_what_serialises_the_chunks_counts() -> None:
    metadata = Backend.metadata_of(LMCacheEngineConfig.from_dict({}), torch.bfloat16, "m")
    marks = {
        identity(LMCacheEngineConfig.from_dict({"remote_serde": serde}), metadata)
        for serde in ("naive", "cachegen", "kivi")
    }
    assert len(marks) == 3


def test_a_form_that_is_not_ours_is_a_miss(node: Node, make: Make) -> None:
    """Should fingerprint and key ever fit what was stored otherwise: the header does not."""
    node.start()
    backend = make()
    keys = backend.keys(1, 2, 3, 4)
    client = backend.connector._pool.client
    assert client is not None
    size = backend.connector.full_chunk_size_bytes
    names = [key.to_string() for key in keys]
    full = [name + FULL for name in names]
    other = backend.memory.allocate([torch.Size([2, 2, 16, 32])], [torch.float16], MemoryFormat.KV_2LTD)
    backend.run(backend.connector.put(keys[0], other))
    client.put(names[1:], [b"", bytes(64 + size), bytes(10_000)])
    client.put(full[1:], [b"", bytes(64 + size), bytes(size - 1)])
    assert backend.get([1, 2, 3, 4]) == [None] * 4


def test_options_of_the_plugin(node: Node, make: Make, folder: Path) -> None:
    node.start()
    extra = {
        "remote_storage_plugin.moonpool.namespace": "a",
        "remote_storage_plugin.moonpool.west.node": str(node.socket),
    }
    first = make(remote_url=None, remote_storage_plugins=["moonpool"], extra_config=extra)
    west = make(remote_url=None, remote_storage_plugins=["moonpool.west"], extra_config=extra)
    by_url = make(remote_url=f"moonpool://{node.socket}?namespace=a")
    first.put([1])
    assert west.get([1]) == by_url.get([1]) == [16]
    named = {
        "remote_storage_plugin.mine.module_path": "moonpool.connectors.lmcache.remote",
        "remote_storage_plugin.mine.class_name": "MoonpoolAdapter",
    }
    assert make(remote_url="moonpool://?namespace=a", extra_config=named).get([1]) == [16]


@pytest.mark.parametrize(
    "url", ["moonpool://10.0.0.1:1", "moonpool://?colour=red", "moonpool://?require_pool=1"]
)
def test_what_cannot_be_is_said_at_start(node: Node, make: Make, url: str) -> None:
    with pytest.raises(IrrecoverableException):
        make(remote_url=url)


# Faults


def test_no_node_at_start_and_later(node: Node, make: Make, said: Callable[[], str]) -> None:
    backend = make()
    backend.put([1])
    assert backend.contains([1]) == 0
    assert backend.get([1]) == [None]
    assert "no pool at" in said()
    node.start()
    until(lambda: backend.connector._pool.client)
    backend.put([1])
    assert backend.get([1]) == [16]
    until(lambda: "joined the pool" in said())


def test_a_node_that_dies_and_comes_back(node: Node, make: Make, said: Callable[[], str]) -> None:
    node.start()
    backend = make()
    backend.put([1])
    node.stop()
    backend.put([2])
    assert backend.contains([1, 2]) == 0
    assert backend.get([2]) == [None]
    assert "does not answer" in said()
    node.start()
    assert until(lambda: [backend.put([3]), backend.contains([3])][1])
    assert backend.get([1, 3]) == [None, 16]
    assert "answers again" in said()


def test_a_full_pool(node: Node, make: Make) -> None:
    node.start(2 * MIB)
    backend = make(max_local_cpu_size=0.01)
    size = 64 + backend.connector.full_chunk_size_bytes
    for start in range(0, 1600, 100):  # three times what it holds
        backend.put(range(start, start + 100))
    held = [number for number in range(1600) if backend.contains([number])]
    assert 50 < len(held) < 2 * MIB // size
    assert backend.get(held) == [16] * len(held)


def test_a_pool_full_of_pins(node: Node, make: Make, said: Callable[[], str]) -> None:
    node.start(2 * MIB)
    release = node.full()
    backend = make()
    backend.put(range(500))
    assert "not all of 500 chunks were stored" in said()
    assert backend.contains([0]) == 0
    assert backend.get([0]) == [None]
    release()
    backend.put([3000])
    assert backend.get([3000]) == [16]


def test_a_wrong_token(
    node: Node, make: Make, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start()
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "another token")
    backend = make()
    backend.put([1])
    assert backend.contains([1]) == 0
    assert node.objects() == 0
    assert "no pool at" in said()
    assert "another token" not in said()
    with pytest.raises(IrrecoverableException):
        make(remote_url="moonpool://?require_pool=1")
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "a token of this test")
    until(lambda: backend.connector._pool.client)
    backend.put([1])
    assert backend.get([1]) == [16]


def test_no_memory_for_what_is_there(node: Node, make: Make) -> None:
    node.start()
    make().put(range(60))
    small = make(max_local_cpu_size=0.0001, **BY_COPY)  # room for 26 chunks
    found = small.get(range(60))
    assert found[0] == 16
    assert None in found
    assert found == sorted(found, key=lambda n: n is None)
    assert small.get(range(5)) == [16] * 5


@pytest.mark.parametrize("options", [{}, BY_COPY], ids=["lent", "copied"])
def test_a_caller_that_gives_up_keeps_memory_until_the_end(
    options: dict[str, Any], node: Node, make: Make
) -> None:
    node.start()
    backend = make(**options)
    backend.put(range(8))
    manager = backend.memory.memory_allocator.pin_allocator.address_manager
    free = manager.get_free_size()

    async def cancelled() -> None:
        for _ in range(50):
            task = asyncio.ensure_future(backend.connector.batched_get(backend.keys(*range(8))))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    backend.run(cancelled())
    until(lambda: manager.get_free_size() == free)
    until(lambda: node.pinned() == 0)
    chunk = backend.chunk(100)

    async def put_cancelled() -> None:
        task = asyncio.ensure_future(backend.connector.batched_put(backend.keys(100), [chunk]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        chunk.ref_count_down()  # as LMCache does, whatever became of it

    backend.run(put_cancelled())
    until(lambda: manager.get_free_size() == free)
    assert backend.get([100]) in ([16], [None])


def test_a_caller_that_gives_up_late(node: Node, make: Make) -> None:
    """While what has a header is looked at, full chunks are there already."""
    node.start()
    backend = make(**BY_COPY)
    backend.put([1])
    manager = backend.memory.memory_allocator.pin_allocator.address_manager
    free = manager.get_free_size()
    kept = []  # so that nothing is given back by being forgotten
    allocate = backend.connector._allocate
    backend.connector._allocate = lambda *what: kept.append(allocate(*what)) or kept[-1]

    async def cancelled() -> None:
        looking = asyncio.Event()

        async def views(names: list[str]) -> None:
            looking.set()
            await asyncio.get_running_loop().create_future()

        backend.connector._views = views
        task = asyncio.ensure_future(backend.connector.batched_get(backend.keys(1, 2)))
        await looking.wait()
        assert manager.get_free_size() < free
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    backend.run(cancelled())
    assert manager.get_free_size() == free


def test_a_pool_that_does_not_answer_is_asked_once(node: Node, make: Make) -> None:
    node.start()
    backend = make(**BY_COPY)
    backend.put([1])
    node.stop()
    asked = []
    backend.connector._views = lambda names: asked.append(names)
    assert backend.get([1, 2]) == [None, None]
    assert asked == []


def test_a_process_that_only_looks_up_has_no_memory(node: Node, make: Make) -> None:
    """LMCache's scheduler with enable_scheduler_bypass_lookup."""
    node.start()
    backend = make()
    backend.put([1, 2])
    only = RemoteBackend(backend.config, backend.metadata, backend.loop, None, "cpu")
    assert only.batched_contains(backend.keys(1, 2, 3)) == 2
    assert only.batched_get_blocking(backend.keys(1)) == [None]
    backend.run(only.connection.close())


def test_closing_the_backend_alone_leaves_the_memory_as_it_was(node: Node) -> None:
    node.start()
    backend = Backend()
    free = backend.memory.close
    backend.connector._idle.clear()  # something is under way
    backend.run(backend.connector.close())
    assert backend.memory.close != free
    assert backend.memory.close.__func__ is type(backend.memory).close
    # The hook of before, which somebody else may have: it waits for nothing.
    freeing = threading.Thread(target=free)
    freeing.start()
    freeing.join(5)
    assert not freeing.is_alive()
    backend.backend.close()
    backend.stop()


def test_a_restart_with_a_warm_pool(node: Node) -> None:
    node.start()
    first = Backend()
    first.put([1, 2])
    first.put([3], tokens=5)
    first.close()
    again = Backend()
    assert again.contains([1, 2, 3, 4]) == 3
    assert again.get([1, 2, 3, 4]) == [16, 16, 5, None]
    again.close()


def test_the_last_store_before_the_end_is_not_lost(node: Node) -> None:
    """It was handed to LMCache's loop, and has not begun."""
    node.start()
    backend = Backend()
    gate, closing = threading.Event(), threading.Thread(target=backend.close)
    chunk = backend.chunk(1)
    backend.loop.call_soon_threadsafe(gate.wait)
    backend.backend.batched_submit_put_task(backend.keys(1), [chunk])
    chunk.ref_count_down()
    closing.start()
    closing.join(0.2)
    gate.set()
    closing.join(30)
    again = Backend()
    assert again.get([1]) == [16]
    again.close()


def test_closing_while_chunks_are_stored(node: Node) -> None:
    """LMCache frees its memory first; native threads must have ended with it by then."""
    node.start()
    backend = Backend()
    numbers = list(range(300))
    chunks = [backend.chunk(number) for number in numbers]
    backend.backend.batched_submit_put_task(backend.keys(*numbers), chunks)
    for chunk in chunks:
        chunk.ref_count_down()
    closing = threading.Thread(target=backend.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    again = Backend()
    assert again.get(numbers) == [16] * 300
    again.close()
    assert os.path.exists(node.socket)
