"""``MooncakeDistributedStoreAsync``: each method of the store also as ``async_NAME``, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from .store import MooncakeDistributedStore

_PREFIX = "async_"


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """``await store.async_put(...)`` runs put() on a thread, so that the event loop goes on."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(type(self), name.removeprefix(_PREFIX), None)
        if not name.startswith(_PREFIX) or name.startswith(f"{_PREFIX}_") or not callable(method):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return partial(asyncio.to_thread, method, self)


__all__ = ["MooncakeDistributedStoreAsync"]
