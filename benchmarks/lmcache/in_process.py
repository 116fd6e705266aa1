"""The bound of what a remote backend can do: LMCache's own cost. What it stores is kept where it is, and
handed back as it is: nothing is copied, and nothing leaves the process."""

from __future__ import annotations

from typing import Any

from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

CHUNKS_MAX = 32  # of LMCache's memory, which has room for about twice as many


class InProcessAdapter(ConnectorAdapter):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("plugin://in_process")

    def create_connector(self, context: ConnectorContext) -> InProcess:
        return InProcess(context)


class InProcess(RemoteConnector):  # type: ignore[misc]
    """The oldest chunk makes room."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context.config, context.metadata)
        self._chunks: dict[str, Any] = {}

    async def exists(self, key: Any) -> bool:
        return key.to_string() in self._chunks

    def exists_sync(self, key: Any) -> bool:
        return key.to_string() in self._chunks

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        return next((i for i, key in enumerate(keys) if key.to_string() not in self._chunks), len(keys))

    async def put(self, key: Any, memory_obj: Any) -> None:
        memory_obj.ref_count_up()
        if (before := self._chunks.pop(key.to_string(), None)) is not None:
            before.ref_count_down()
        self._chunks[key.to_string()] = memory_obj
        if len(self._chunks) > CHUNKS_MAX:
            self._chunks.pop(next(iter(self._chunks))).ref_count_down()

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        for key, memory in zip(keys, memory_objs, strict=True):
            await self.put(key, memory)

    async def get(self, key: Any) -> Any:
        memory = self._chunks.get(key.to_string())
        if memory is not None:
            memory.ref_count_up()
        return memory

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        return [await self.get(key) for key in keys]

    async def list(self) -> list[str]:
        return [*self._chunks]

    async def close(self) -> None:
        pass
