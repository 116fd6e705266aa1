"""A closed loop: each client sends its next request when it has the whole last answer, which is checked."""

from __future__ import annotations

import asyncio
from typing import cast

from benchmarks.proxy.mock_engine import BODY, CHUNKS, EVENT

PLAIN_END = BODY[-6:]
STREAM_END = b"\r\n0\r\n\r\n"
TIMEOUT_S = 60.0


def request(prompt_bytes: int, *, stream: bool) -> bytes:
    """One chat request as a client library sends it."""
    flag = b'"stream":true,' if stream else b""
    body = b'{"model":"m",' + flag + b'"messages":[{"role":"user","content":"' + b"p" * prompt_bytes + b'"}]}'
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAccept: */*\r\nUser-Agent: bench/1\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body


class Client(asyncio.Protocol):
    def __init__(self, sent: bytes, *, stream: bool, budget: list[int], done: asyncio.Future[None]) -> None:
        self.sent = sent
        self.stream = stream
        self.budget = budget
        self.done = done
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        self.next()

    def next(self) -> None:
        if self.budget[0] == 0:
            self.done.set_result(None)
            return
        self.budget[0] -= 1
        self.received = b""
        self.transport.write(self.sent)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.stream and self.received.endswith(STREAM_END):
            if self.received.count(EVENT) != CHUNKS:
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


async def run(port: int, clients: int, count: int, *, stream: bool, prompt_bytes: int) -> None:
    """``count`` requests over ``clients`` connections. Raises RuntimeError for a wrong answer."""
    loop = asyncio.get_running_loop()
    budget = [count]
    sent = request(prompt_bytes, stream=stream)
    ends: list[asyncio.Future[None]] = []
    transports = []
    for _ in range(clients):
        done: asyncio.Future[None] = loop.create_future()
        ends.append(done)
        transport, _protocol = await loop.create_connection(
            lambda done=done: Client(sent, stream=stream, budget=budget, done=done), "127.0.0.1", port
        )
        transports.append(transport)
    await asyncio.wait_for(asyncio.gather(*ends), TIMEOUT_S)
    for transport in transports:
        transport.abort()
