"""A configuration of vLLM as the connector reads it, and that of a tiny model for a real vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Of transformers; other tiny models are this one with changes.
LLAMA: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.08,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
}


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Dtype:
    """Prints as a torch.dtype does."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return f"torch.{self._name}"


def config(model: Path | str = "/nowhere", **extra: Any) -> Any:
    hf = HfConfig(
        hidden_size=256, rope_parameters={"rope_theta": 1e4}, _commit_hash=None, transformers_version="5"
    )
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra,
        kv_load_failure_policy="recompute",
        is_kv_producer=True,
        is_kv_consumer=True,
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(
            use_mla=False,
            get_total_num_kv_heads=lambda: 2,
            hf_config=hf,
            hf_text_config=hf,
            dtype=Dtype("float32"),
            quantization=None,
            model=str(model),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            world_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", calculate_kv_scales=False, enable_prefix_caching=True
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
