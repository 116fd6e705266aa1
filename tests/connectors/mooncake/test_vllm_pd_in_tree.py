"""vLLM's own MooncakeConnector, unchanged, over the drop-in's engine: what a prefill engine computed is
pushed into a decode engine, which answers as one engine alone does.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.processes import Engine, EngineFailed

HERE = Path(__file__).parent
MODEL_SCRIPT = HERE.parents[2] / "examples" / "demo" / "tiny_model.py"
PROMPT_TOKENS, BLOCK_TOKENS, NEW_TOKENS = (300, 33, 1000), 32, 12
PREFILL_ID = "prefill-1"
STEPS_S = 1.0  # for how long the prefill engine goes on stepping before its blocks are looked at


class InTree(Engine):
    driver = HERE / "in_tree_pd.py"


def kv_config(role: str) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": "MooncakeConnector",
            "kv_role": role,
            "engine_id": PREFILL_ID if role == "kv_producer" else "decode-1",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 2},
        }
    }


def asked(transfer: str, bootstrap: str | None = None) -> dict[str, Any]:
    """kv_transfer_params of one request: what a proxy gives a prefill engine, or with that one's address the
    decode engine."""
    if bootstrap is None:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_engine_id": PREFILL_ID,
        "remote_bootstrap_addr": bootstrap,
    }


def tokens(answer: dict[str, Any]) -> list[list[int]]:
    return [one["tokens"] for one in answer["outputs"]]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_one_engine_computed_another_goes_on_with(
    vllm_python: str, free_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(free_port))
    model = tmp_path / "model"
    subprocess.run([sys.executable, MODEL_SCRIPT, model], check=True)
    source = random.Random(11)
    prompts = [[source.randrange(256) for _ in range(n)] for n in PROMPT_TOKENS]
    engines = {
        role: InTree(vllm_python, model, tmp_path, tmp_path / f"{role}.log", **kv_config(role))
        for role in ("kv_producer", "kv_consumer")
    }
    prefill, decode = engines["kv_producer"], engines["kv_consumer"]
    try:
        alone = prefill.call("generate", prompts=prompts, max_tokens=NEW_TOKENS)
        assert prefill.call("reset_prefix_cache")
        for turn in ("a", "b"):  # in the second one the engines know each other
            names = [f"{turn}{i}" for i in range(len(prompts))]
            gives = [asked(name) for name in names]
            prefill.call("generate", prompts=prompts, max_tokens=1, params=gives)
            kept = prefill.call("drain", timeout_s=STEPS_S)  # which never has nothing left to do
            assert kept["used_blocks"] > 0  # for the decode engine
            takes = [asked(name, f"http://127.0.0.1:{free_port}") for name in names]
            decoded = decode.call("generate", prompts=prompts, max_tokens=NEW_TOKENS, params=takes)
            assert tokens(decoded) == tokens(alone)
            assert [one["cached"] for one in decoded["outputs"]] == list(PROMPT_TOKENS)
            prefill.call("generate", prompts=[[1, 2, 3]], max_tokens=2)  # whose steps let the blocks go
            assert prefill.call("drain")["used_blocks"] == 0
            assert decode.call("reset_prefix_cache")
        # A decode engine that is gone costs the prefill engine nothing.
        decode.process.kill()
        again = prefill.call("generate", prompts=prompts, max_tokens=NEW_TOKENS)
        assert tokens(again) == tokens(alone)
    except (AssertionError, EngineFailed):
        for role, engine in engines.items():
            print(f"---- {role}\n{engine.logged()[-6000:]}")
        raise
    finally:
        for engine in engines.values():
            engine.close()
