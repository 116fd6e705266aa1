"""What the connector needs to know about the engine it sits in, read once from vLLM's configuration into a
value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from moonpool.connectors.vllm import compat

_FULL_ATTENTION = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_TARGET_ONLY_DRAFTS = frozenset({"ngram", "ngram_gpu", "suffix"})  # speculation without a draft model's KV
_LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_ANY_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """block_tokens: tokens per block of the KV cache; groups: layer names of each KV cache group; kv_heads:
    of the whole model (1 for MLA); tp_size: tensor-parallel ranks; workers: ranks that report to one
    scheduler; may_load, may_save: from kv_role; recomputes: whether a failed load is recomputed
    (kv_load_failure_policy); engine_id: vLLM's name for this engine; dp_rank: which of its data-parallel
    replicas; zeroes_blocks: whether vLLM zeroes blocks before a step that uses them; refusal: one sentence
    why this engine cannot use the pool, or ""."""

    block_tokens: int
    groups: tuple[tuple[str, ...], ...]
    kv_heads: int
    tp_size: int = 1
    workers: int = 1
    may_load: bool = True
    may_save: bool = True
    recomputes: bool = True
    engine_id: str = ""
    dp_rank: int = 0
    zeroes_blocks: bool = False
    refusal: str = ""


def read_facts(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """The facts of this engine. Never raises for an engine that is merely unsupported: that is a
    ``refusal``."""
    groups = kv_cache_config.kv_cache_groups
    parallel = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    model = vllm_config.model_config
    return EngineFacts(
        block_tokens=int(groups[0].kv_cache_spec.block_size) if groups else 0,
        groups=tuple(tuple(group.layer_names) for group in groups),
        kv_heads=1 if model.use_mla else int(model.get_total_num_kv_heads()),
        tp_size=int(parallel.tensor_parallel_size),
        workers=int(parallel.world_size),
        may_load=bool(transfer.is_kv_consumer),
        may_save=bool(transfer.is_kv_producer),
        recomputes=transfer.kv_load_failure_policy == "recompute",
        engine_id=str(getattr(transfer, "engine_id", "") or ""),
        # Ranks of a dense model do not know each other: vLLM says data_parallel_rank 0 to each of them.
        dp_rank=int(getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))),
        zeroes_blocks=bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False)),
        refusal=_refusal(vllm_config, groups),
    )


def layer_number(name: str) -> int:
    """The number of the model's layer that the KV cache called ``name`` belongs to; 0 when the name tells
    none."""
    match = _LAYER_NUMBER.search(name) or _ANY_NUMBER.search(name)
    return int(match[1]) if match else 0


def _refusal(vllm_config: Any, groups: list[Any]) -> str:
    parallel = vllm_config.parallel_config
    if not groups:
        return "the model has no KV cache"
    for group in groups:
        for spec in _inner_specs(group.kv_cache_spec):
            if type(spec).__name__ not in _FULL_ATTENTION or getattr(spec, "non_causal", False):
                return (
                    f"the pool holds KV of full causal attention only, and the model has {_kind(spec)} layers"
                )
    if len(groups) > 1 and not compat.can_report_failed_requests():
        return "models with several KV cache groups need vLLM 0.30 or newer"
    if len({group.kv_cache_spec.block_size for group in groups}) > 1:
        return "the model's KV cache groups have blocks of different sizes"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"the pool does not know {name} above 1 yet"
    speculative = vllm_config.speculative_config
    if speculative is not None and getattr(speculative, "method", None) not in _TARGET_ONLY_DRAFTS:
        return "the pool does not hold the KV of draft models yet (speculative_config)"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "KV scales that each engine measures for itself (calculate_kv_scales) make its KV its own"
    return ""


def _inner_specs(spec: Any) -> list[Any]:
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [spec]


def _kind(spec: Any) -> str:
    return type(spec).__name__.removesuffix("Spec")
