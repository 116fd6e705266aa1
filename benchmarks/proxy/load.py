"""A closed loop: each client sends its next request when it has the whole last answer, which is checked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import cast

from benchmarks.proxy.mock_engine import BODY, CHUNKS, EVENT

PLAIN_END = BODY[-6:]
STREAM_END = b"\r\n0\r\n\r\n"
CHUNK_EDGE = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")  # a router may cut elsewhere
TIMEOUT_S = 60.0


class Client(asyncio.Protocol):
    def __init__(self, requests: Iterator[bytes], *, stream: bool, done: asyncio.Future[None]) -> None:
        self.requests = requests
        self.stream = stream
        self.done = done
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        self.next()

    def next(self) -> None:
        request = next(self.requests, None)
        if request is None:
            self.done.set_result(None)
            return
        self.received = b""
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.stream and self.received.endswith(STREAM_END):
            if (
                self.received.count(EVENT) != CHUNKS
                and CHUNK_EDGE.sub(b"", self.received).count(EVENT) != CHUNKS
            ):
                self.done.set_exception(RuntimeError("a stream came back with other chunks"))
            else:
                self.next()
        elif not self.stream and self.received.endswith((PLAIN_END, STREAM_END)):  # a router may send chunks
            if BODY not in self.received or b" 200 " not in self.received[:16]:
                self.done.set_exception(RuntimeError("an answer came back with another body"))
            else:
                self.next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError("the router closed a connection"))


async def run(port: int, clients: int, requests: Sequence[bytes], *, stream: bool) -> None:
    """All requests, in order, over so many connections. Raises RuntimeError for a wrong answer."""
    loop = asyncio.get_running_loop()
    waiting = iter(requests)
    ends: list[asyncio.Future[None]] = []
    transports = []
    for _ in range(clients):
        done: asyncio.Future[None] = loop.create_future()
        ends.append(done)
        transport, _protocol = await loop.create_connection(
            lambda done=done: Client(waiting, stream=stream, done=done), "127.0.0.1", port
        )
        transports.append(transport)
    await asyncio.wait_for(asyncio.gather(*ends), TIMEOUT_S)
    for transport in transports:
        transport.abort()
