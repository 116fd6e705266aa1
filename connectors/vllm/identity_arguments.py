"""Which of vLLM's arguments change the numbers of the KV, and why the others do not.

Every field of the sections below is in ``COUNTED`` or in ``LEFT_OUT`` (docs/keys.md has the same as a table;
tests/connectors/vllm/test_identities.py compares both with the vLLM that is supported). A field of a
newer vLLM counts as soon as it differs from its default: two engines may then compute what they could share,
but never share what they must not.

A field counts when it changes what is computed or the type of a number on the way. A field that changes only
the order in which numbers are added (kernels, batches, parallelism) does not count: engines that differ in it
differ as one engine does from batch to batch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

from moonpool.connectors.identity import code_digest, plain
from moonpool.core.store.keys import Json

# Section -> field -> the value that counts as nothing, also of a vLLM without the field.
COUNTED: Mapping[str, Mapping[str, Json]] = {
    "model_config": {
        "runner": "auto",
        "convert": "auto",
        "code_revision": None,
        "disable_sliding_window": False,
        "model_class_overrides": {},
    },
    "cache_config": {"sliding_window": None, "kv_sharing_fast_prefill": False, "swa_bounded_replay": True},
    "attention_config": {
        "disable_flashinfer_q_quantization": False,
        "use_prefill_query_quantization": False,
        "indexer_kv_dtype": "auto",
        "indexer_sparse_logits": False,
        "hisparse_config": None,
        "use_non_causal": False,
    },
    "lora_config": {"lora_dtype": "auto", "target_modules": None, "enable_moe_shared_loras": False},
    "kernel_config": {"moe_backend": "auto", "linear_backend": "auto", "linear_backend_per_quant": None},
}

ELSEWHERE = "counts in a field of its own"
IN_THE_CONFIG = "is read into the model's config, which counts as a whole"
TEXT = "makes or names text; KV is named by tokens"
SAMPLING = "chooses tokens, and KV is named by the tokens that were chosen"
MEMORY = "says where and how much memory, not what is in it"
ORDER = "changes the order of additions at most"
STATES = "says when vLLM keeps which states"
NOT_POOLED = "is about requests that never use the pool"
IN_ITEMS = "counts in the names of images, sounds and videos (media_options.py)"
NAMELESS = "items of such an engine have no name (media_options.py)"
IN_SEEDS = "chooses the adapter of a request, which counts in the request's seed"
DERIVED = "follows from the others"

LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "model_config": {
        **dict.fromkeys(("model", "model_weights", "revision", "dtype", "quantization"), ELSEWHERE),
        **dict.fromkeys(("quantization_config", "max_model_len", "trust_remote_code"), ELSEWHERE),
        **dict.fromkeys(("hf_config", "hf_text_config", "hf_overrides", "hf_config_path"), IN_THE_CONFIG),
        **dict.fromkeys(("config_format", "generation_config"), IN_THE_CONFIG),
        **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision"), TEXT),
        **dict.fromkeys(("skip_tokenizer_init", "served_model_name", "renderer_num_workers"), TEXT),
        **dict.fromkeys(("seed", "return_sampling_mask", "max_logprobs", "logprobs_mode"), SAMPLING),
        **dict.fromkeys(("use_fp64_gumbel", "enable_trace_replay", "logits_processors"), SAMPLING),
        **dict.fromkeys(("override_generation_config", "word_embeddings_untied_by_checkpoint"), SAMPLING),
        **dict.fromkeys(("enable_sleep_mode", "sleep_preserve_parameter_names"), MEMORY),
        **dict.fromkeys(("sleep_mode_backend", "sleep_mode_offload_cudagraph"), MEMORY),
        **dict.fromkeys(("enable_nccl_comm_suspend", "enable_cumem_allocator"), MEMORY),
        **dict.fromkeys(("enforce_eager", "disable_cascade_attn", "model_impl"), ORDER),
        **dict.fromkeys(("allowed_local_media_path", "allowed_media_domains"), "says what may be fetched"),
        **dict.fromkeys(("enable_prompt_embeds", "io_processor_plugin", "pooler_config"), NOT_POOLED),
        "multimodal_config": IN_ITEMS,
        **dict.fromkeys(("is_submodel_config", "spec_target_max_model_len"), DERIVED),
        "hf_token": "says who may download",
        "allow_deprecated_quantization": "says what vLLM refuses",
    },
    "cache_config": {
        **dict.fromkeys(("block_size", "cache_dtype", "kv_cache_dtype_skip_layers"), ELSEWHERE),
        "calculate_kv_scales": "such an engine serves without the pool",
        **dict.fromkeys(("kv_cache_layout", "gpu_memory_utilization", "num_gpu_blocks_override"), MEMORY),
        **dict.fromkeys(("num_gpu_blocks", "num_cpu_blocks", "kv_cache_memory_bytes"), MEMORY),
        **dict.fromkeys(("kv_offloading_size", "kv_offloading_backend", "skip_page_size_padded"), MEMORY),
        **dict.fromkeys(("swap_space", "cpu_offload_gb", "cpu_kvcache_space_bytes"), MEMORY),
        **dict.fromkeys(("kv_cache_size_tokens", "kv_cache_max_concurrency"), MEMORY),
        **dict.fromkeys(("user_specified_block_size", "_block_size_resolved"), DERIVED),
        **dict.fromkeys(("effective_attention_block_size", "hash_block_size"), DERIVED),
        **dict.fromkeys(("cache_hit_alignment_tokens", "is_attention_free"), DERIVED),
        **dict.fromkeys(
            ("prefix_match_unit", "enable_prefix_caching", "prefix_caching_hash_algo"),
            "is about vLLM's own prefix cache",
        ),
        "prefix_cache_retention_interval": "is about vLLM's own prefix cache",
        **dict.fromkeys(("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size"), ELSEWHERE),
        "mamba_page_size_padded": MEMORY,
        **dict.fromkeys(("mamba_cache_mode", "enable_mamba_shared_prefix_checkpoint"), STATES),
        **dict.fromkeys(("replayssm_buffer_len", "use_replayssm", "use_kda_recoverssm"), STATES),
    },
    "attention_config": {
        **dict.fromkeys(("backend", "backend_per_kind"), ELSEWHERE),
        **dict.fromkeys(("flash_attn_version", "flash_attn_max_num_splits_for_cuda_graph"), ORDER),
        **dict.fromkeys(("tokenspeed_mla_min_split_kv", "tq_max_kv_splits_for_cuda_graph"), ORDER),
        **dict.fromkeys(("use_trtllm_attention", "mla_prefill_backend", "sparse_mla_force_mqa"), ORDER),
        **dict.fromkeys(("sparse_mla_prefill_workspace_factor", "minimax_m3_msa_decode_backend"), ORDER),
        **dict.fromkeys(("flex_attn_block_m", "flex_attn_block_n"), ORDER),
        **dict.fromkeys(("flex_attn_q_block_size", "flex_attn_kv_block_size"), ORDER),
    },
    "lora_config": {
        **dict.fromkeys(("max_lora_rank", "max_loras", "max_cpu_loras"), MEMORY),
        **dict.fromkeys(("fully_sharded_loras", "specialize_active_lora"), ORDER),
        "enable_mixed_moe_lora_format": ORDER,
        "default_mm_loras": IN_SEEDS,
        "enable_tower_connector_lora": NAMELESS,
        "max_lora_cls_labels": "is about the head",
    },
}

# Sections that are not looked at field by field.
LEFT_OUT_SECTIONS: Mapping[str, str] = {
    "parallel_config": "engines of different shapes share; context parallelism serves without the pool",
    "scheduler_config": ORDER,
    "device_config": "the attention backend counts, in a field of its own",
    "load_config": "weights and the kind of their files count in fields of their own; other sources: no pool",
    "offload_config": MEMORY,
    "aux_output_config": "is about what else an answer says",
    "engram_config": MEMORY,
    "mamba_config": "changes the order of additions; where it rounds at random there is no pool",
    "speculative_config": "with a draft model an engine serves without the pool; without one it is sampling",
    "watermark_config": SAMPLING,
    "diffusion_config": "such attention is not causal, and an engine with it serves without the pool",
    "structured_outputs_config": SAMPLING,
    "observability_config": "is about logs and metrics",
    "logging_config": "is about logs and metrics",
    "quant_config": ELSEWHERE,
    "compilation_config": ORDER,
    "profiler_config": "is about logs and metrics",
    "kv_transfer_config": "is our own",
    "kv_events_config": "is about logs and metrics",
    "ec_transfer_config": "is our own, or the items of such an engine have no name",
    "ec_manager_config": MEMORY,
    "reasoning_config": SAMPLING,
    "instance_id": "is a name",
    "optimization_level": ORDER,
    "performance_mode": ORDER,
    "weight_transfer_config": "such an engine serves without the pool",
    "shutdown_timeout": "is about the end",
}

# What is counted of a section without looking at its fields, and the value that counts as nothing.
COUNTED_WHOLE: Mapping[str, Json] = {"additional_config": {}}

# Variables that choose the type of weights or activations, or other weights, where vLLM has no argument for
# it.
COUNTED_VARIABLES = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MLA_DISABLE",
    "VLLM_MODEL_REDIRECT_PATH",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_TEST_FORCE_LOAD_FORMAT",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_FLASHINFER_MOE_INT4",
)
# Load formats that read the same files of a model's folder.
_SAME_FILES = frozenset(
    ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "dummy")
)


def arguments(vllm_config: Any, environment: Mapping[str, str] | None = None) -> dict[str, Json]:
    """What this engine was started with, as far as it changes the numbers and is not at its default."""
    found: dict[str, Json] = {}
    for section in COUNTED:
        changed = dict(_changed(section, getattr(vllm_config, section, None)))
        if changed.get("lora_dtype") == plain(vllm_config.model_config.dtype):  # what "auto" stands for
            del changed["lora_dtype"]
        if changed:
            found[section] = changed
    for section, nothing in COUNTED_WHOLE.items():
        value = plain(getattr(vllm_config, section, nothing))
        if value != nothing:
            found[section] = value
    environment = os.environ if environment is None else environment
    if variables := {name: environment[name] for name in COUNTED_VARIABLES if environment.get(name)}:
        found["environment"] = variables
    load_format = str(vllm_config.load_config.load_format).rpartition(".")[2].lower()
    if load_format not in _SAME_FILES:
        found["load_format"] = load_format
    model = vllm_config.model_config
    if getattr(model, "trust_remote_code", False) and (code := code_digest(str(model.model))):
        found["code"] = code
    return found


def quantisation(vllm_config: Any) -> Json:
    """The quantisation of the weights: the method, and its settings in the arguments or in files beside the
    weights."""
    model = vllm_config.model_config
    method = plain(model.quantization)
    resolved = getattr(vllm_config, "quant_config", None)
    more = {
        "arguments": plain(getattr(model, "quantization_config", None)),
        "scheme": None if resolved is None else plain(vars(resolved)),
    }
    return {"method": method, **more} if any(more.values()) else method


def fields_of(section: Any) -> dict[str, Json]:
    """The fields of one of vLLM's sections and their defaults."""
    if not dataclasses.is_dataclass(section):
        return {}
    return {field.name: _default(section, field) for field in dataclasses.fields(section)}


def _changed(name: str, section: Any) -> Iterator[tuple[str, Json]]:
    if section is None:
        return
    counted = COUNTED[name]
    for field, nothing in counted.items():
        value = plain(getattr(section, field, nothing))
        if value != nothing:
            yield field, value
    if name not in LEFT_OUT:
        return
    for field, default in fields_of(section).items():
        if field in counted or field in LEFT_OUT[name]:
            continue
        value = plain(getattr(section, field, default))
        if value != default:
            yield field, value


def _default(section: Any, field: dataclasses.Field[Any]) -> Json:
    info = getattr(section, "__pydantic_fields__", {}).get(field.name)
    if info is not None:
        return plain(info.get_default(call_default_factory=True))
    if field.default_factory is not dataclasses.MISSING:
        return plain(field.default_factory())
    return None if field.default is dataclasses.MISSING else plain(field.default)
