"""The ``mooncake`` API over a Moonpool, for programs that were written for Mooncake.

    engine.py, store.py            the public classes, with the names and return codes that callers know
    _codes.py                      the one table from moonpool's errors to codes
    _access.py                     what setup() makes: a node of this process, or a connection to another one
    _objects, _parts, _replicas,   the methods of the store, a group in each
    _tensors, _parallel, _segments
    cli*.py, mooncake_store_service.py, _pages.py    the commands and the pages that scripts poll

Thin on purpose: each name is a few lines over moonpool's own API. docs/mooncake.md lists the differences.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._guard import conflict

if TYPE_CHECKING:
    from .store import BufferPool, MooncakeDistributedStore, RegisteredBufferPool, ReplicateConfig

if _sentence := conflict():
    raise ImportError(_sentence)

_IN_STORE = ("BufferPool", "MooncakeDistributedStore", "RegisteredBufferPool", "ReplicateConfig")

__all__ = ["BufferPool", "MooncakeDistributedStore", "RegisteredBufferPool", "ReplicateConfig"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _IN_STORE:
            raise AttributeError(f"module 'mooncake' has no attribute {name!r}")
        return getattr(importlib.import_module("mooncake.store"), name)
