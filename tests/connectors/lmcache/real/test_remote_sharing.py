"""Who shares chunks through the remote connector: the same keys, other bytes."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache.integration.vllm.utils import extract_request_configs_from_sampling_params
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import MemoryFormat

from moonpool.connectors.lmcache import remote_connector
from moonpool.connectors.lmcache.identity import remote_identity
from moonpool.connectors.lmcache.remote_connector import FULL
from moonpool.connectors.weights import weights_digest
from tests.connectors.lmcache.real.beds import (
    CONFIG,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    Backend,
    Make,
    expected,
)
from tests.connectors.own_node import Node
from tests.connectors.vllm.configs import config as vllm_config
from tests.core.store_bed import until

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
    return remote_identity(config, metadata, other.get("form", ""))


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
    marks = {remote_identity(rank.config, rank.metadata) for rank in ranks}
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
    untold, by_name = make(), make(tags={"lora": "sql"})
    first, second = make(tags={"lora": "a" * 64}), make(tags={"lora": "b" * 64})
    for ambiguous in (untold, by_name):  # a name may stand for other bytes tomorrow
        ambiguous.put([1, 2])
    assert node.objects() == 1
    assert by_name.contains([1]) == 0
    assert untold.contains([1]) == 0
    assert untold.run(untold.connector.batched_async_contains("", untold.keys(1))) == 0
    assert untold.get([1]) == [None]
    assert said().count('"lmcache.tag.lora"') == 2  # once each
    first.put([1])
    assert (first.contains([1]), second.contains([1])) == (1, 0)
    assert (first.get([1]), second.get([1])) == ([16], [None])
    assert make(tags={"lora": "none"}).contains([1]) == 0


def test_engines_that_compute_otherwise_share_nothing(
    node: Node,
    make: Make,
    said: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One model to LMCache, in a vLLM each: with other weights, overrides, and one that cannot share."""
    node.start()
    vllm = ModuleType("vllm.config")
    monkeypatch.setitem(sys.modules, "vllm.config", vllm)
    weights, times = tmp_path / "model.safetensors", itertools.count(1)

    def engine(content: bytes, **config: Any) -> Backend:
        weights.write_bytes(content)
        os.utime(weights, ns=(now := next(times), now))  # each another, however coarse the clock of files is
        one = vllm_config(tmp_path)
        one.lora_config = None
        vars(one.model_config.hf_config).update(config)
        vllm.get_current_vllm_config_or_none = lambda: one  # type: ignore[attr-defined]
        return make()

    first, same = engine(b"first"), engine(b"first")
    tuned, overridden = engine(b"tuned"), engine(b"first", rms_norm_eps=0.1)
    first.put([1])
    assert [each.contains([1]) for each in (first, same, tuned, overridden)] == [1, 1, 0, 0]
    weights.unlink()
    vllm.get_current_vllm_config_or_none = lambda: vllm_config(tmp_path)  # type: ignore[attr-defined]
    apart = make()
    apart.put([1, 2])
    assert (apart.contains([1]), apart.get([1]), node.objects()) == (0, [None], 1)
    assert said().count("nothing is stored or retrieved: ") == 1


def test_until_the_weights_of_vllm_were_read_it_is_as_without_a_node(
    node: Node,
    make: Make,
    folder: Path,
    held: threading.Event,
    said: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    monkeypatch.setattr(remote_connector, "identity_with", lambda *_: {"revision": weights_digest(folder)})
    node.start()
    early = make()
    early.put([1])
    assert (early.contains([1]), node.objects()) == (0, 0)
    assert "LMCache goes on without the pool until then" in said()
    held.set()
    until(lambda: "joined the pool" in said(), 60)
    early.put([1])
    assert (early.contains([1]), make().contains([1])) == (1, 1)


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
        remote_identity(LMCacheEngineConfig.from_dict({"remote_serde": serde}), metadata)
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
