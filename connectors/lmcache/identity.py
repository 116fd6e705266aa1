"""The fingerprint of a space of chunks, and the names of the objects in it.

LMCache's own key has the model, the ranks, the hash of the tokens and, in-process only, the type. The
fingerprint has the rest of what must be equal before two engines may use each other's bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from moonpool.core.store.keys import Json, canonical_json

NAME_BYTES_MAX = 1000  # a node takes 1,024


def fingerprint(plug: str, fields: Mapping[str, Json]) -> bytes:
    """32 bytes over the plug point and what must be equal; plug points have keys of different kinds and never
    meet."""
    return hashlib.sha256(canonical_json({"lmcache": plug, **fields})).digest()


def remote_identity(
    config: Any, metadata: Any, form: str = "", engine: Mapping[str, Json] | None = None
) -> bytes:
    """What must be equal before engines in LMCache's in-process mode share chunks, beside its own key; the
    same in all processes of an engine that use the pool. engine: see vllm_engine.

    Blending hashes segments without what stands before them, so its keys can be those of a first chunk."""
    blending = bool(config.enable_blending)
    return fingerprint(
        "remote",
        {
            "model": metadata.model_name,
            "world_size": metadata.world_size,
            "kv_dtype": str(metadata.kv_dtype).removeprefix("torch."),
            "kv_shape": [int(n) for n in metadata.kv_shape],
            "chunk_tokens": int(config.chunk_size),
            "mla": bool(metadata.use_mla),
            "form": form,
            "blending": str(config.blend_special_str) if blending else None,
            "serde": str(config.remote_serde),
            "hash": str(config.pre_caching_hash_algorithm),
            "engine": engine,
        },
    )


def name_of(key: str) -> str:
    """An object's name: LMCache's key as text, or, where that is too long for a name, its SHA-256."""
    if len(key) * 4 <= NAME_BYTES_MAX or len(key.encode()) <= NAME_BYTES_MAX:
        return key
    return f"sha256@{hashlib.sha256(key.encode()).hexdigest()}"


def layout_mark(shapes: Sequence[Sequence[int]], dtypes: Sequence[object]) -> str:
    """16 letters that distinguish layouts, for names where LMCache's key has neither type nor shape."""
    plain: Json = [
        [str(dtype).removeprefix("torch."), [int(n) for n in shape]]
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return hashlib.sha256(canonical_json(plain)).hexdigest()[:16]
