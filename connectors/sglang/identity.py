"""The fingerprint of an SGLang engine's KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moonpool.connectors.identity import identity_of, is_dummy, stored_dtype, weights_revision
from moonpool.connectors.sglang import compat
from moonpool.core.keys import Json


def identity(args: Any, model: Any, pool: Any) -> dict[str, Json]:
    """The fields of the fingerprint. args: SGLang's ServerArgs; model: its ModelConfig; pool: the host pool.

    Raises ConfigError when it cannot be told which weights the engine serves.
    """
    form = ["sglang", "mla" if type(pool).__name__.startswith("MLA") else "k,v"]
    if tag := getattr(pool, "storage_format_tag", None):
        form.append(str(tag))
    if getattr(pool, "target_layer_num", pool.layer_num) != pool.layer_num:  # the last are a draft model's
        form.append(f"draft {draft_revision(args)}")
    return identity_of(
        model,
        quantisation=getattr(model, "quantization", None),
        revision=revision(args, model),
        kv_dtype=stored_dtype(getattr(args, "kv_cache_dtype", None), pool.dtype),
        block_tokens=int(pool.page_size),
        form=" ".join(form),
    )


def revision(args: Any, model: Any) -> str:
    """Which weights: the hub commit, or a digest over the files of a local path."""
    if is_dummy(getattr(args, "load_format", "auto")):
        return _dummy(args)
    return weights_revision(args.model_path, args.model_path, model.hf_config)


def draft_revision(args: Any) -> str:
    """Which weights the draft model has, and how it is used. Without a path of their own they are among the
    target's (multi-token prediction). Raises ConfigError."""
    path = args.speculative_draft_model_path or args.model_path
    if is_dummy(args.speculative_draft_load_format or getattr(args, "load_format", "auto")):
        weights = _dummy(args)
    else:
        hf_config = None if Path(path).exists() else compat.draft_model_config(args).hf_config
        weights = weights_revision(path, path, hf_config)
    return f"{args.speculative_algorithm} {weights}"


def _dummy(args: Any) -> str:
    return f"dummy tp={args.tp_size} pp={args.pp_size}"
