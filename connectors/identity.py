"""What goes into the fingerprint of an engine's KV, whichever engine: which model, which weights, which type.

Only what the bytes mean goes in. Parallelism, memory layout and the address of anything do not, so that
engines of different shapes share.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonpool.connectors import positions
from moonpool.connectors.weights import unidentified, weights_digest
from moonpool.core.store.keys import Json, digest_of

COMMIT = re.compile(r"[0-9a-f]{40}")
NO_MEANING = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype"}
)
_QUANTISATION_FILES = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")
_ALL_MEANING = frozenset({"quantization_config", "compression_config"})


def identity_of(
    model: Any,
    *,
    quantisation: object,
    revision: str,
    kv_dtype: str,
    block_tokens: int,
    form: str,
    length: int | None,
    arguments: Mapping[str, Json],
) -> dict[str, Json]:
    """The fields of the fingerprint.

    model: the engine's ModelConfig, with hf_config (Hugging Face's) and dtype.
    form: the engine, and the order of the bytes of a block.
    length: maximum tokens of a sequence.
    arguments: of the engine; those that change the numbers and stand in no other field.
    """
    text = getattr(model, "hf_text_config", model.hf_config)
    found = {name: getattr(text, name, None) for name in positions.FIELDS}
    return {
        "model": digest_of(
            {
                "config": config_of(model.hf_config.to_dict()),
                "dtype": plain(model.dtype),
                "arguments": dict(arguments),
            }
        ),
        "revision": revision,
        "kv_dtype": kv_dtype,
        "quantisation": plain(quantisation),
        "block_tokens": block_tokens,
        "positions": {
            **{name: plain(value) for name, value in found.items()},
            "length": positions.length_factors(found, length),
        },
        "form": form,
    }


def weights_revision(name: str, weights: str, hf_config: Any) -> str:
    """Which weights: a digest over the files of the local path ``weights``, or the commit of the hub.

    name: of the model, for the error's sentence.

    Raises ConfigError when the weights cannot be identified.
    """
    path = Path(weights)
    if path.exists():
        return f"files {weights_digest(path)}"
    commit = getattr(hf_config, "_commit_hash", None)
    if isinstance(commit, str) and COMMIT.fullmatch(commit):
        return f"commit {commit}"
    raise unidentified(
        f"cannot tell which weights {name!r} stands for: it is neither a local path nor a hub model with a "
        f"known commit; download it and give the path"
    )


def code_digest(model: str) -> str:
    """The digest of the code beside the weights in the local folder ``model``; "" without any."""
    folder = Path(model)
    digest, files = hashlib.sha256(), sorted(folder.rglob("*.py")) if folder.is_dir() else []
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.hexdigest() if files else ""


def quantisation_files(model: str, method: object) -> Json:
    """The method of quantisation, and what files beside the weights of a local folder tell of it."""
    found = {
        name: hashlib.sha256((Path(model) / name).read_bytes()).hexdigest()
        for name in _QUANTISATION_FILES
        if (Path(model) / name).is_file()
    }
    return {"method": plain(method), "files": found} if found else plain(method)


def is_dummy(load_format: object) -> bool:
    """Whether the weights are made up by the engine: a function of the shapes they are cut into, and of
    nothing on disk."""
    return str(load_format).rpartition(".")[2].lower() == "dummy"


def stored_dtype(configured: object, memory: object) -> str:
    """The type of the stored numbers: the configured one (several kinds of fp8 are uint8 in memory), or that
    of the memory itself."""
    text = str(configured or "auto")
    return text if text != "auto" else str(plain(memory))


def config_of(config: Mapping[str, Any]) -> dict[str, Json]:
    """A model's config, and those inside it, without what has no meaning; how the weights are quantised has
    one in every word."""
    return {
        str(key): config_of(value) if isinstance(value, Mapping) and key not in _ALL_MEANING else plain(value)
        for key, value in config.items()
        if str(key) not in NO_MEANING
    }


def plain(value: object) -> Json:
    """``value`` as JSON: plain values, and objects of dataclasses and pydantic by their fields. What has no
    JSON form counts by its name, never by its address."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(plain(item)) for item in value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
        return {"": type(value).__qualname__, **fields}
    if callable(dump := getattr(value, "model_dump", None)) and not isinstance(value, type):
        return {"": type(value).__qualname__, **{name: plain(item) for name, item in dump().items()}}
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else type(value).__qualname__
