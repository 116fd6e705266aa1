"""``AsyncStore``: the verbs of ``Store`` for asyncio.

Operations run on a C++ thread that never takes the GIL; the event loop learns of their end through an
eventfd. At most 4,096 operations wait at a time: one more raises TooLarge at once.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from moonpool.core.errors import Closed
from moonpool.core.store.buffers import as_parts
from moonpool.core.store.store import (
    NO_ANSWER,
    REMOVE_BATCH,
    PutOptions,
    generations_of,
    is_one,
    listed,
    open_client,
    put_arguments,
)
from moonpool.core.store.types import (
    Entry,
    Key,
    Keys,
    Object,
    ObjectStat,
    Pin,
    Prefix,
    Presence,
    PutResult,
    Unsure,
    prefix_of,
    presences,
    put_results,
    removals,
    stat_of,
)

if TYPE_CHECKING:
    from moonpool.core.service.data_tls import PoolTls


class AsyncStore:
    """Arguments, results and errors as in ``Store``; opened by ``async with`` or ``await AsyncStore.open()``.

    A cancelled call may still take effect; its buffers are held until it ended.
    """

    def __init__(
        self,
        node: str | None = None,
        *,
        tenant: str = "default",
        namespace: str = "default",
        fingerprint: bytes = b"",
        embedded: int | str | None = None,
        token: bytes | None = None,
        tls: PoolTls | None = None,
        timeout_s: float = 2.0,
    ) -> None:
        self._arguments = (node, tenant, namespace, fingerprint, embedded, token, tls, timeout_s)
        self._holder = "embedded" if embedded is not None else node or "local"
        # Ticket -> the future and the arguments: a cancelled operation still uses their memory.
        self._waiting: dict[int, tuple[asyncio.Future[Any], object]] = {}
        self._client: Any = None
        self._worker: Any = None
        self._server: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @classmethod
    async def open(cls, *arguments: Any, **keywords: Any) -> AsyncStore:
        """A connected store. Raises Unavailable or AuthError."""
        return await cls(*arguments, **keywords).__aenter__()

    async def __aenter__(self) -> AsyncStore:
        from moonpool import _native

        self._client, self._server = await asyncio.to_thread(open_client, *self._arguments)
        self._worker = _native.Worker(self._client)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._worker.eventfd, self._collect)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Waits for the running operation, fails with Closed those not yet started, ends the connection."""
        if self._closed or self._worker is None:
            self._closed = True
            return
        self._closed = True
        assert self._loop is not None
        self._loop.remove_reader(self._worker.eventfd)
        await asyncio.to_thread(self._worker.close)
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(Closed("this store was closed"))
        self._waiting.clear()
        await asyncio.to_thread(self._client.close)
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)

    @overload
    async def put(
        self,
        keys: Key,
        buffers: Object,
        *,
        parents: Key | None = None,
        groups: Key | None = None,
        **options: Unpack[PutOptions],
    ) -> PutResult: ...

    @overload
    async def put(
        self,
        keys: Keys,
        buffers: Sequence[Object],
        *,
        parents: Sequence[Key | None] | None = None,
        groups: Sequence[Key | None] | None = None,
        **options: Unpack[PutOptions],
    ) -> list[PutResult]: ...

    async def put(
        self,
        keys: Key | Keys,
        buffers: Any,
        *,
        parents: Any = None,
        groups: Any = None,
        **options: Unpack[PutOptions],
    ) -> Any:
        """See Store.put: one PutResult, or a list."""
        arguments = put_arguments(keys, buffers, parents, groups, **options)
        answer = await self._submit("put", *arguments, held=buffers)
        results: list[PutResult] = put_results(*answer, replicas=options.get("replicas", 1))
        return results[0] if is_one(keys) else results

    @overload
    async def get(
        self, keys: Key, into: None = None, *, pin: Pin | None = None, verify: bool = False
    ) -> memoryview | None: ...

    @overload
    async def get(
        self, keys: Keys, into: None = None, *, pin: Pin | None = None, verify: bool = False
    ) -> list[memoryview | None]: ...

    @overload
    async def get(
        self, keys: Key, into: Object, *, pin: Pin | None = None, verify: bool = False
    ) -> int | None: ...

    @overload
    async def get(
        self, keys: Keys, into: Sequence[Object], *, pin: Pin | None = None, verify: bool = False
    ) -> list[int | None]: ...

    async def get(
        self, keys: Key | Keys, into: Any = None, *, pin: Pin | None = None, verify: bool = False
    ) -> Any:
        """See Store.get: memoryviews, or byte counts with ``into``; None is a miss."""
        one = is_one(keys)
        names: Keys = [keys] if is_one(keys) else keys
        if one and into is not None:
            into = [into]
        if pin is not None:  # reads mapped memory, sends no message
            client = self._open_client()
            if into is None:
                many = await asyncio.to_thread(client.pinned_views, pin._native, names, verify)
            else:
                many = await asyncio.to_thread(client.pinned_into, pin._native, names, as_parts(into), verify)
        elif into is None:
            many = await self._submit("names", "views", names, 1, True, verify)
        else:
            many = await self._submit("get_into", names, as_parts(into), verify, held=into)
        return many[0] if one else many

    @overload
    async def exists(self, keys: Key, *, pin: Literal[False] = False) -> Presence: ...

    @overload
    async def exists(self, keys: Keys, *, pin: Literal[False] = False) -> list[Presence]: ...

    @overload
    async def exists(self, keys: Keys, *, pin: Literal[True]) -> tuple[list[Presence], Pin | None]: ...

    async def exists(self, keys: Key | Keys, *, pin: bool = False) -> Any:
        """See Store.exists: a Presence, or a list; with ``pin`` the list and the Pin."""
        names: Keys = [keys] if is_one(keys) else keys
        native = None
        try:
            if pin:
                flags, native = await self._submit("names", "pin", names)
            else:
                flags = await self._submit("names", "exists", names)
            found = presences(flags)
        except NO_ANSWER:
            found = [Presence.UNKNOWN] * len(names)
        if pin:
            return found, None if native is None else Pin(native)
        return found[0] if is_one(keys) else found

    async def longest_prefix(self, keys: Keys, *, width: int = 1, pin: bool = True) -> Prefix:
        """See Store.longest_prefix."""
        try:
            answer = await self._submit("names", "prefix", keys, width, pin)
        except NO_ANSWER as error:
            return Prefix(0, why=str(error))
        return prefix_of(*answer, holder=self._holder)

    def release(self, pin: Pin) -> None:
        """Gives a pin back; never waits."""
        pin.release()

    @overload
    async def remove(
        self, keys: Key, *, node: str | None = None, generation: int | None = None
    ) -> bool | Unsure: ...

    @overload
    async def remove(
        self, keys: Keys, *, node: str | None = None, generation: Sequence[int] | None = None
    ) -> builtins.list[bool | Unsure]: ...

    async def remove(
        self, keys: Key | Keys, *, node: str | None = None, generation: int | Sequence[int] | None = None
    ) -> Any:
        """See Store.remove: a bool or an Unsure, or a list of them."""
        wanted = generations_of(keys, node, generation)
        names: Keys = [keys] if is_one(keys) else keys
        if node is None:
            answer = await self._submit("names", "remove", names)
        else:
            answer = await asyncio.to_thread(self._open_client().remove, names, node, wanted)
        removed = removals(*answer)
        return removed[0] if is_one(keys) else removed

    async def list(
        self, prefix: Key = b"", *, pattern: Key | None = None, limit: int = 1000
    ) -> builtins.list[Entry]:
        """See Store.list."""
        return await asyncio.to_thread(listed, self._open_client(), prefix, pattern, limit)

    async def remove_all(self, prefix: Key = b"", *, pattern: Key | None = None) -> int:
        """See Store.remove_all."""
        removed = 0
        while entries := await self.list(prefix, pattern=pattern, limit=REMOVE_BATCH):
            flags = await self.remove([entry.key for entry in entries])
            removed += sum(map(bool, flags))
            if not any(flags):
                break
        return removed

    @overload
    async def stat(self) -> dict[str, int]: ...

    @overload
    async def stat(self, keys: Key, *, everywhere: bool = True) -> ObjectStat | None: ...

    @overload
    async def stat(self, keys: Keys, *, everywhere: bool = True) -> builtins.list[ObjectStat | None]: ...

    async def stat(self, keys: Key | Keys | None = None, *, everywhere: bool = True) -> Any:
        """See Store.stat."""
        client = self._open_client()
        if keys is None:
            return await asyncio.to_thread(client.stat)
        names: Keys = [keys] if is_one(keys) else keys
        answers = await asyncio.to_thread(client.describe, names, everywhere)
        return stat_of(answers[0]) if is_one(keys) else [stat_of(answer) for answer in answers]

    def _open_client(self) -> Any:
        if self._closed or self._client is None:
            raise Closed(
                "this store is closed" if self._closed else "open this store first: async with AsyncStore()"
            )
        return self._client

    async def _submit(self, verb: str, *arguments: Any, held: object = None) -> Any:
        self._open_client()
        assert self._loop is not None
        future = self._loop.create_future()
        ticket = getattr(self._worker, f"submit_{verb}")(*arguments)
        self._waiting[ticket] = future, held
        answer = await future
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _collect(self) -> None:
        for ticket, answer in self._worker.poll():
            future, _ = self._waiting.pop(ticket)
            if not future.done():
                future.set_result(answer)
