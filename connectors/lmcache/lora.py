"""LoRA adapters. vLLM computes different KV with each adapter, but LMCache's keys do not name the adapter.
In-process, a tag of the request must name it; an engine that serves adapters does not share chunks without a
tag. The tag is a digest, since one name may stand for other bytes tomorrow, or on another engine."""

from __future__ import annotations

import re
from typing import Any

from moonpool.connectors.lmcache import vllm_engine

TAG = "lora"
NO_ADAPTER = "none"
SENTENCE = (
    f"this vLLM serves LoRA adapters, which LMCache's keys do not tell apart; what has no tag {TAG!r} that "
    f"is a digest is neither stored nor retrieved. Give each request kv_transfer_params: "
    f'{{"lmcache.tag.{TAG}": "DIGEST"}}, with what `python -m moonpool.connectors.adapters FOLDER` prints '
    f'for its adapter, or "{NO_ADAPTER}" for the model itself'
)
_DIGEST = re.compile(r"[0-9a-f]{64}")


def serves_lora() -> bool:
    """Whether the vLLM that starts in this process may apply adapters; False without such a vLLM."""
    return getattr(vllm_engine.current(), "lora_config", None) is not None


def tagged(key: Any) -> bool:
    """Whether LMCache's key has the digest of its adapter."""
    return any(
        name == TAG and (value == NO_ADAPTER or _DIGEST.fullmatch(str(value)) is not None)
        for name, value in key.tags or ()
    )
