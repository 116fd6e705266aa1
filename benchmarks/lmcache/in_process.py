"""The bound of what a remote backend can do: LMCache's own cost, and one copy into and one out of memory of
the engine's own process."""

from __future__ import annotations

from typing import Any

import torch
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector


class InProcessAdapter(ConnectorAdapter):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("plugin://in_process")

    def create_connector(self, context: ConnectorContext) -> InProcess:
        return InProcess(context)


class InProcess(RemoteConnector):  # type: ignore[misc]
    """Slots that are written once before they are used: no page faults. The oldest chunk makes room."""

    SLOTS = 64

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context.config, context.metadata)
        self._memory = context.local_cpu_backend
        self._slots = torch.ones((self.SLOTS, self.full_chunk_size_bytes), dtype=torch.uint8)
        self._where: dict[str, int] = {}
        self._next = 0

    async def exists(self, key: Any) -> bool:
        return key.to_string() in self._where

    def exists_sync(self, key: Any) -> bool:
        return key.to_string() in self._where

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        return next((i for i, key in enumerate(keys) if key.to_string() not in self._where), len(keys))

    async def put(self, key: Any, memory_obj: Any) -> None:
        slot, self._next = self._next % self.SLOTS, self._next + 1
        self._where = {name: place for name, place in self._where.items() if place != slot}
        self._slots[slot].copy_(memory_obj.raw_tensor)
        self._where[key.to_string()] = slot

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        for key, memory in zip(keys, memory_objs, strict=True):
            await self.put(key, memory)

    async def get(self, key: Any) -> Any:
        slot = self._where.get(key.to_string())
        if slot is None:
            return None
        memory = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        memory.raw_tensor.copy_(self._slots[slot])
        return memory

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        return [await self.get(key) for key in keys]

    async def list(self) -> list[str]:
        return [*self._where]

    async def close(self) -> None:
        pass
