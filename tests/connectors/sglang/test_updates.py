"""What decides about KV beside the model's files: weights that are replaced at runtime, LoRA, scales."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moonpool.connectors.objects import Refused
from moonpool.connectors.sglang import compat, updates
from moonpool.connectors.sglang import pool as pool_module
from tests.connectors.own_node import Node
from tests.connectors.sglang import sglang_cpu
from tests.connectors.sglang.conftest import Make
from tests.connectors.sglang.fakes import (
    Engine,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    WeightUpdater,
    page_keys,
)
from tests.connectors.sglang.server import HERE, environment, run


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node hangs here only where the machine does."""
    monkeypatch.setattr(pool_module, "TIMEOUT_S", 20.0)
    monkeypatch.setattr(pool_module, "LONG_WAIT_S", 20.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda updater: updater.update_weights_from_disk("another/model"),
        lambda updater: updater.receive_weights_from_distributed(),
        lambda updater: updater.begin_weight_update(),
    ],
)
def test_replaced_weights_leave_the_pool(
    make: Make, node: Node, caplog: pytest.LogCaptureFixture, call: Any
) -> None:
    node.start()
    pool, keys = MHATokenToKVPoolHost(), page_keys(2)
    backend = make(pool)
    assert backend.batch_set_v1(keys, pool.slots(0, 1)) == [True] * 2
    updater = WeightUpdater()  # made before or after: the class is watched
    updater.init_weights_update_group()
    assert updater.update_weights_from_disk("same", weight_name_filter=str.isalpha) == "same"
    assert backend.batch_exists(keys) == 2, "experts that move between ranks change nothing"
    call(updater)
    assert "this engine leaves the pool: the weights of this engine were replaced" in caplog.text
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, pool.slots(2, 3)) == [False] * 2
    assert backend.batch_set_v1(page_keys(1, seed=1), pool.slots(0)) == [False]
    with pytest.raises(Refused, match="start it again with"):  # detached and attached again
        make(pool, {"require_pool": True})
    assert make(pool).batch_exists(keys) == 0
    assert caplog.text.count("leaves the pool") == 1


