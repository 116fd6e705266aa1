"""What the connector needs to know about the engine it sits in, read once from vLLM's configuration into a
value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.connectors import positions
from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.media_options import media_form, media_refusal, takes_media
from moonpool.connectors.vllm.pd.rank_pairs import Sizes
from moonpool.connectors.vllm.reach import FULL, Reach
from moonpool.connectors.vllm.states import State, read_state

_FULL_ATTENTION = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_TARGET_ONLY_DRAFTS = frozenset({"ngram", "ngram_gpu", "suffix"})  # speculation without a draft model's KV
# Load formats whose weights are the files at the model's path, and nothing else.
_LOAD_FORMATS = frozenset(
    (
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "pt", "npcache"),
        *("mistral", "sharded_state", "runai_streamer_sharded", "bitsandbytes", "gguf", "dummy"),
    )
)
_EXTERNAL_LAUNCHER = ("external_launcher", "ExecutorWithExternalLauncher")  # the option, and its class
_LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_KV_HEADS = re.compile("key_value_heads|kv_heads|head_kv|attention_groups")  # as configs of models name them
_ANY_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the connector needs of vLLM's configuration.

    block_tokens: tokens of a block: of the KV cache's, or where these differ by KV cache group the least
        common multiple (group_blocks.py).
    groups: layer names of each KV cache group.
    splits: of each group how many of its own blocks are parts of a block; (): one of each.
    reaches: how far back each group looks; (): all of them at everything.
    states: what the layers of each group have in the place of KV, None: KV; (): all have KV.
    kv_heads: KV heads of the whole model; 1 for MLA.
    unlike_heads: whether some of its layers have another number of them. vLLM then does not tell which ranks
        hold copies of a head.
    tp_size: tensor-parallel ranks.
    workers: ranks that report to one scheduler.
    may_load, may_save: from kv_role.
    recomputes: whether vLLM recomputes a failed load (kv_load_failure_policy).
    engine_id: vLLM's name for this engine.
    dp_rank: the data-parallel replica of this engine.
    zeroes_blocks: whether vLLM zeroes blocks before a step that uses them.
    takes_embeddings: whether requests may have embeddings in the place of tokens.
    media_form: how the engine makes KV of an image, a sound or a video, beside its content.
    media_refusal: why images, sounds and videos cannot be named, or "".
    hash_algorithm: how vLLM names blocks of its own prefix cache, "": in no way that other engines can use.
    adapter_form: how LoRA adapters are applied, as far as that changes KV.
    adapter_refusal: why requests with an adapter cannot use the pool, or "".
    refusal: one sentence why this engine cannot use the pool, or "".
    """

    block_tokens: int
    groups: tuple[tuple[str, ...], ...]
    kv_heads: int
    unlike_heads: bool = False
    splits: tuple[int, ...] = ()
    reaches: tuple[Reach, ...] = ()
    states: tuple[State | None, ...] = ()
    tp_size: int = 1
    workers: int = 1
    may_load: bool = True
    may_save: bool = True
    recomputes: bool = True
    engine_id: str = ""
    dp_rank: int = 0
    zeroes_blocks: bool = False
    takes_embeddings: bool = False
    media_form: str = ""
    media_refusal: str = ""
    hash_algorithm: str = ""
    adapter_form: str = ""
    adapter_refusal: str = ""
    refusal: str = ""

    @property
    def sizes(self) -> Sizes:
        """How its model is split over its workers."""
        return Sizes(self.kv_heads, self.tp_size, max(1, self.workers // self.tp_size))

    @property
    def has_plain_blocks(self) -> bool:
        """Whether all layers need all blocks, of one KV cache group, which vLLM names by SHA-256."""
        return len(self.groups) == 1 and not self.has_windows and bool(self.hash_algorithm)

    @property
    def has_windows(self) -> bool:
        """Whether some group does not need all blocks of a request, or its last block not all of its parts:
        NULL_BLOCK stands for these."""
        return bool(self.splits) or not all(reach.is_full for reach in self.reaches)

    @property
    def has_states(self) -> bool:
        """Whether layers of some group have a state in the place of KV."""
        return any(reach.state for reach in self.reaches)


def read_engine_config(vllm_config: Any, kv_cache_config: Any) -> EngineConfig:
    """The configuration of this engine. Never raises for an engine that is merely unsupported: that is a
    ``refusal``."""
    groups = kv_cache_config.kv_cache_groups
    parallel = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    model = vllm_config.model_config
    sizes = tuple(int(group.kv_cache_spec.block_size) for group in groups)
    return EngineConfig(
        block_tokens=math.lcm(*sizes) if sizes else 0,
        groups=tuple(tuple(group.layer_names) for group in groups),
        splits=_splits(sizes),
        reaches=tuple(_reach(_inner_specs(group.kv_cache_spec)[0]) or FULL for group in groups),
        states=tuple(_state(_inner_specs(group.kv_cache_spec)[0]) for group in groups),
        kv_heads=1 if model.use_mla else int(model.get_total_num_kv_heads()),
        unlike_heads=not model.use_mla and _unlike_heads(model),
        tp_size=int(parallel.tensor_parallel_size),
        workers=int(parallel.world_size),
        may_load=bool(transfer.is_kv_consumer),
        may_save=bool(transfer.is_kv_producer),
        recomputes=transfer.kv_load_failure_policy == "recompute",
        engine_id=str(getattr(transfer, "engine_id", "") or ""),
        # Ranks of a dense model do not know each other: vLLM passes data_parallel_rank 0 to each.
        dp_rank=int(getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))),
        zeroes_blocks=bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False)),
        takes_embeddings=bool(getattr(model, "enable_prompt_embeds", False)),
        media_form=media_form(model) if takes_media(model) else "",
        media_refusal=media_refusal(vllm_config) if takes_media(model) else "",
        hash_algorithm=compat.hash_algorithm(vllm_config),
        adapter_form=_adapter_form(vllm_config),
        adapter_refusal=_adapter_refusal(parallel),
        refusal=_refusal(vllm_config, groups),
    )


