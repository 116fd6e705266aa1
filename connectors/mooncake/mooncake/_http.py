"""An HTTP server for unknown clients: connections, heads, bodies and time are bounded.

| bound | default | beyond it |
|---|---|---|
| connections | 1,024, at most half of the files that the process may open | the oldest is closed |
| time of a connection | 30 s, and again for each MiB that moves | it is closed |
| bytes of a head | 32 KiB | it is closed |
| bytes of a body | given | 413 |
| bytes of all bodies that are held at once | 4 bodies | 503 |

One request for each connection, as at core's AdminServer: the answer ends it. aiohttp gets the head when it
is complete, then as many bytes as its Content-Length says, and nothing that comes behind them; a body of
unknown length is 411. So a connection that is silent or slow costs memory for its head, for READ_BYTES of a
body, twice at most, that the handler has not asked for, and for the body that it has: all until its time is
over. A handler is cancelled when its connection is lost. All runs on the loop of start().
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from moonpool.core.service import http_faults
from moonpool.core.service.admin_http import PassingOn

CONNECTIONS_MAX = 1024
TIMEOUT_S = 30.0
HEAD_BYTES_MAX = 32 << 10
FIELD_BYTES_MAX = 8 << 10
FIELDS_MAX = 64
BODIES_MAX = 4
READ_BYTES = 64 << 10
PROGRESS_BYTES = 1 << 20
LINGERING_S = 2.0  # an answer that comes before the end of its request's body can be read
BACKLOG = 128  # connections that wait in the kernel
TRY_AGAIN_S = 0.1
_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,18})[ \t]*\r\n", re.IGNORECASE)

CONNECTIONS_HELP = "the most open connections; beyond it the oldest is closed (1,024)"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def connections_that_fit(wanted: int | None = None) -> int:
    """``wanted`` or CONNECTIONS_MAX, at most half of the process's limit of open files, at least 1."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = CONNECTIONS_MAX if wanted is None else wanted
    return max(1, most if files == resource.RLIM_INFINITY else min(most, files // 2))


@dataclass(frozen=True)
class HttpLimits:
    """The bounds of a server.

    body_bytes_max: bytes of one body; all bodies together have BODIES_MAX times that.
    connections_max: open connections; None: 1,024.
    """

    body_bytes_max: int
    connections_max: int | None = None
    timeout_s: float = TIMEOUT_S
    head_bytes_max: int = HEAD_BYTES_MAX
    lingering_s: float = LINGERING_S


class BoundedHttp:
    """Serves ``app`` from start() to close(). Handlers read bodies with body() alone."""

    def __init__(self, app: web.Application, limits: HttpLimits) -> None:
        self.limits = limits
        self.connections_max = connections_that_fit(limits.connections_max)
        self.body_bytes = 0  # bytes of all bodies that are held now
        self.open: dict[_Connection, None] = {}
        self.by_protocol: dict[asyncio.BaseProtocol, _Connection] = {}
        app.middlewares.insert(0, self._one_request)
        app.on_response_prepare.append(http_faults.hide_versions)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=http_faults.logger(),
            handle_signals=False,
            max_line_size=FIELD_BYTES_MAX,
            max_field_size=FIELD_BYTES_MAX,
            max_headers=FIELDS_MAX,
            read_bufsize=READ_BYTES,
            handler_cancellation=True,
            lingering_time=limits.lingering_s,
        )
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """The address that it listens at. OSError, or OverflowError for a port that is none."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        await self._runner.setup()
        self._accepting = asyncio.create_task(self._accept_all(self._listener))
        address = self._listener.getsockname()
        return address[0], address[1]

    async def close(self) -> None:
        """Harmless the second time, and without start()."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.open):
            connection.abort()
        await self._runner.cleanup()

    async def _accept_all(self, listener: socket.socket) -> None:
        """One after the other: asyncio's own servers accept a hundred before they count the first."""
        loop = asyncio.get_running_loop()
        calm = http_faults.Budget()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:  # no file for it, or it is gone already
                if calm.take():
                    http_faults.logger().warning("a connection waits: %s%s", error.strerror, calm.more())
                await asyncio.sleep(TRY_AGAIN_S)
                continue
            while len(self.open) >= self.connections_max:
                next(iter(self.open)).abort()
            with suppress(OSError):  # gone already
                await loop.connect_accepted_socket(self._protocol, accepted)

    def _protocol(self) -> asyncio.Protocol:
        if self._runner.server is None:
            raise RuntimeError("a connection before start()")
        connection = _Connection(self, self._runner.server())
        self.open[connection] = None
        return connection

    async def body(self, request: web.Request) -> bytearray:
        """All of it. 413 for one that is too large, 503 while too many bytes of others are held."""
        limit = self.limits.body_bytes_max
        if (request.content_length or 0) > limit:
            raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
        connection, body = self._connection_of(request), bytearray()
        async for part in request.content.iter_any():
            if not connection.hold(len(part)):
                text = "too many bodies are being sent; try again\n"
                raise web.HTTPServiceUnavailable(text=text, headers={"Retry-After": "1"})
            body += part
            connection.moved(len(part))
        return body

    async def send(self, request: web.Request, value: Any, content_type: str) -> web.StreamResponse:
        """An answer out of a buffer that is not copied: a piece goes when the one before it has gone."""
        data = memoryview(value)
        response = web.StreamResponse(headers={"Content-Type": content_type})
        response.content_length = data.nbytes
        response.force_close()
        connection = self._connection_of(request)
        await response.prepare(request)
        if request.method != "HEAD":
            for start in range(0, data.nbytes, PROGRESS_BYTES):
                part = data[start : start + PROGRESS_BYTES]
                await response.write(part)
                connection.moved(part.nbytes)
        await response.write_eof()
        return response

    def _connection_of(self, request: web.Request) -> _Connection:
        connection = self.by_protocol.get(request.protocol)
        if connection is None:  # it was lost just now
            raise web.HTTPServiceUnavailable
        return connection

    @web.middleware
    async def _one_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """What it holds, it gives back with its answer, after which the connection ends."""
        connection = self._connection_of(request)
        try:
            if "Transfer-Encoding" in request.headers:
                raise web.HTTPLengthRequired
            response = await handler(request)
        except web.HTTPException as error:
            error.force_close()
            raise
        finally:
            connection.release()
        response.force_close()
        return response


class _Connection(PassingOn):
    """Passes one request on to aiohttp's protocol, and ends when its time is over or its head too long."""

    def __init__(self, http: BoundedHttp, inner: asyncio.Protocol) -> None:
        self._http = http
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head: bytearray | None = bytearray()  # None: aiohttp has it
        self._body_left = 0  # bytes that are still to be passed on
        self._held = 0  # bytes of its body
        self._moved = 0

    def hold(self, nbytes: int) -> bool:
        """Whether there is room for more of its body."""
        if self._http.body_bytes + nbytes > BODIES_MAX * self._http.limits.body_bytes_max:
            return False
        self._http.body_bytes += nbytes
        self._held += nbytes
        return True

    def release(self) -> None:
        self._http.body_bytes -= self._held
        self._held = 0

    def abort(self) -> None:
        self._http.open.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def moved(self, nbytes: int) -> None:
        """Bytes of a body: each PROGRESS_BYTES give it time anew."""
        self._moved += nbytes
        if self._moved >= PROGRESS_BYTES and self in self._http.open:
            self._moved %= PROGRESS_BYTES
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._http.limits.timeout_s, self.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("an HTTP connection needs a stream")
        self._transport = transport
        if self not in self._http.open:  # it made room for a newer one before it began
            transport.abort()
            return
        self._start_timer()
        self._made = True
        self._http.by_protocol[self._inner] = self
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.open.pop(self, None)
        self._http.by_protocol.pop(self._inner, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._made:
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._made:
            return
        if self._head is not None:
            data = self._head_of(self._head, data)
        passed = data[: self._body_left]
        self._body_left -= len(passed)
        if passed:
            self._inner.data_received(passed)

    def _head_of(self, head: bytearray, data: bytes) -> bytes:
        """Passes the head on when it is complete. What comes behind it; nothing before that."""
        seen = max(0, len(head) - len(_HEAD_END) + 1)
        head += data
        end = head.find(_HEAD_END, seen)
        if end < 0 or end > self._http.limits.head_bytes_max:
            if len(head) > self._http.limits.head_bytes_max:
                self.abort()
            return b""
        end += len(_HEAD_END)
        length = _LENGTH.search(head, 0, end)
        self._body_left = 0 if length is None else int(length[1])
        self._head = None
        self._inner.data_received(bytes(head[:end]))
        return bytes(head[end:])
