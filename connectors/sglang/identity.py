"""The fingerprint of an engine's KV: which model, which weights, and how the bytes of a page are ordered.

Only what the bytes mean goes in. Parallelism and the layout of the host memory do not, so that engines of
different shapes share.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonpool.connectors.weights import weights_digest
from moonpool.core.errors import ConfigError
from moonpool.core.keys import Json, digest_of

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_MEANING = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype"}
)
_POSITIONS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "max_position_embeddings",
    "original_max_position_embeddings",
)


def identity(args: Any, model: Any, pool: Any) -> dict[str, Json]:
    """The fields of the fingerprint. args: SGLang's ServerArgs; model: its ModelConfig; pool: the host pool.

    Raises ConfigError when it cannot be told which weights the engine serves.
    """
    text = getattr(model, "hf_text_config", model.hf_config)
    kind = "mla" if type(pool).__name__.startswith("MLA") else "k,v"
    tag = getattr(pool, "storage_format_tag", None)
    return {
        "model": digest_of({"config": _plain(model.hf_config.to_dict()), "dtype": _plain(model.dtype)}),
        "revision": revision(args, model),
        "kv_dtype": kv_dtype(args, pool.dtype),
        "quantisation": _plain(getattr(model, "quantization", None)),
        "block_tokens": int(pool.page_size),
        "positions": {name: _plain(getattr(text, name, None)) for name in _POSITIONS},
        "form": f"sglang {kind}" + (f" {tag}" if tag else ""),
    }


def revision(args: Any, model: Any) -> str:
    """Which weights: the hub commit, or a digest over the files of a local path."""
    if str(getattr(args, "load_format", "auto")).rpartition(".")[2].lower() == "dummy":
        # Made-up weights are a function of the shapes they are cut into, and of nothing on disk.
        return f"dummy tp={args.tp_size} pp={args.pp_size}"
    path = Path(args.model_path)
    if path.exists():
        return f"files {weights_digest(path)}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    if isinstance(commit, str) and _COMMIT.fullmatch(commit):
        return f"commit {commit}"
    raise ConfigError(
        f"cannot tell which weights {args.model_path!r} stands for: it is neither a local path nor a hub "
        f"model with a known commit; download it and give the path",
        operation="fingerprint",
        key="revision",
    )


def kv_dtype(args: Any, memory: object) -> str:
    """The type of the stored numbers: the configured one (both kinds of fp8 lie in memory as uint8), or that
    of the memory itself."""
    configured = str(getattr(args, "kv_cache_dtype", None) or "auto")
    return configured if configured != "auto" else str(_plain(memory))


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
