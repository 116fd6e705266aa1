"""HTTP/1.1 for the mock engine: one asyncio protocol, requests one after the other."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Protocol, cast

import httptools

BODY_BYTES_MAX = 64 << 20

_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 503: b"Service Unavailable"}


class Running(Protocol):
    """A request that was not answered at once."""

    def abort(self) -> None:
        """The client has left."""
        ...


class Handler(Protocol):
    """Begins to answer a request. The connection's next request comes when this one is answered."""

    def __call__(self, connection: Connection, method: bytes, path: bytes, body: bytes) -> Running | None:
        """path: without its query. Returns None for a request that is answered already. On the event loop."""


class Connection(asyncio.Protocol):
    """One client. ``answer``, or ``begin``, ``event``... and ``end``, exactly once for each request."""

    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = bytearray()
        self._waiting: deque[tuple[bytes, bytes, bytes, bool]] = deque()
        self._busy = False
        self._keep = True
        self._running: Running | None = None
        self.request_id = b""

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio. The connection belongs to ``connections`` until it is lost."""
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio. What is no HTTP ends the connection without an answer."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio. Aborts the request that is being answered; those behind it are dropped."""
        self._connections.discard(self)
        running, self._running = self._running, None
        if running is not None:
            running.abort()

    # httptools

    def on_message_begin(self) -> None:
        """Called by httptools, also for a pipelined request while an earlier one is answered."""
        self._url, self._body = b"", bytearray()

    def on_url(self, url: bytes) -> None:
        """Called by httptools, once for each part of the URL that a read brought."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools. X-Request-Id alone is kept, and stays until another request brings one."""
        if name.lower() == b"x-request-id":
            self.request_id = value

    def on_body(self, body: bytes) -> None:
        """Called by httptools. More than BODY_BYTES_MAX ends the connection without an answer."""
        self._body += body
        if len(self._body) > BODY_BYTES_MAX:
            self._transport.close()

    def on_message_complete(self) -> None:
        """Called by httptools. The request waits until those before it on this connection are answered."""
        keep = self._parser.should_keep_alive()
        self._waiting.append(
            (self._parser.get_method(), self._url.partition(b"?")[0], bytes(self._body), keep)
        )
        self._next()

    # answers

    @property
    def is_gone(self) -> bool:
        """Whether the client has left, or the connection is being closed. What is written then is dropped."""
        return self._transport.is_closing()

    def answer(self, status: int, content: object, kind: bytes = b"application/json") -> None:
        """content: bytes as they are, anything else as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content, separators=(",", ":")).encode()
        self._transport.write(
            b"HTTP/1.1 %d %b\r\nServer: moonpool-mock\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b"
            % (status, _REASONS.get(status, b"Other"), kind, len(body), self._closing(), body)
        )
        self._done()

    def begin(self) -> None:
        """The head of a stream of events."""
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nServer: moonpool-mock\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n%b\r\n" % self._closing()
        )

    def event(self, content: object) -> None:
        """One server-sent event, as one chunk. content: bytes as they are, anything else as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content, separators=(",", ":")).encode()
        piece = b"data: " + data + b"\n\n"
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end(self) -> None:
        """The last chunk of a stream of events; the next request on this connection may begin."""
        self._transport.write(b"0\r\n\r\n")
        self._done()

    def cut(self) -> None:
        """Aborts the connection, in the middle of an answer if there is one."""
        self._transport.abort()

    def _closing(self) -> bytes:
        return b"" if self._keep else b"Connection: close\r\n"

    def _done(self) -> None:
        self._running = None
        self._busy = False
        if not self._keep:
            self._transport.close()
        elif self._waiting:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if self._busy or not self._waiting or self._transport.is_closing():
            return
        method, path, body, self._keep = self._waiting.popleft()
        self._busy = True
        running = self._handler(self, method, path, body)
        if self._busy:
            self._running = running
