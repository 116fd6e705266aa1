"""A real vLLM whose weights were never read on this host: it computes alone, and joins the pool later."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import pytest

from moonpool.connectors.weights import SMALL_BYTES
from tests.connectors.vllm.conftest import KV_CONFIG, make_prompt, tokens_of
from tests.connectors.vllm.processes import Engine, Node

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

DEADLINE_S = 120.0


def test_it_joins_once_its_weights_are_known(vllm_python: str, models: list[Path], tmp_path: Path) -> None:
    model = shutil.copytree(models[0], tmp_path / "model")
    with open(model / "more.gguf", "wb") as file:  # which vLLM does not load
        file.truncate(SMALL_BYTES + 1)
    with tempfile.TemporaryDirectory(prefix="moonpool-") as runtime:
        node = Node(Path(runtime)).start()
        engine = Engine(
            vllm_python, model, Path(runtime), tmp_path / "engine.log", kv_transfer_config=KV_CONFIG
        )
        try:
            prompt = make_prompt(8_100, 200)
            first = engine.call("generate", prompts=[prompt])
            assert "this engine computes alone until then" in engine.logged()
            deadline_s = time.monotonic() + DEADLINE_S
            while not engine.call("joined"):
                assert time.monotonic() < deadline_s
                engine.call("generate", prompts=[[1, 2, 3]])
            assert "this engine can join the pool now" in engine.logged()
            engine.call("generate", prompts=[prompt])  # saves what the engine has
            engine.call("drain")
            assert engine.call("reset_prefix_cache")
            again = engine.call("generate", prompts=[prompt])
            assert tokens_of(again) == tokens_of(first)
            assert again["outputs"][0]["pool"]["pool_tokens"] == 192
        finally:
            engine.close()
            node.stop()