def test_weights_replaced_before_a_backend_is_attached(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen where our plugin was loaded."""

    class Updater:
        def update_weights_from_disk(self, model_path: str) -> None: ...

    module: Any = ModuleType(updates.MODULE)
    module.WeightUpdater = Updater
    monkeypatch.setitem(sys.modules, updates.MODULE, module)
    monkeypatch.setattr(updates, "_replaced", False)
    updates.watch_loaded()
    updates.watch_loaded()
    node.start()
    Updater().update_weights_from_disk("another")
    with pytest.raises(Refused, match="were replaced"):
        make(MHATokenToKVPoolHost(), {"require_pool": True})


def test_a_detached_backend_is_forgotten(make: Make, node: Node) -> None:
    class Follower:
        def weights_replaced(self) -> None:
            raise AssertionError("it is gone")

    follower = Follower()
    updates.follow(follower)
    del follower
    gc.collect()
    updates._tell()


@pytest.mark.parametrize("updater", [None, type("WeightUpdater", (), {})])
def test_an_sglang_whose_updates_are_not_seen(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, updater: type | None
) -> None:
    node.start()
    monkeypatch.setattr(compat, "weight_updater", lambda: updater)
    with pytest.raises(Refused, match=r"replaced; use SGLang 0\.5|looks for it; use SGLang 0\.5"):
        make(MHATokenToKVPoolHost(), {"require_pool": True})


def test_lora_without_names_in_the_keys(
    make: Make, node: Node, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang 0.5.18: an adapter's pages would have the names of the base model's."""
    node.start()
    monkeypatch.setattr(compat, "keys_have_namespaces", lambda: False)
    pool, keys = MHATokenToKVPoolHost(), page_keys(1)
    caplog.set_level("INFO")
    assert make(pool).batch_set_v1(keys, pool.slots(0)) == [True]
    assert "leave cache_salt and extra_key out" in caplog.text
    for enabled, paths in ((True, None), (None, ["one=/no/such"]), (None, [SimpleNamespace()])):
        engine.enable_lora, engine.lora_paths = enabled, paths
        assert make(pool).batch_exists(keys) == 0
        with pytest.raises(Refused, match="leave LoRA adapters out"):
            make(pool, {"require_pool": True})


def test_adapters_are_known_by_their_files(make: Make, node: Node, engine: Engine, folder: Path) -> None:
    node.start()
    adapter = folder / "adapter"
    adapter.mkdir()
    weights, scaling = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    weights.write_bytes(b"trained once")
    scaling.write_text('{"lora_alpha": 16}')
    engine.lora_paths = [SimpleNamespace(lora_name="one", lora_path=str(adapter))]
    pool, keys = MHATokenToKVPoolHost(), page_keys(1)
    assert make(pool).batch_set_v1(keys, pool.slots(0)) == [True]
    for same in (
        [f"one={adapter}"],
        {"one": str(adapter)},
        [{"lora_name": "one", "lora_path": str(adapter)}],
    ):
        engine.lora_paths = same
        assert make(pool).batch_exists(keys) == 1
    weights.write_bytes(b"trained again")
    assert make(pool).batch_exists(keys) == 0
    weights.write_bytes(b"trained once")
    scaling.write_text('{"lora_alpha": 32}')
    assert make(pool).batch_exists(keys) == 0
    engine.lora_paths = None
    assert make(pool).batch_exists(keys) == 0
    engine.lora_paths = ["/no/such/adapter"]
    with pytest.raises(ValueError, match="cannot tell which weights the adapter"):
        make(pool, {"require_pool": True})


def test_until_the_weights_were_read_it_is_as_without_a_node(
    make: Make,
    node: Node,
    engine: Engine,
    folder: Path,
    held: threading.Event,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(pool_module, "RETRY_S", 0.0)
    node.start()
    engine.model_path = str(folder / "model")
    Path(engine.model_path).mkdir()
    (folder / "model" / "model.safetensors").write_bytes(b"w" * 1000)
    pool, keys = MHATokenToKVPoolHost(), page_keys(1)
    backend = make(pool)
    assert backend.batch_set_v1(keys, pool.slots(0)) == [False]
    assert backend.batch_exists(keys) == 0
    assert caplog.text.count("this engine serves without the pool until then") == 1
    assert not backend.clear()
    held.set()
    deadline_s = time.monotonic() + 60
    while backend.batch_set_v1(keys, pool.slots(0)) != [True]:
        assert time.monotonic() < deadline_s
    assert caplog.text.count("joined the pool") == 1
    assert make(pool, {"require_pool": True}).batch_exists(keys) == 1


def test_weights_that_have_no_name_after_all(
    make: Make,
    node: Node,
    engine: Engine,
    folder: Path,
    held: threading.Event,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "RETRY_S", 0.0)
    node.start()
    engine.model_path = str(folder / "model")
    Path(engine.model_path).mkdir()
    (folder / "model" / "model.safetensors").write_bytes(b"w" * 1000)
    pool, keys = MHATokenToKVPoolHost(), page_keys(1)
    backend = make(pool)
    (folder / "model" / "model.safetensors").unlink()
    held.set()
    for _ in range(3):
        assert backend.batch_exists(keys) == 0
    assert caplog.text.count("this engine serves without the pool:") == 1
    assert "holds no weight file" in caplog.text


def test_scales_and_torchao(make: Make, node: Node, engine: Engine, folder: Path) -> None:
    node.start()
    scales = folder / "scales.json"
    scales.write_text("[1.0]")
    engine.quantization_param_path = str(scales)
    pool, keys = MHATokenToKVPoolHost(), page_keys(1)
    assert make(pool).batch_set_v1(keys, pool.slots(0)) == [True]
    assert make(pool).batch_exists(keys) == 1
    scales.write_text("[1.5]")
    assert make(pool).batch_exists(keys) == 0
    scales.write_text("[1.0]")
    engine.torchao_config = "int8wo"
    assert make(pool).batch_exists(keys) == 0


@pytest.mark.parametrize("load_format", ["remote_instance", "LoadFormat.RDMA", "flash_rl"])
def test_weights_from_elsewhere(make: Make, node: Node, engine: Engine, load_format: str) -> None:
    node.start()
    engine.load_format = load_format
    with pytest.raises(Refused, match="takes weights from elsewhere"):
        make(MHATokenToKVPoolHost(), {"require_pool": True})


def test_stages_that_do_not_tell_their_layers(
    make: Make, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """A hybrid model's KV counts its layers from 0 in every stage: two stages would share names."""
    node.start()
    keys = page_keys(1)
    stages = [MHATokenToKVPoolHost() for _ in range(2)]
    backends = [make(pool, pp_rank=rank, pp_size=2) for rank, pool in enumerate(stages)]
    assert "pipeline stage 1 says that it begins with the model's first layer" in caplog.text
    backends[0].register_mem_host_pool_v2(MambaPoolHost(), "mamba")
    assert "with a pool 'mamba' does not tell" in caplog.text
    for backend, pool in zip(backends, stages, strict=True):
        assert backend.batch_set_v1(keys, pool.slots(0)) == [False]
        assert backend.batch_exists(keys) == 0


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_real_sglang(tmp_path: Path) -> None:
    """The class that replaces weights is where it is looked for, with what the scheduler calls."""
    sglang_cpu.install(tmp_path / "plugin")
    env = environment(tmp_path, tmp_path / "plugin")
    assert "methods are watched" in run([str(HERE / "real_updates.py")], env, tmp_path / "log", 280)
