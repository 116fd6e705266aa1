"""What goes into the fingerprint of an engine's KV, whichever engine: which model, which weights, which type.

Only what the bytes mean goes in. Parallelism, memory layout and the address of anything do not, so that
engines of different shapes share.
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

COMMIT = re.compile(r"[0-9a-f]{40}")
NO_MEANING = frozenset(
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


def identity_of(
    model: Any, *, quantisation: object, revision: str, kv_dtype: str, block_tokens: int, form: str
) -> dict[str, Json]:
    """The fields of the fingerprint. model: the engine's ModelConfig, with hf_config (Hugging Face's) and
    dtype; form: the engine, and how it orders the bytes of a block."""
    text = getattr(model, "hf_text_config", model.hf_config)
    return {
        "model": digest_of({"config": plain(model.hf_config.to_dict()), "dtype": plain(model.dtype)}),
        "revision": revision,
        "kv_dtype": kv_dtype,
        "quantisation": plain(quantisation),
        "block_tokens": block_tokens,
        "positions": {name: plain(getattr(text, name, None)) for name in _POSITIONS},
        "form": form,
    }


def weights_revision(name: str, weights: str, hf_config: Any) -> str:
    """Which weights: a digest over the files of the local path ``weights``, or the hub commit.

    Raises ConfigError when it cannot be told; ``name``: of the model, for that sentence.
    """
    path = Path(weights)
    if path.exists():
        return f"files {weights_digest(path)}"
    commit = getattr(hf_config, "_commit_hash", None)
    if isinstance(commit, str) and COMMIT.fullmatch(commit):
        return f"commit {commit}"
    raise ConfigError(
        f"cannot tell which weights {name!r} stands for: it is neither a local path nor a hub model with a "
        f"known commit; download it and give the path",
        operation="fingerprint",
        key="revision",
    )


def is_dummy(load_format: object) -> bool:
    """Whether the weights are made up by the engine: a function of the shapes they are cut into, and of
    nothing on disk."""
    return str(load_format).rpartition(".")[2].lower() == "dummy"


def stored_dtype(configured: object, memory: object) -> str:
    """The type of the stored numbers: the configured one (several kinds of fp8 lie in memory as uint8), or
    that of the memory itself."""
    text = str(configured or "auto")
    return text if text != "auto" else str(plain(memory))


def plain(value: object) -> Json:
    """``value`` as JSON, without what has no meaning. What has no JSON form counts by its name, never by its
    address."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if str(key) not in NO_MEANING}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(plain(item)) for item in value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else type(value).__qualname__
