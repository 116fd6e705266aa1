"""The remote connector under LMCache's own RemoteBackend."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.utils import LayerCacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat

from moonpool.connectors.lmcache.remote import identity
from tests.connectors.lmcache.conftest import Node
from tests.connectors.lmcache.real.beds import Backend
from tests.core.store_bed import until

MIB = 1 << 20
Make = Callable[..., Backend]


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


def test_nothing_but_the_url(node: Node, make: Make) -> None:
    node.start()
    backend = make()
    assert backend.contains([1, 2, 3]) == 0
    assert backend.get([1]) == [None]
    backend.put([1, 2, 3])
    assert backend.contains([1, 2, 3, 4]) == 3
    assert backend.contains([1, 9, 3]) == 1
    assert backend.get([1, 2, 3, 4]) == [16, 16, 16, None]
    assert node.pinned() == 0


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


def test_prefixes_without_waiting(node: Node, make: Make) -> None:
    node.start()
    backend = make()
    backend.put([1, 2, 4])
    keys = backend.keys(1, 2, 3, 4)
    connector = backend.connector
    assert backend.run(connector.batched_async_contains("lookup", keys)) == 2
    free = backend.memory.memory_allocator.pin_allocator.address_manager.get_free_size()
    chunks = backend.run(connector.batched_get_non_blocking("lookup", keys))
    assert len(chunks) == 2
    for chunk in chunks:
        chunk.ref_count_down()
    assert backend.memory.memory_allocator.pin_allocator.address_manager.get_free_size() == free


def test_layers_and_compressed_bytes(node: Node, make: Make) -> None:
    node.start()
    backend = make()
    shape, dtype = torch.Size([16, 2, 32]), torch.bfloat16
    layer = LayerCacheEngineKey("org/model", 1, 0, 5, dtype, layer_id=1)
    chunk = backend.memory.allocate([shape], [dtype], MemoryFormat.KV_T2D)
    chunk.tensor.fill_(3)
    backend.run(backend.connector.put(layer, chunk))
    (found,) = backend.run(backend.connector.batched_get([layer]))
    assert (found.get_memory_format(), found.tensor.shape) == (MemoryFormat.KV_T2D, shape)
    assert torch.equal(found.tensor, chunk.tensor)
    (key,) = backend.keys(6)
    backend.run(backend.connector.put(key, BytesBufferMemoryObj(b"compressed")))
    found = backend.run(backend.connector.get(key))
    assert (found.get_memory_format(), bytes(found.byte_array)) == (MemoryFormat.BINARY_BUFFER, b"compressed")


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float16},
        {"chunk_size": 32},
        {"model": "org/other"},
        {"extra_config": {"unused": 1}, "remote_url": "moonpool://?namespace=other"},
    ],
)
def test_what_is_not_the_same_is_not_there(node: Node, make: Make, other: dict[str, Any]) -> None:
    node.start()
    make().put([1])
    stranger = make(**other)
    assert stranger.contains([1]) == 0
    assert stranger.get([1]) == [None]


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
    full = backend.chunk(1)
    names = [key.to_string() for key in keys]
    other = backend.memory.allocate([torch.Size([2, 2, 16, 32])], [torch.float16], MemoryFormat.KV_2LTD)
    backend.run(backend.connector.put(keys[0], other))
    client.put(names[1:], [b"", bytes(64 + full.get_size()), bytes(10_000)])
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
    small = make(max_local_cpu_size=0.0001)  # room for 26 chunks
    found = small.get(range(60))
    assert found[0] == 16
    assert None in found
    assert found == sorted(found, key=lambda n: n is None)
    assert small.get(range(5)) == [16] * 5


def test_a_caller_that_gives_up_keeps_memory_until_the_end(node: Node, make: Make) -> None:
    node.start()
    backend = make()
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
