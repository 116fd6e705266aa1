"""Which of vLLM's options for images, sounds and videos change the KV that an item gives, and for which of
them an item cannot be named by its content.

What changes the tensors that the processor makes (decoding, scaling, cropping) is in the name of an item
already, because that is a digest of these tensors (item_names.py). So only what comes behind them counts:
in the names of the items, and not in the fingerprint, so that text is shared all the same. The table in
docs/keys.md says the same; tests/connectors/vllm/test_media.py compares both with the vLLM that is
supported. A field of a newer vLLM counts as soon as it is not at its default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonpool.connectors.identity import plain
from moonpool.connectors.vllm.encoder.names import is_ours
from moonpool.connectors.vllm.identity_arguments import fields_of
from moonpool.core.store.keys import Json, digest_of

COUNTED = (
    "mm_processor_kwargs",  # models read some of them themselves
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",  # by the content of the file
)

BEFORE = "changes the tensors, which are the name"
NO_NUMBERS = "is about memory, processes and limits"
ORDER = "changes the order of additions at most"

LEFT_OUT: Mapping[str, str] = {
    "media_io_kwargs": BEFORE,
    "mm_hasher_algorithm": "makes vLLM's own names, which do not count",
    "interleave_mm_strings": "makes text",
    **dict.fromkeys(("language_model_only", "limit_per_prompt", "enable_mm_embeds"), NO_NUMBERS),
    **dict.fromkeys(("mm_processor_cache_gb", "mm_processor_cache_type"), NO_NUMBERS),
    **dict.fromkeys(("mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "skip_mm_profiling"), NO_NUMBERS),
    **dict.fromkeys(("mm_encoder_only", "mm_ipc_gpu_memory_gb", "allow_missing_mm_embeddings"), NO_NUMBERS),
    **dict.fromkeys(("mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin"), NO_NUMBERS),
    **dict.fromkeys(("mm_encoder_tp_mode", "mm_encoder_attn_backend"), ORDER),
    **dict.fromkeys(("video_pruning_rate", "video_pruning_method"), "items of such an engine have no name"),
}

# What normalises pixels on the device is read from these files of the model's folder.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def takes_media(model: Any) -> bool:
    """Whether requests may have images, sounds or videos, if only as embeddings (language_model_only)."""
    return getattr(model, "multimodal_config", None) is not None


def media_form(model: Any) -> str:
    """How an engine makes KV of an item, beyond its fingerprint and the item's tensors."""
    config = model.multimodal_config
    found: dict[str, Json] = {}
    for name in COUNTED:
        if value := plain(getattr(config, name, None)):
            found[name] = value
    for name, default in fields_of(config).items():
        value = plain(getattr(config, name, default))
        if name not in COUNTED and name not in LEFT_OUT and value != default:
            found[name] = value
    if path := getattr(config, "mm_encoder_fp8_scale_path", None):
        found["mm_encoder_fp8_scale_path"] = _digest(Path(path))
    folder = Path(str(model.model))
    files = {name: _digest(folder / name) for name in _PROCESSOR_FILES if (folder / name).is_file()}
    return digest_of({"options": found, "files": files})


def media_refusal(vllm_config: Any) -> str:
    """Why the items of this engine's requests cannot be named, or "". Their text up to the first item can."""
    transfer = getattr(vllm_config, "ec_transfer_config", None)
    if transfer is not None and not is_ours(transfer):
        return (
            "with this ec_transfer_config another engine encodes the items, under names that need not be "
            "digests of their content; moonpool's own connector goes by the content (ec_connector Mooncake)"
        )
    if getattr(vllm_config.model_config, "is_mm_prefix_lm", False):
        return (
            "the tokens of an item of this model look at later ones of it, so that their KV depends on the "
            "steps in which vLLM computes the item"
        )
    return encoder_refusal(vllm_config)


def encoder_refusal(vllm_config: Any) -> str:
    """Why the name of an item would not tell what the encoder makes of it, or ""."""
    config = vllm_config.model_config.multimodal_config
    if getattr(config, "mm_processor_cache_type", "lru") == "shm":
        return (
            "with mm_processor_cache_type shm the scheduler does not see the content of items; lru, vLLM's "
            "default, shows it"
        )
    if getattr(getattr(vllm_config, "lora_config", None), "enable_tower_connector_lora", False):
        return (
            "with enable_tower_connector_lora an adapter changes what the encoder makes of an item, and vLLM "
            "keeps that under the adapter's name, which may come to stand for other bytes"
        )
    if getattr(config, "video_pruning_rate", None):
        return "which tokens of a video stay (video_pruning_rate) is decided after its tensors are named"
    if getattr(config, "mm_encoder_attn_dtype", None) and not getattr(
        config, "mm_encoder_fp8_scale_path", None
    ):
        return (
            "the scales of the encoder's FP8 attention follow from all items that the engine has seen; "
            "mm_encoder_fp8_scale_path makes them fixed"
        )
    return ""


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
