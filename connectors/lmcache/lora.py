"""LoRA adapters. vLLM computes other KV with each of them, and LMCache's keys do not say with which:
in-process a tag of the request must, and what has none is not shared by an engine that serves adapters.
"""

from __future__ import annotations

import sys
from typing import Any

TAG = "lora"
SENTENCE = (
    f"this vLLM serves LoRA adapters, which LMCache's keys do not tell apart; what has no tag {TAG!r} is "
    f'neither stored nor retrieved. Give each request kv_transfer_params: {{"lmcache.tag.{TAG}": "NAME"}}, '
    f"with the name of its adapter, or for the model itself any name that no adapter has"
)


def serves_lora() -> bool:
    """Whether the vLLM that is starting in this process may apply adapters; False where nothing says so.

    LMCache, which makes us, is made by a worker of vLLM while that has its configuration at hand."""
    module = sys.modules.get("vllm.config")
    current = getattr(module, "get_current_vllm_config_or_none", None)
    return current is not None and getattr(current(), "lora_config", None) is not None


def tagged(key: Any) -> bool:
    """Whether LMCache's key says with which adapter."""
    return any(name == TAG for name, _ in key.tags or ())
