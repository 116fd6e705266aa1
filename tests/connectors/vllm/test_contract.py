"""The connector against the class that the installed vLLM wants: each hook is overridden, or there is a
reason not to, and each call of vLLM fits ours."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moonpool.connectors.vllm import compat
from tests.connectors.forks import ForkedProcess
from tests.connectors.vllm.processes import environment, warm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# Hooks of vLLM 0.26 to 0.33 that stay as they are in the base class.
INHERITED = {
    "role": "as it was given",
    "clear_connector_metadata": "the base class keeps the step's plan",
    "has_connector_metadata": "the base class keeps the step's plan",
    "handle_preemptions": "blocks that are being saved are held by reference",
    "finish_forward": "saves begin in wait_for_save",
    "reset_capture_state": "nothing of ours is in a CUDA graph",
    "get_mem_pool_context": "the KV cache is vLLM's to allocate",
    "set_host_xfer_buffer_ops": "there is no copy of the KV cache in host memory",
    "get_kv_connector_kv_cache_events": "the node publishes what the pool holds",
    "bind_kv_cache_manager": "calls bind_gpu_block_pool",
    "get_loaded_kv_cache_group_ids": "a load fills all groups",
    "get_external_cache_hit_sources": "_cache_hit_source is the answer",
    "register_finished_partial_tail": "only whole blocks are stored",
    "get_required_kvcache_layout": "any will do",
    "requires_piecewise_for_cudagraph": "no hook runs within a layer",
    "get_finished_count": "every rank reports",
    "supports_divergent_local_hybrid_hits": "a load begins where vLLM's own hit ends in all groups",
    "prefer_cross_layer_blocks": "to 0.28: any layout will do",
    "register_cross_layers_kv_cache": "to 0.28: only called where prefer_cross_layer_blocks says so",
    "supports_sleep_mode": "from 0.33, which was not run: as the base class has it",
}


INHERITED_BY_ENCODERS = {
    "role": "as it was given",
    "is_producer": "as it was given",
    "is_consumer": "as it was given",
    "clear_connector_metadata": "the base class keeps the step's plan",
    "register_caches": "vLLM's cache of outputs comes with each call",
    "start_save_caches": "what vLLM's cache has was stored when it was computed",
    "update_state_after_free": "a save keeps its tensor",
    "has_pending_push_work": "saves end without a step",
}


def test_each_hook_is_ours_or_left_for_a_reason(vllm_python: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with open(tmp_path / "log", "wb") as log:
        script = Path(__file__).with_name("contract.py")
        process = ForkedProcess(
            warm(vllm_python), [str(script), writer], environment(tmp_path), stdout=log, stderr=log
        )
    os.close(writer)
    with os.fdopen(reader) as answers:
        text = answers.read()
    assert process.wait(60) == 0, (tmp_path / "log").read_text()
    answer: dict[str, Any] = json.loads(text)
    assert not compat.is_too_old(answer["version"])
    for kind, inherited in (("kv", INHERITED), ("encoder", INHERITED_BY_ENCODERS)):
        found = answer[kind]
        assert [name for name in found["theirs"] if name not in {*found["ours"], *inherited}] == []
        assert found["differ"] == {}
    assert answer["watches"] == [True, True, True]
    assert answer["cached_block"] == ["self", "block_hash", "kv_cache_group_ids"]
