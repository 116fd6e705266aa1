"""The fingerprint of an engine's KV: which model, which weights, and how the bytes of a block are ordered.

Only what the bytes mean goes in. Parallelism, page layout and the address of anything do not, so that engines
of different shapes share.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonpool.connectors.vllm.layout import BlockLayout
from moonpool.connectors.weights import weights_digest
from moonpool.core.errors import ConfigError
from moonpool.core.keys import Json, digest_of, fingerprint

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_MEANING = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype"}
)
_POSITIONS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "max_position_embeddings",
    "original_max_position_embeddings",
)


def engine_fingerprint(vllm_config: Any, *, block_tokens: int, kv_dtype: str, form: str) -> bytes:
    """32 bytes; engines with equal fingerprints may use each other's blocks.

    Raises ConfigError when it cannot be told which weights the engine serves.
    """
    return fingerprint(identity(vllm_config, block_tokens=block_tokens, kv_dtype=kv_dtype, form=form))


def identity(vllm_config: Any, *, block_tokens: int, kv_dtype: str, form: str) -> dict[str, Json]:
    """The fields of the fingerprint, for logs and tests."""
    model = vllm_config.model_config
    text = getattr(model, "hf_text_config", model.hf_config)
    return {
        "model": digest_of({"config": _config(model.hf_config), "dtype": _plain(model.dtype)}),
        "revision": revision(vllm_config),
        "kv_dtype": kv_dtype,
        "quantisation": _plain(model.quantization),
        "block_tokens": block_tokens,
        "positions": {name: _plain(getattr(text, name, None)) for name in _POSITIONS},
        "form": form,
    }


def revision(vllm_config: Any) -> str:
    """Which weights: the hub commit, or a digest over the files of a local path."""
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format).rpartition(".")[2].lower() == "dummy":
        parallel = vllm_config.parallel_config
        # Made-up weights are a function of the shapes they are cut into, and of nothing on disk.
        return f"dummy tp={parallel.tensor_parallel_size} pp={parallel.pipeline_parallel_size}"
    path = Path(getattr(model, "model_weights", "") or model.model)
    if path.exists():
        return f"files {weights_digest(path)}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    if isinstance(commit, str) and _COMMIT.fullmatch(commit):
        return f"commit {commit}"
    raise ConfigError(
        f"cannot tell which weights {model.model!r} stands for: it is neither a local path nor a hub "
        f"model with a known commit; download it and give the path",
        operation="fingerprint",
        key="revision",
    )


def kv_dtype(vllm_config: Any, tensor_dtype: object) -> str:
    """The type of the stored numbers: the configured one, or that of the memory itself."""
    configured = str(vllm_config.cache_config.cache_dtype)
    return configured if configured != "auto" else str(_plain(tensor_dtype))


def form(vllm_config: Any, layout: BlockLayout) -> str:
    """How the bytes of one (layer, head, block) are ordered: the attention backend that reads them, the
    instruction set that its packing depends on where it has one (CPU), and the kernel's block."""
    layers = vllm_config.compilation_config.static_forward_context
    kinds = set()
    for group in layout.groups:
        for layer in group.layers:
            attention = layers.get(layer.name)
            backend = getattr(attention, "attn_backend", None)
            name = backend.get_name() if backend is not None else type(attention).__name__
            packing = getattr(attention, "isa", None) or "plain"
            kinds.add(f"{name}/{packing}/{layer.tokens}")
    return "vllm " + ",".join(sorted(kinds))


def _config(hf_config: Any) -> Json:
    return _plain({key: value for key, value in hf_config.to_dict().items() if key not in _NO_MEANING})


def _plain(value: object) -> Json:
    """``value`` as JSON. What has no JSON form counts by its name, never by its address."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if str(key) not in _NO_MEANING}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(item)) for item in value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else type(value).__qualname__