def _unlike_heads(model: Any) -> bool:
    """Whether the model's config has several numbers of KV heads, under whatever names."""
    config = getattr(model, "hf_text_config", model.hf_config)
    try:
        fields = config.to_dict()
    except Exception:  # of a model's own code: it must not keep the engine from its start
        fields = vars(config)
    return len(set(_kv_head_counts(fields))) > 1


def _kv_head_counts(fields: Any) -> Iterator[int]:
    if isinstance(fields, Mapping):
        for name, value in fields.items():
            if _KV_HEADS.search(str(name)):
                yield from _numbers(value)
            else:
                yield from _kv_head_counts(value)
    elif isinstance(fields, list | tuple):
        for each in fields:
            yield from _kv_head_counts(each)


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each)


def _splits(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Of groups with blocks of so many tokens; see EngineConfig."""
    return tuple(math.lcm(*sizes) // size for size in sizes) if len(set(sizes)) > 1 else ()


def layer_number(name: str) -> int:
    """The number of the model's layer that the KV cache ``name`` belongs to; 0 for a name without one."""
    match = _LAYER_NUMBER.search(name) or _ANY_NUMBER.search(name)
    return int(match[1]) if match else 0


def _refusal(vllm_config: Any, groups: list[Any]) -> str:
    """The first reason that there is."""
    return (
        _states_refusal(vllm_config, groups)
        or _layers_refusal(groups)
        or _shape_refusal(vllm_config)
        or launcher_refusal(vllm_config)
        or context_refusal(vllm_config)
        or weights_refusal(vllm_config)
    )


def _layers_refusal(groups: list[Any]) -> str:
    """Layers whose KV the pool does not hold."""
    if not groups:
        return "the model has no KV cache"
    reaches = set()
    for group in groups:
        specs = _inner_specs(group.kv_cache_spec)
        found = {_reach(spec) for spec in specs}
        if None in found:
            kind = next(_kind(spec) for spec in specs if _reach(spec) is None)
            return (
                f"the pool holds states and KV of causal attention (full, in sliding windows, in chunks), "
                f"and the model has {kind} layers"
            )
        if len(found) > 1:
            return "the layers of one KV cache group look back differently far"
        if len({_state(spec) for spec in specs}) > 1:
            return "the layers of one KV cache group have states of different shapes or types"
        reaches |= found
    if (len(groups) > 1 or reaches != {FULL}) and not compat.can_report_failed_requests():
        return "models with sliding windows or several KV cache groups need vLLM 0.30 or newer"
    return ""


def _states_refusal(vllm_config: Any, groups: list[Any]) -> str:
    """Layers with a state of which the engine keeps no snapshots, or none that can be compared."""
    specs = [spec for group in groups for spec in _inner_specs(group.kv_cache_spec) if _is_state(spec)]
    if not specs:
        return ""
    if not compat.tells_snapshots():
        return "models with states need vLLM 0.32 or newer, which tells where it keeps snapshots of them"
    modes = {str(getattr(spec, "mamba_cache_mode", "none")) for spec in specs}
    if modes != {"align"}:
        return (
            f"the pool holds the snapshots of states that vLLM keeps with prefix caching (mamba_cache_mode "
            f"align), and this engine runs with mamba_cache_mode {', '.join(sorted(modes))}"
        )
    if getattr(vllm_config.cache_config, "prefix_match_unit", None) not in (None, specs[0].block_size):
        return "states are not stored yet with a prefix_match_unit smaller than a block"
    if len({group.kv_cache_spec.block_size for group in groups}) > 1:
        return "states are not stored yet beside KV cache groups with blocks of another number of tokens"
    if vllm_config.speculative_config is not None:
        return "states are not stored yet with speculative decoding (speculative_config)"
    if getattr(getattr(vllm_config, "mamba_config", None), "enable_stochastic_rounding", False):
        return "states that are rounded at random (enable_stochastic_rounding) are no function of the prompt"
    kinds = {str(getattr(spec.mamba_type, "name", spec.mamba_type)).upper() for spec in specs}
    device = str(getattr(getattr(vllm_config, "device_config", None), "device_type", ""))
    if device == "cpu" and "SHORT_CONV" in kinds:
        return (
            "on a CPU vLLM answers otherwise with a model of short convolutions when a prompt is computed in "
            "other steps, also without a pool, so its KV is no function of the prompt"
        )
    return ""


def _shape_refusal(vllm_config: Any) -> str:
    """Options that the pool does not know yet."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(vllm_config.parallel_config, name, 1) > 1:
            return f"the pool does not know {name} above 1 yet"
    speculative = vllm_config.speculative_config
    if speculative is not None and getattr(speculative, "method", None) not in _TARGET_ONLY_DRAFTS:
        return "the pool does not hold the KV of draft models yet (speculative_config)"
    return ""


def launcher_refusal(vllm_config: Any) -> str:
    """Engines in which each rank has a scheduler of its own. These have to decide alike, and what the pool
    answers, and when, may differ between ranks."""
    parallel = vllm_config.parallel_config
    executor = getattr(parallel, "distributed_executor_backend", None)
    if getattr(executor, "__name__", executor) in _EXTERNAL_LAUNCHER and parallel.world_size > 1:
        return (
            "with the external launcher each rank has its own scheduler, which would decide differently by "
            "what the pool answers each of them"
        )
    return ""


def context_refusal(vllm_config: Any) -> str:
    """Engines that cannot continue from KV which they did not compute with this very prompt (vLLM itself runs
    them without prefix caching), or whose KV is no function of the tokens."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    if model.use_mla and not (scheduler.enable_chunked_prefill or cache.enable_prefix_caching):
        return (
            "vLLM runs this MLA model without chunked prefill and without prefix caching, as it does where "
            "its attention backend answers wrongly when it continues from KV that is there already"
        )
    if not getattr(model, "is_prefix_caching_supported", True):
        return "vLLM does not support prefix caching for this model, so it cannot continue from loaded KV"
    text = getattr(model, "hf_text_config", model.hf_config)
    rope = positions.varying_kind({name: getattr(text, name, None) for name in positions.FIELDS})
    if rope and _runs_transformers(model):
        return (
            f"with Hugging Face's own code (model_impl transformers) the angles of {rope} positions change "
            f"with the longest sequence of a batch, so its KV is no function of the prompt"
        )
    if getattr(cache, "calculate_kv_scales", False):
        return "KV scales that each engine measures for itself (calculate_kv_scales) make its KV its own"
    return ""


def weights_refusal(vllm_config: Any) -> str:
    """Weights that the files of the model do not tell."""
    load_format = str(vllm_config.load_config.load_format).rpartition(".")[2].lower()
    if load_format not in _LOAD_FORMATS:
        return (
            f"load_format {load_format} takes weights from elsewhere than the model's path, so it cannot be "
            f"told which they are"
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return (
            "its weights may be replaced while it runs (weight_transfer_config), and the pool names KV by "
            "the weights that an engine starts with"
        )
    return ""


def _runs_transformers(model: Any) -> bool:
    runs = getattr(model, "using_transformers_backend", None)
    return bool(runs()) if callable(runs) else str(getattr(model, "model_impl", "")) == "transformers"


def _adapter_form(vllm_config: Any) -> str:
    """What of the engine's options changes the KV that it computes with a given adapter."""
    lora = getattr(vllm_config, "lora_config", None)
    if lora is None:
        return ""
    form = [str(getattr(lora, "lora_dtype", "auto")).removeprefix("torch.")]
    if modules := getattr(lora, "target_modules", None):
        form.append("modules=" + ",".join(sorted(map(str, modules))))
    flags = ("enable_mixed_moe_lora_format", "enable_moe_shared_loras")
    form += [name for name in flags if getattr(lora, name, False)]
    return " ".join(form)


def _adapter_refusal(parallel: Any) -> str:
    executor = getattr(parallel, "distributed_executor_backend", None)
    if getattr(parallel, "nnodes", 1) > 1 or executor == "ray":
        return "this engine's workers may be on several hosts, whose files at one path need not be the same"
    return ""


def _reach(spec: Any) -> Reach | None:
    """How far back layers of this kind look; None: the pool does not hold their KV."""
    kind = type(spec).__name__
    if getattr(spec, "non_causal", False):
        return None
    if kind in _FULL_ATTENTION:
        return FULL
    if kind == "SlidingWindowSpec" and spec.sliding_window > 0:
        return Reach(window=int(spec.sliding_window))
    if kind == "ChunkedLocalAttentionSpec":
        return Reach(chunk=int(spec.attention_chunk_size))
    return Reach(state=True) if _is_state(spec) else None


def _is_state(spec: Any) -> bool:
    return type(spec).__name__ == "MambaSpec"


def _state(spec: Any) -> State | None:
    return read_state(spec) if _is_state(spec) else None


def _inner_specs(spec: Any) -> list[Any]:
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [spec]


def _kind(spec: Any) -> str:
    return type(spec).__name__.removesuffix("Spec")
