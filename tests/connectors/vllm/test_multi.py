"""A real vLLM with the connector, under its name Moonpool, behind vLLM's MultiConnector, beside one that
stores on disk."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.connectors.vllm.conftest import (
    BLOCK_TOKENS,
    KV_CONFIG,
    Line,
    make_prompt,
    tokens_of,
)
from tests.connectors.vllm.processes import Engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = 300
LOADABLE = (TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
JOIN_S = 100.0
NOTHING_LEFT = {"used_blocks": 0, "requests": 0, "pins": 0, "saves": 0, "lookups": 0, "leases": 0}


def test_beside_another_connector(line: Line, vllm_python: str, models: list[Path], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    children = [
        {
            "kv_connector": "Sibling",
            "kv_connector_module_path": "sibling_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(disk)},
        },
        KV_CONFIG | {"kv_connector": "Moonpool"},
    ]
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    stored, other = make_prompt(9_200, TOKENS), make_prompt(9_201, TOKENS)
    expected = line.expected([stored, other])
    assert tokens_of(line.first.call("generate", prompts=[stored])) == expected[:1]
    line.first.call("drain")
    engine = Engine(
        vllm_python,
        models[0],
        line.node.runtime,
        tmp_path / "engine.log",
        kv_transfer_config=several,
        disable_hybrid_kv_cache_manager=True,
        max_num_batched_tokens=2048,  # its sibling stores prompts of one step
    )
    try:
        deadline_s = time.monotonic() + JOIN_S
        while not engine.call("joined"):  # its handshake comes with a step
            assert time.monotonic() < deadline_s
            engine.call("generate", prompts=[[1, 2, 3]])
        answer = engine.call("generate", prompts=[stored, other])
        assert tokens_of(answer) == expected
        assert [output["pool"]["pool_tokens"] for output in answer["outputs"]] == [LOADABLE, 0]
        assert engine.call("drain") == NOTHING_LEFT
        metrics = engine.call("metrics")
        assert metrics["moonpool_connector_loaded_tokens_total"] == LOADABLE
        assert metrics["moonpool_connector_saved_objects_total"] > 0

        # What this one stored, another finds; and what its sibling stored it takes from there.
        assert line.first.call("reset_prefix_cache")
        again = line.first.call("generate", prompts=[other])
        assert tokens_of(again) == expected[1:]
        assert again["outputs"][0]["pool"]["pool_tokens"] == LOADABLE
        assert any(disk.iterdir())
        assert engine.call("reset_prefix_cache")
        answer = engine.call("generate", prompts=[other])
        assert tokens_of(answer) == expected[1:]
        assert answer["outputs"][0]["pool"]["pool_tokens"] == 0
        assert answer["outputs"][0]["cached"] > 0
        assert engine.call("drain") == NOTHING_LEFT
    finally:
        engine.close()
