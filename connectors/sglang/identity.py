"""The fingerprint of an SGLang engine's KV."""

from __future__ import annotations

from typing import Any

from moonpool.connectors.identity import identity_of, is_dummy, stored_dtype, weights_revision
from moonpool.core.keys import Json


def identity(args: Any, model: Any, pool: Any) -> dict[str, Json]:
    """The fields of the fingerprint. args: SGLang's ServerArgs; model: its ModelConfig; pool: the host pool.

    Raises ConfigError when it cannot be told which weights the engine serves.
    """
    kind = "mla" if type(pool).__name__.startswith("MLA") else "k,v"
    tag = getattr(pool, "storage_format_tag", None)
    return identity_of(
        model,
        quantisation=getattr(model, "quantization", None),
        revision=revision(args, model),
        kv_dtype=stored_dtype(getattr(args, "kv_cache_dtype", None), pool.dtype),
        block_tokens=int(pool.page_size),
        form=f"sglang {kind}" + (f" {tag}" if tag else ""),
    )


def revision(args: Any, model: Any) -> str:
    """Which weights: the hub commit, or a digest over the files of a local path."""
    if is_dummy(getattr(args, "load_format", "auto")):
        return f"dummy tp={args.tp_size} pp={args.pp_size}"
    return weights_revision(args.model_path, args.model_path, model.hf_config)
