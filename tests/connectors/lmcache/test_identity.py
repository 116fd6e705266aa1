from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moonpool.connectors.lmcache.identity import NAME_BYTES_MAX, fingerprint, layout_mark, name_of
from moonpool.connectors.lmcache.vllm_engine import identity_of_engine
from moonpool.core.errors import ConfigError
from tests.connectors.vllm.configs import config as vllm_config


def test_a_name_is_the_key_until_it_is_too_long() -> None:
    key = "org/model@2@1@-4ffc01@bfloat16"
    assert name_of(key) == key
    long = "ü" * NAME_BYTES_MAX
    assert name_of(long) != name_of(long + "x")
    assert len(name_of(long).encode()) < NAME_BYTES_MAX


def test_every_field_counts() -> None:
    fields = {"model": "m", "chunk_tokens": 256, "kv_dtype": "bfloat16", "kv_shape": [8, 2, 256, 8, 128]}
    marks = {fingerprint("remote", fields), fingerprint("l2", fields)}
    for key, value in (("model", "n"), ("chunk_tokens", 128), ("kv_dtype", "float16"), ("kv_shape", [8])):
        marks.add(fingerprint("remote", {**fields, key: value}))
    assert len(marks) == 6
    assert {len(mark) for mark in marks} == {32}


def test_layouts_of_equal_size_differ() -> None:
    class Dtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert layout_mark([(2, 8)], [Dtype()]) == layout_mark([[2, 8]], ["bfloat16"])
    assert layout_mark([(2, 8)], ["bfloat16"]) != layout_mark([(2, 8)], ["float16"])
    assert layout_mark([(2, 8)], ["bfloat16"]) != layout_mark([(8, 2)], ["bfloat16"])


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Inside of a vLLM with this configuration."""

    def enter(config: Any) -> None:
        module = ModuleType("vllm.config")
        module.get_current_vllm_config_or_none = lambda: config  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm.config", module)

    return enter


def test_outside_of_vllm_nothing_tells_engines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.config", raising=False)
    assert identity_of_engine("worker") is None
    assert identity_of_engine("scheduler") is None


def test_what_vllm_computes_with_counts(tmp_path: Path, inside: Callable[[Any], None]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 2048}

    def marks(change: Callable[[Any], None]) -> bytes:
        one = vllm_config(tmp_path)
        one.model_config.max_model_len = 4096
        change(one)
        inside(one)
        return fingerprint("remote", {"engine": identity_of_engine("worker")})

    def text(one: Any) -> Any:
        return one.model_config.hf_text_config

    changes: list[Callable[[Any], None]] = [
        lambda one: None,
        lambda one: setattr(text(one), "hidden_size", 512),
        lambda one: setattr(text(one), "rope_parameters", longrope),
        lambda one: setattr(one.model_config, "quantization", "fp8"),
        lambda one: setattr(one.cache_config, "cache_dtype", "fp8_e5m2"),
        lambda one: setattr(one.cache_config, "kv_cache_dtype_skip_layers", ["0"]),
        lambda one: setattr(one.cache_config, "kv_cache_dtype_skip_layers", ["1"]),
    ]
    found = [marks(change) for change in changes]
    assert len(set(found)) == len(changes)
    assert marks(changes[0]) == found[0]
    (tmp_path / "model.safetensors").write_bytes(b"\1" * 100)
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))  # another time, however coarse the clock of files is
    assert marks(changes[0]) not in found


def test_engines_that_share_nothing(tmp_path: Path, inside: Callable[[Any], None]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    one = vllm_config(tmp_path)
    one.model_config.use_mla = True
    one.scheduler_config.enable_chunked_prefill = one.cache_config.enable_prefix_caching = False
    inside(one)
    with pytest.raises(ConfigError, match="answers wrongly when it continues"):
        identity_of_engine("worker")
    inside(None)
    with pytest.raises(ConfigError, match="enable_scheduler_bypass_lookup"):
        identity_of_engine("scheduler")
