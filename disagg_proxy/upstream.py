"""Connections to one engine: a protocol that carries one request at a time, and the pool that keeps them
open.

Who owns a connection: the pool while it is idle, the receiver (a relay or a health check) from ``send`` until
the answer is complete or the receiver lets go. A connection whose receiver let go in mid answer is closed at
once: that is how an engine learns that nobody waits any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from moonpool.disagg_proxy.http.response_reader import BadResponse, ResponseHead, ResponseReader
from moonpool.disagg_proxy.settings import Deadlines
from moonpool.disagg_proxy.tcp import notice_dead_peer

Clock = Callable[[], float]  # seconds, monotonic

_JOIN_BYTES_MAX = 64 << 10  # up to here a head and a body are joined and written at once


class Receiver(Protocol):
    """Whoever waits for an answer. Exactly one of ``complete=True`` or ``response_failed`` comes last."""

    def response_started(self, head: ResponseHead, body: bytes, complete: bool) -> None: ...
    def response_data(self, body: bytes, complete: bool) -> None: ...
    def response_failed(self, reason: str, why: str) -> None:
        """reason: a short label for a metric; why: the rest of the sentence "engine NAME ..."."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One TCP connection to an engine.

    reused:     it has carried a whole request before, so the engine may have closed it while it was idle.
    idle_since: time of the clock when it went idle.
    """

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._reader: ResponseReader | None = None
        self._started = False
        self._paused = False
        self._once = False
        self.reused = False
        self.idle_since = 0.0

    @property
    def reader(self) -> ResponseReader | None:
        """The reader of the answer under way (kept after a failure, for its last state)."""
        return self._reader

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(
        self, receiver: Receiver, head: bytes, body: bytes | bytearray, *, head_only: bool, once: bool = False
    ) -> None:
        """Send a request; the answer goes to the receiver.

        head_only: it was HEAD, no body will come. once: close afterwards, whatever the engine wants.
        """
        transport = self._open_transport()
        self._once = once
        self._receiver = receiver
        self._reader = ResponseReader(head_only=head_only)
        self._started = False
        if len(body) <= _JOIN_BYTES_MAX:
            transport.write(head + body if body else head)
        else:
            transport.write(head)
            transport.write(body)

    def let_go(self, receiver: Receiver) -> None:
        """The receiver wants no more: close at once, whatever the engine is doing. Nothing happens when the
        answer is complete already: then the connection may be another's by now."""
        if self._receiver is receiver:
            self._receiver = None
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._transport is not None and not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._paused:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        receiver, reader = self._receiver, self._reader
        if receiver is None or reader is None:
            self.abort()  # an engine that speaks unasked; connection_lost takes it out of the pool
            return
        try:
            body = reader.feed(data)
        except BadResponse as error:
            self._fail("bad_answer", f"sent a broken answer: {error}")
            return
        self._deliver(receiver, reader, body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.closed(self)
        self._transport = None
        receiver, reader = self._receiver, self._reader
        if receiver is None or reader is None:
            return
        if exc is None and reader.finish():
            self._deliver(receiver, reader, b"")
        elif self.reused and reader.received == 0:
            self._fail("stale", "closed an idle connection just as it was used")
        else:
            self._fail("lost", "closed the connection before its answer was complete")

    def _deliver(self, receiver: Receiver, reader: ResponseReader, body: bytes) -> None:
        complete = reader.complete
        if complete:
            self._give_back(reader)  # first, so that the receiver's next request can use it
        if self._started:
            receiver.response_data(body, complete)
        elif reader.head is not None:
            self._started = True
            receiver.response_started(reader.head, body, complete)

    def _give_back(self, reader: ResponseReader) -> None:
        self._receiver = None
        self.resume()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if reader.keep_alive and not self._once and transport.get_write_buffer_size() == 0:
            self.reused = True
            self._pool.put(self)
        else:
            transport.abort()

    def _fail(self, reason: str, why: str) -> None:
        receiver, self._receiver = self._receiver, None
        self.abort()
        if receiver is not None:
            receiver.response_failed(reason, why)

    def _open_transport(self) -> asyncio.Transport:
        if self._transport is None:
            raise RuntimeError("send on a connection that is not open")
        return self._transport


class UpstreamPool:
    """The open connections to one engine. The one that was used last is used next; the others may then
    expire.

    Bounded by the number of clients (each has one request at a time) while in use, by ``idle_max`` while
    idle.
    """

    def __init__(self, address: tuple[str, int], idle_max: int, deadlines: Deadlines, clock: Clock) -> None:
        self._address = address
        self._idle_max = idle_max
        self._deadlines = deadlines
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()
        self._clock = clock
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        """All open connections."""
        return len(self._open)

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    def take(self) -> UpstreamConnection | None:
        """An idle connection, or None: then ``connect``."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closing:
                return connection
        return None

    def put(self, connection: UpstreamConnection) -> None:
        if len(self._idle) >= self._idle_max:
            connection.abort()
            return
        connection.idle_since = self._clock()
        self._idle.append(connection)

    async def connect(self) -> UpstreamConnection:
        """A new connection, not pooled yet. Raises OSError (refused, unreachable) or TimeoutError."""
        host, port = self._address
        async with asyncio.timeout(self._deadlines.connect_s):
            _, connection = await self._loop.create_connection(lambda: UpstreamConnection(self), host, port)
        return connection

    def expire(self, now: float) -> None:
        """Close what was idle for too long (the list is ordered: the oldest is first)."""
        horizon = now - self._deadlines.upstream_idle_s
        expired = 0
        while expired < len(self._idle) and self._idle[expired].idle_since <= horizon:
            expired += 1
        self._drop(self._idle[:expired])

    def drop_idle(self) -> None:
        """One idle connection turned out to be stale: its sisters are too."""
        self._drop(list(self._idle))

    def close(self) -> None:
        """Close everything, used or not."""
        for connection in list(self._open):
            connection.abort()

    def opened(self, connection: UpstreamConnection) -> None:
        self._open.add(connection)
        notice_dead_peer(connection._open_transport(), self._deadlines.tcp_dead_peer_s)

    def closed(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def check_integrity(self) -> None:
        """Raises AssertionError when an idle connection is not open, or there are too many."""
        if not self._open.issuperset(self._idle) or len(self._idle) > self._idle_max:
            raise AssertionError(f"{len(self._idle)} idle connections of {len(self._open)} open ones")

    def _drop(self, connections: list[UpstreamConnection]) -> None:
        for connection in connections:
            self._idle.remove(connection)
            connection.abort()
