"""Pools beside the KV, of which a page of the prefix needs a part too: states of Mamba layers, sliding
windows, indexers. SGLang's v2 interface moves them.

One object holds all parts of a page in SGLang's layout, so a page is whole or missing. Its name has all that
decides about the bytes, so only engines of equal shape share it:

    digest(32) | SHA-256 of (pool, class, layout, type, sizes of the parts, layers, rank)[:16]
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.connectors.objects import Refused
from moonpool.core.store.keys import canonical_json

TAG_BYTES = 16
_RANK_SHARDED = frozenset({"mamba"})  # also where the KV itself is the same on every rank
Parts = list[tuple[int, int]]


@dataclass(frozen=True)
class Sidecar:
    """One pool of SGLang's, and the ``tag`` that ends the names of its objects."""

    pool: Any
    tag: bytes

    def names(self, keys: Sequence[str]) -> list[bytes]:
        """The name of the object of each page; ``keys`` are hexadecimal."""
        return [bytes.fromhex(key) + self.tag for key in keys]

    def parts(self, keys: Sequence[str], host_indices: Any) -> list[Parts]:
        """The memory of each page. Raises ValueError for slots that are not as many pages."""
        tokens = int(getattr(self.pool, "page_size", 1) or 1)
        if host_indices is None or len(host_indices) != len(keys) * tokens:
            slots = 0 if host_indices is None else len(host_indices)
            raise ValueError(f"{slots} slots for {len(keys)} pages of {tokens}")
        return pages_of(self.pool.get_page_buffer_meta(host_indices), len(keys))


def is_draft(name: str) -> bool:
    """Whether the pool belongs to a draft model: its content depends on that model, too."""
    return name.startswith("draft")


def tells_its_layers(name: str) -> bool:
    """Whether the KV beside this pool knows where its pipeline stage begins. That of hybrid models (Mamba,
    sliding windows, compressed KV) counts its own layers from 0 in every stage."""
    return name == "indexer" or is_draft(name)


def read_sidecar(name: str, pool: Any, config: Any, first_page: Any, draft: str = "") -> Sidecar:
    """How a pool beside the KV is stored.

    first_page: slots of a page, as SGLang gives them.
    draft: the weights that the pool of a draft model is of; "" for other pools.

    Raises Refused for a pool whose pages cannot be addressed, and for one that SGLang would not let every
    rank save.
    """
    if config.is_mla_model and config.tp_size > 1 and "MHA" in type(pool).__name__:
        raise Refused(f"SGLang saves only rank 0's part of the pool {name!r}, which is cut by heads")
    try:
        (parts,) = pages_of(pool.get_page_buffer_meta(first_page), 1)
    except Exception as error:  # a pool of an unknown kind may raise anything
        raise Refused(f"the pages of the pool {name!r} cannot be addressed ({error})") from error
    replicated = config.is_mla_model and name not in _RANK_SHARDED
    what = {
        "pool": name,
        "class": type(pool).__name__,
        "layout": str(getattr(pool, "layout", "")),
        "dtype": str(getattr(pool, "dtype", "")),
        "format": str(getattr(pool, "storage_format_tag", None) or ""),
        "sizes": [size for _, size in parts],
        "layers": [int(getattr(pool, "start_layer", 0) or 0), int(getattr(pool, "layer_num", 0) or 0)],
        "rank": [0, 1] if replicated else [config.tp_rank, config.tp_size],
        "stage": [config.pp_rank, config.pp_size],
        "draft": draft,
    }
    return Sidecar(pool, hashlib.sha256(canonical_json(what)).digest()[:TAG_BYTES])


def pages_of(meta: tuple[Sequence[int], Sequence[int]], pages: int) -> list[Parts]:
    """get_page_buffer_meta's two lists, page by page. Raises ValueError when they do not divide so."""
    addresses, sizes = meta
    each, left = divmod(len(addresses), pages)
    if left or not each or len(sizes) != len(addresses) or min(sizes) <= 0:
        raise ValueError(f"{len(addresses)} addresses and {len(sizes)} sizes for {pages} pages")
    flat = [(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
    return [flat[start : start + each] for start in range(0, len(flat), each)]


def restorable(present: Sequence[bool], trailing: int | None) -> set[int]:
    """The prefix lengths, in pages, that a pool can restore.

    trailing: how many last pages of a prefix the pool must have; None: all of them.
    """
    lengths, run = set(), 0
    for length, here in enumerate(present, start=1):
        run = run + 1 if here else 0
        if run >= (length if trailing is None else min(length, trailing)):
            lengths.add(length)
    return lengths
