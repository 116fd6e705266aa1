"""The fingerprint of an engine's KV: which model, which weights, and how the bytes of a block are ordered.
Read from the model's own files, since TensorRT-LLM hands a connector its arguments and no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonpool.connectors import positions
from moonpool.connectors.identity import COMMIT, code_digest, config_of, is_dummy, plain
from moonpool.connectors.tensorrt_llm.layout import Memory, Shape
from moonpool.connectors.weights import unidentified, weights_digest
from moonpool.core.errors import ConfigError
from moonpool.core.store.keys import Json, digest_of


def model_folder(args: Any) -> Path:
    """The model's folder on this host. Raises ConfigError when there is none."""
    path = Path(str(args.model))
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                str(args.model), revision=getattr(args, "revision", None), local_files_only=True
            )
        )
    except Exception as error:  # a package that is no dependency may raise errors of its own
        raise unidentified(
            f"cannot tell which weights {args.model!r} stands for: it is neither a local folder nor a model "
            f"in the hub's cache ({type(error).__name__}); download it and give the path"
        ) from error


def read_config(folder: Path) -> Mapping[str, Any]:
    """The model's config.json. Raises ConfigError."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the model's config cannot be read: {error}", operation="fingerprint", key="model"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / 'config.json'} is no object", operation="fingerprint", key="model")
    return config


def identity(
    args: Any, folder: Path, config: Mapping[str, Any], memory: Memory, shape: Shape
) -> dict[str, Json]:
    """The fields of the fingerprint. Raises ConfigError when the weights that are served cannot be
    identified."""
    text = config.get("text_config", config)
    computed = str(getattr(args, "dtype", "auto"))
    stored = str(config.get("torch_dtype", config.get("dtype", "")))
    return {
        "model": digest_of(
            {
                "config": config_of(config),
                "dtype": stored if computed == "auto" else computed,
                "arguments": _arguments(args, shape),
            }
        ),
        "revision": revision(args, folder),
        "kv_dtype": f"{getattr(args.kv_cache_config, 'dtype', 'auto')} {memory.dtype}",
        "quantisation": quantisation(args, folder),
        "block_tokens": memory.tokens,
        "positions": {
            **{name: plain(text.get(name)) for name in positions.FIELDS},
            "length": positions.length_factors(text, longest(args, text)),
        },
        "form": shape.form,
    }


def longest(args: Any, text: Mapping[str, Any]) -> int | None:
    """The maximum tokens of a sequence of this engine; None: unknown."""
    length = getattr(args, "max_seq_len", None) or text.get("max_position_embeddings")
    return None if length is None else int(length)


def _arguments(args: Any, shape: Shape) -> dict[str, Json]:
    """What changes the numbers beside the model's files."""
    cache = args.kv_cache_config
    found = {
        "windows": getattr(cache, "max_attention_window", None),
        "sink": getattr(cache, "sink_token_length", None),
        "sparse": getattr(args, "sparse_attention_config", None),
        "overrides": getattr(args, "model_kwargs", None),
        "experts": getattr(getattr(args, "moe_config", None), "backend", None),
        "combine": getattr(getattr(args, "moe_config", None), "use_low_precision_moe_combine", None),
        "allreduce": getattr(args, "allreduce_strategy", None),
        # The KV cache has layers of a draft model beside the model's own.
        "speculative": getattr(args, "speculative_config", None) if shape.whole else None,
    }
    counted = {name: plain(value) for name, value in found.items()}
    if getattr(args, "trust_remote_code", False) and (code := code_digest(str(args.model))):
        counted["code"] = code
    return counted


def revision(args: Any, folder: Path) -> str:
    """Which weights: the hub commit, or a digest over the files of a local path."""
    if is_dummy(getattr(args, "load_format", "auto")):
        return f"dummy tp={args.tensor_parallel_size}"
    if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name):
        return f"commit {folder.name}"
    return f"files {weights_digest(folder)}"


def quantisation(args: Any, folder: Path) -> Json:
    """The quantisation of the weights: the method, and the treatment of each layer, from the checkpoint's
    files and from the arguments."""
    beside = folder / "hf_quant_config.json"
    given = getattr(args, "quant_config", None)
    algorithms = [str(getattr(given, name, None)) for name in ("quant_algo", "kv_cache_quant_algo")]
    said: Json = json.loads(beside.read_bytes()) if beside.is_file() else None
    if said is None and set(algorithms) == {"None"}:
        return None
    return {"file": said, "algorithms": algorithms, "arguments": plain(given)}
