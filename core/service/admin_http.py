"""The small HTTP server beside a process: one request per connection, everything bounded.

A scrape every few seconds needs no kept-alive connections. So each connection ends after its answer, and at
the latest after its deadline, whatever the client does or does not send; when there are too many, the oldest
of the address that has most makes room. Thus slow, idle or garbled clients cost a bounded amount of memory
and delay no client of another address. Connections are accepted outside of Python
(``_native.AcceptQueue``), which keeps some of each address: a flood from one address takes no more of this
process than it can serve, and keeps no other address waiting. Compressed bodies are not inflated. With TLS
the deadline holds from the first byte of the handshake.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from moonpool.core.errors import ConfigError, Error
from moonpool.core.service import http_faults
from moonpool.core.service.addresses import Address
from moonpool.core.service.audit import Refusals, key_digest
from moonpool.core.service.http_faults import hide_versions
from moonpool.core.service.http_tls import FollowedContext
from moonpool.core.service.native_core import native_core

if TYPE_CHECKING:
    from moonpool import _native

Answer = Callable[[], Awaitable[web.Response]]
AnswerTo = Callable[[web.Request], Awaitable[web.Response]]

BODY_BYTES_MAX = 64 << 10
HEADER_BYTES_MAX = 8 << 10
HEADERS_MAX = 64
BACKLOG = 128  # that the kernel keeps
PLACES = 64  # of connections that this process has accepted and not begun to serve
TAKEN_AT_ONCE = 8


def bearer_is(authorization: str, *secrets: bytes) -> bool:
    """Whether an Authorization header contains one of ``secrets``, compared in constant time."""
    scheme, _, shown = authorization.partition(" ")
    given = shown.strip().encode(errors="surrogateescape")
    return scheme.lower() == "bearer" and any(hmac.compare_digest(given, secret) for secret in secrets)


class AdminServer:
    """Serves ``routes`` (path -> coroutine that returns the answer) on ``address`` until close().

    private: routes that get their request, once is_allowed(its Authorization header, or "") is true. A path
    may be "POST /path".
    own: routes of all methods that get their request and check it by themselves.
    listening: sockets that listen at the address already; none: new ones.
    """

    def __init__(
        self,
        address: Address,
        routes: Mapping[str, Answer],
        *,
        key: str,
        connections_max: int,
        timeout_s: float,
        tls: FollowedContext | None = None,
        private: Mapping[str, AnswerTo] | None = None,
        is_allowed: Callable[[str], bool] = lambda authorization: False,
        own: Mapping[str, AnswerTo] | None = None,
        listening: Sequence[socket.socket] = (),
    ) -> None:
        self.address = address
        self._own = dict(own or {})
        self._private = dict(private or {})
        self._is_allowed = is_allowed
        self._refusals = Refusals()
        self._tls = tls
        self._routes = dict(routes)
        self._key = key
        self._connections_max = connections_max
        self._timeout_s = timeout_s
        self._open: dict[_Deadline, str] = {}  # with the client's address, oldest first
        self._runner: web.AppRunner | None = None
        self._listeners = list(listening)
        self._queues: list[_native.AcceptQueue] = []
        self._accepted: set[asyncio.Task[object]] = set()
        self._closed = False

    async def start(self) -> None:
        """Listens. Raises ConfigError when the address is in use or not ours. Sets ``address`` to the real
        port.
        """
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.on_response_prepare.append(hide_versions)
        for path, answer in self._routes.items():
            app.router.add_get(path, _closing(_ignoring_request(answer)))
        for path, private in self._private.items():
            method, _, place = path.rpartition(" ")
            add = app.router.add_post if method == "POST" else app.router.add_get
            add(place, _closing(self._guarded(private)))
        for path, own in self._own.items():
            app.router.add_route("*", path, _closing(own))
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=http_faults.logger(),
            handle_signals=False,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            max_headers=HEADERS_MAX,
            keepalive_timeout=0.0,
            lingering_time=0.0,
            auto_decompress=False,  # a few KiB may inflate to gigabytes
        )
        await self._runner.setup()
        try:
            await self._listen()
        except OSError as error:
            self._stop_listening()
            await self._runner.cleanup()
            reason = (
                "is in use"
                if error.errno == errno.EADDRINUSE
                else f"cannot be used ({error.strerror or error})"
            )
            raise ConfigError(
                f"address {self.address} {reason}; choose another with {self._key}",
                operation="listen",
                key=self._key,
                peer=str(self.address),
                cause=error,
            ) from error
        self.address = Address(self.address.host, self._listeners[0].getsockname()[1])

    async def _listen(self) -> None:
        """At every address that the host names. Raises OSError."""
        if not self._listeners:
            await self._bind()
        loop = asyncio.get_running_loop()
        for listening in self._listeners:
            queue = native_core("admin page").AcceptQueue(listening.fileno(), PLACES)
            self._queues.append(queue)
            loop.add_reader(queue.fileno(), self._take, queue)

    async def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            self.address.host, self.address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, place in dict.fromkeys(found):
            try:
                listening = socket.socket(family, kind, protocol)
            except OSError as error:
                if error.errno == errno.EAFNOSUPPORT and len(found) > 1:
                    continue  # a kernel without IPv6
                raise
            self._listeners.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(place)
            listening.listen(BACKLOG)

    def _stop_listening(self) -> None:
        for queue in self._queues:
            asyncio.get_running_loop().remove_reader(queue.fileno())
            queue.close()
        for listening in self._listeners:
            listening.close()
        self._queues.clear()

    def _take(self, queue: _native.AcceptQueue) -> None:
        """Some of those that wait; then it is the turn of what else the loop has to do."""
        loop = asyncio.get_running_loop()
        for fd in queue.take(TAKEN_AT_ONCE):
            task = loop.create_task(self._adopt(socket.socket(fileno=fd)))
            self._accepted.add(task)
            task.add_done_callback(self._accepted.discard)

    async def _adopt(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._accept, connection)
        except OSError:  # it has ended meanwhile
            connection.close()

    def _guarded(self, answer: AnswerTo) -> AnswerTo:
        async def handle(request: web.Request) -> web.Response:
            if self._is_allowed(request.headers.get("Authorization", "")):
                return await answer(request)
            key = request.headers.get("Authorization", "").partition(" ")[2].strip()
            self._refusals.record(
                "key_refused",
                path=request.path,
                peer=request.remote,
                key=key_digest(key.encode(errors="surrogateescape")) or None,
            )
            text = "this page needs the admin token: Authorization: Bearer TOKEN\n"
            return web.Response(status=401, text=text, headers={"WWW-Authenticate": "Bearer"})

        return handle

    async def close(self) -> None:
        """Stops listening and ends every connection."""
        self._closed = True
        self._stop_listening()
        for task in list(self._accepted):
            task.cancel()
        for connection in list(self._open):
            connection.abort()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def listening(self) -> tuple[socket.socket, ...]:
        """The sockets that listen, for another process that takes over."""
        return tuple(self._listeners)

    @property
    def url(self) -> str:
        """The root URL, with the port that was bound."""
        return f"{'http' if self._tls is None else 'https'}://{self.address}"

    @property
    def connections(self) -> int:
        """Number of connections that are open now."""
        return len(self._open)

    def _accept(self) -> asyncio.Protocol:
        if self._runner is None or self._runner.server is None:
            raise RuntimeError("a connection before start()")
        return _Deadline(self._runner.server, self._timeout_s, self, self._tls)

    def admit(self, connection: _Deadline, address: str) -> bool:
        """Counts a new connection of ``address``; False when the server is closed. Beyond the maximum the
        oldest connection of the address that has most is closed."""
        if self._closed:
            return False
        self._open[connection] = address
        if len(self._open) > self._connections_max:
            [(crowd, _)] = Counter(self._open.values()).most_common(1)
            next(each for each, of in self._open.items() if of == crowd).abort()
        return True

    def forget(self, connection: _Deadline) -> None:
        """The connection has ended. Idempotent."""
        self._open.pop(connection, None)


class PassingOn(asyncio.Protocol):
    """Passes a connection's events on to ``_inner`` once that knows the connection."""

    _inner: asyncio.Protocol
    _made = False

    def eof_received(self) -> bool | None:
        """The peer sends nothing more."""
        return self._inner.eof_received() if self._made else None

    def pause_writing(self) -> None:
        """The peer reads more slowly than it is sent to."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self._inner.resume_writing()


class _Deadline(PassingOn):
    """Passes everything on to what ``make_inner`` makes, and cuts the connection off at its deadline.

    That is made when the first bytes come: it is a third of what a connection costs that says nothing, and
    floods of those take the loop's time from others. With TLS it is first the protocol of the bare
    connection, then that of the decrypted one, ``_plain``. Bytes that arrive before that is there wait in
    ``_early``.
    """

    def __init__(
        self,
        make_inner: Callable[[], asyncio.Protocol],
        timeout_s: float,
        server: AdminServer,
        tls: FollowedContext | None,
    ) -> None:
        self._make_inner = make_inner
        self._plain: asyncio.Transport | None = None
        self._timeout_s = timeout_s
        self._server = server
        self._tls = tls
        self._upgrade: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        self._server.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("an HTTP connection needs a stream")
        self._transport = transport
        if not self._server.admit(self, _address_of(transport)):
            transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self.abort)
        if self._tls is None:
            self._begin(transport)
        else:
            transport.pause_reading()
            self._upgrade = asyncio.get_running_loop().create_task(self._start_tls(transport, self._tls))

    async def _start_tls(self, transport: asyncio.Transport, tls: FollowedContext) -> None:
        loop = asyncio.get_running_loop()
        try:
            decrypted = await loop.start_tls(
                transport, self, tls.current(), server_side=True, ssl_handshake_timeout=self._timeout_s
            )
        except OSError:  # no TLS, or cut off; the connection is closed
            return
        if decrypted is not None:
            self._begin(decrypted)

    def _begin(self, transport: asyncio.Transport) -> None:
        self._plain = transport
        if self._early:
            data = b"".join(self._early)
            self._early.clear()
            self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._made:
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._plain is None:
            self._early.append(data)
            return
        if not self._made:
            self._inner = self._make_inner()
            self._made = True
            self._inner.connection_made(self._plain)
        self._inner.data_received(data)


def _address_of(transport: asyncio.Transport) -> str:
    """The client's address; of IPv6 its /64, which one host may have whole."""
    peer = transport.get_extra_info("peername")
    host = str(peer[0]) if peer else ""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def _ignoring_request(answer: Answer) -> AnswerTo:
    async def handle(_request: web.Request) -> web.Response:
        return await answer()

    return handle


def _closing(answer: AnswerTo) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            response = await answer(request)
        except Error as error:
            response = web.Response(status=503, text=f"{error}\n")
        response.force_close()
        return response

    return handle
