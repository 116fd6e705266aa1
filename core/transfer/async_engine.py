"""``AsyncTransferEngine``: the verbs of ``TransferEngine`` for asyncio.

Bytes move on C++ threads that never take the GIL; an eventfd tells the event loop when they are done and when
messages arrive. Calls that wait for a peer's answer (open, notify) run on a thread of asyncio's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from moonpool.core.errors import Closed
from moonpool.core.transfer.engine import (
    _LOOPBACK,
    EngineFacts,
    name_engine,
    open_engine,
    open_file,
    slices_of,
    submit,
)
from moonpool.core.transfer.metadata.backend import Metadata
from moonpool.core.transfer.metadata.naming import Naming, engine_name, store_of
from moonpool.core.transfer.region import Region, RegionTable
from moonpool.core.transfer.segment import Segment
from moonpool.core.transfer.transfer import Columns, TransferBase, columns_of
from moonpool.core.transfer.types import Batch, Column, Local, Notification, Slice, TransferOptions

if TYPE_CHECKING:
    from moonpool import _native
    from moonpool.core.service.data_tls import EngineTls


class AsyncTransfer(TransferBase):
    """What ``AsyncTransferEngine.submit`` gives; ``await`` it for its bytes, or a TransferError.

    Several tasks may await it. A task that is cancelled while it awaits does not cancel the transfer; tasks
    of ``read``, ``write`` and ``transfer`` do.
    """

    __slots__ = ("_ended",)

    def __init__(
        self, native: _native.Engine, ticket: int, bytes_total: int, ended: asyncio.Future[None]
    ) -> None:
        super().__init__(native, ticket, bytes_total)
        self._ended = ended

    def _forget(self) -> None:
        """Nothing: the ticket is released when its end is collected; released earlier, the loop would never
        learn of the end."""

    def _collected(self) -> None:
        self._look()
        self._native.release(self._ticket)
        if not self._ended.done():
            self._ended.set_result(None)

    def _abandon(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # no task may have awaited it

    def __await__(self) -> Generator[Any, None, int]:
        yield from asyncio.shield(self._ended).__await__()
        return self._outcome()


class AsyncTransferEngine(EngineFacts):
    """Arguments, results and errors as in ``TransferEngine``; opened by ``async with`` or ``await
    AsyncTransferEngine.start(...)``.

    A call that is cancelled asks for the end of its transfer, and does not wait for it.
    """

    def __init__(
        self,
        name: str = "",
        *,
        listen: str | Sequence[str] | None = _LOOPBACK,
        token: bytes | None = None,
        tenant: str = "default",
        transports: Sequence[str] | None = None,
        outside_transports: Sequence[str | os.PathLike[str]] = (),
        rdma_devices: Sequence[str] = (),
        rdma_library: str = "",
        efa_provider: str = "efa",
        efa_devices: Sequence[str] = (),
        interface: str = "",
        host_id: str = "",
        metadata: str | Metadata | None = None,
        advertise: str = "",
        io_threads: int = 2,
        connections_per_peer: int = 2,
        timeout_s: float = 5.0,
        tls: EngineTls | None = None,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "name": name,
            "listen": listen,
            "token": token,
            "tenant": tenant,
            "transports": transports,
            "outside_transports": outside_transports,
            "rdma_devices": rdma_devices,
            "rdma_library": rdma_library,
            "efa_provider": efa_provider,
            "efa_devices": efa_devices,
            "interface": interface,
            "host_id": host_id,
            "io_threads": io_threads,
            "connections_per_peer": connections_per_peer,
            "timeout_s": timeout_s,
            "tls": tls,
        }
        self._metadata = metadata
        self._advertise = advertise
        self._naming: Naming | None = None
        self._open: _native.Engine | None = None
        self._regions: RegionTable | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._waiting: dict[int, AsyncTransfer] = {}  # keeps each alive until its end is collected
        self._message = asyncio.Event()

    @classmethod
    async def start(cls, *arguments: Any, **keywords: Any) -> AsyncTransferEngine:
        """A running engine. Raises as ``TransferEngine(...)`` does."""
        return await cls(*arguments, **keywords).__aenter__()

    async def __aenter__(self) -> AsyncTransferEngine:
        native, self._naming = await asyncio.to_thread(self._begin)
        self._open = native
        self._regions = RegionTable(native)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(native.eventfd, self._collect)
        return self

    def _begin(self) -> tuple[_native.Engine, Naming]:
        given = self._arguments
        store = store_of(self._metadata, given["token"])
        native = open_engine(**given | {"name": engine_name(given["name"], store)})
        naming = name_engine(
            native, store, tenant=given["tenant"], host_id=given["host_id"], advertise=self._advertise
        )
        return native, naming

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> bool:
        """See TransferEngine.close."""
        native = self._open
        if native is None:
            self._closed = True
            return True
        assert self._loop is not None
        assert self._regions is not None
        assert self._naming is not None
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(native.eventfd)
            await asyncio.to_thread(self._naming.close)
        may_free = self._regions.close_all(may_free=await asyncio.to_thread(native.close))
        for transfer in self._waiting.values():
            transfer._abandon(Closed("this engine was closed", operation="transfer"))
        self._waiting.clear()
        self._message.set()
        return may_free

    # ---- memory

    async def register(self, memory: Any, location: str = "cpu:0") -> Region:
        """See TransferEngine.register."""
        return await asyncio.to_thread(self._table().register, memory, location)

    async def allocate(self, nbytes: int, location: str = "cpu:0") -> Region:
        """See TransferEngine.allocate."""
        return await asyncio.to_thread(self._table().allocate, nbytes, location)

    # ---- peers

    async def open(self, name: str) -> Segment:
        """See TransferEngine.open."""
        self._native  # noqa: B018  raises when it is closed
        assert self._naming is not None
        return await asyncio.to_thread(self._naming.open, name)

    async def open_file(
        self, path: str | os.PathLike[str], *, size: int | None = None, writable: bool = True
    ) -> Segment:
        """See TransferEngine.open_file."""
        native = self._native
        return await asyncio.to_thread(lambda: Segment(native, open_file(native, path, size, writable)))

    async def refresh(self, segment: Segment) -> None:
        """``segment.refresh()``, which asks the peer, on a thread."""
        await asyncio.to_thread(segment.refresh)

    async def shut_out(self, segment_id: bytes) -> None:
        """See TransferEngine.shut_out."""
        await asyncio.to_thread(self._native.shut_out, segment_id)

    def admit(self, segment_id: bytes) -> None:
        """See TransferEngine.admit."""
        self._native.admit(segment_id)

    # ---- moving bytes

    async def read(
        self,
        segment: Segment,
        local: Local | Column,
        remote: int | Column,
        length: int | Column | None = None,
        **options: Unpack[TransferOptions],
    ) -> int:
        """See TransferEngine.read."""
        return await self._run(slices_of(segment, "r", local, remote, length), **options)

    async def write(
        self,
        segment: Segment,
        local: Local | Column,
        remote: int | Column,
        length: int | Column | None = None,
        **options: Unpack[TransferOptions],
    ) -> int:
        """See TransferEngine.write."""
        return await self._run(slices_of(segment, "w", local, remote, length), **options)

    async def transfer(self, slices: Batch | Sequence[Slice], **options: Unpack[TransferOptions]) -> int:
        """See TransferEngine.transfer."""
        return await self._run(columns_of(slices), **options)

    def submit(self, slices: Batch | Sequence[Slice], **options: Unpack[TransferOptions]) -> AsyncTransfer:
        """See TransferEngine.submit; never blocks. ``await`` what it gives."""
        return self._start(columns_of(slices), **options)

    # ---- messages

    async def notify(self, segment: Segment, message: bytes) -> None:
        """See TransferEngine.notify."""
        await asyncio.to_thread(self._native.notify, segment.handle, message)

    async def notifications(self, timeout_s: float = 0.0) -> list[Notification]:
        """See TransferEngine.notifications."""
        assert self._loop is not None
        give_up_s = self._loop.time() + timeout_s
        while True:
            self._message.clear()
            found = self._native.notifications()
            left_s = give_up_s - self._loop.time()
            if found or left_s <= 0:
                return [Notification(*row) for row in found]
            try:
                await asyncio.wait_for(self._message.wait(), left_s)
            except TimeoutError:
                continue

    @property
    def _native(self) -> _native.Engine:  # type: ignore[override]  # closed or not started: no engine
        if self._closed or self._open is None:
            raise Closed(
                "this engine is closed"
                if self._closed
                else "start this engine first: async with AsyncTransferEngine()"
            )
        return self._open

    def _table(self) -> RegionTable:
        self._native  # noqa: B018  raises when it is closed
        assert self._regions is not None
        return self._regions

    async def _run(self, columns: Columns, **options: Unpack[TransferOptions]) -> int:
        transfer = self._start(columns, **options)
        try:
            return await transfer
        except asyncio.CancelledError:
            transfer.cancel()
            raise

    def _start(self, columns: Columns, **options: Unpack[TransferOptions]) -> AsyncTransfer:
        native = self._native
        assert self._loop is not None
        ticket = submit(native, columns, **options)
        transfer = AsyncTransfer(native, ticket, columns.asked, self._loop.create_future())
        self._waiting[ticket] = transfer
        return transfer

    def _collect(self) -> None:
        assert self._open is not None
        for ticket in self._open.poll():
            transfer = self._waiting.pop(ticket, None)
            if transfer is not None:
                transfer._collected()
        self._message.set()
