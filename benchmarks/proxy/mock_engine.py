"""An engine that answers at once, or streams 64 chunks 2 ms apart: little of the CPU is its own.

python -m benchmarks.proxy.mock_engine PORT [EVENTS REPLAY [TELLS]]

With two ZMQ endpoints it publishes KV events as vLLM does: PROMPTS_HELD prompts at its start, and with TELLS
in steps of STEP_S the blocks that the prompts of the step brought, and as many that had to go. They are as
many and as long as those of a real engine, but of tokens that nobody asks for.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from typing import cast

import uvloop

from moonpool.core.service.kv_event_publisher import (
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventPublisher,
    QueuedEventSource,
)

CHUNKS = 64
CHUNK_INTERVAL_S = 0.002
BODY = b'{"id":"x","choices":[{"message":{"content":"' + b"y" * 400 + b'"}}]}'
ANSWER = (
    b"HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    % len(BODY)
) + BODY
# What a prefill engine answers in the two-step form, and how it knows that it is one.
PREFILL_BODY = (
    b'{"id":"x","choices":[{"message":{"content":"y"}}],"kv_transfer_params":{"do_remote_prefill":true,'
    b'"do_remote_decode":false,"remote_engine_id":"p","remote_block_ids":[1,2,3],"remote_host":"127.0.0.1",'
    b'"remote_port":9}}'
)
PREFILL_ANSWER = (
    b"HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    % len(PREFILL_BODY)
) + PREFILL_BODY
PREFILL_SIGN = b'"do_remote_decode":true'
EVENT = b'data: {"id":"x","choices":[{"delta":{"content":"token"}}],"created":1,"model":"m"}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STEP_S = 0.01
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 32
PROMPTS_HELD = 256
SHAPES = 64  # prompts whose tokens are made before


class Teller:
    """What the prompts of a step brought, and what had to go for them."""

    def __init__(self, endpoint: str, replay: str) -> None:
        rng = random.Random(endpoint)
        self._source = QueuedEventSource()
        self._publisher = KvEventPublisher(self._source, endpoint, replay=replay)
        tokens = PROMPT_BLOCKS * BLOCK_TOKENS
        self._shapes = [[rng.randrange(50_000) for _ in range(tokens)] for _ in range(SHAPES)]
        self._next = 0
        self._held: deque[list[int]] = deque()
        self._due: list[KvEvent] = []
        for _ in range(PROMPTS_HELD):
            self._store()
        self._tell()

    def prompt(self) -> None:
        """One was computed."""
        if not self._due:
            asyncio.get_running_loop().call_later(STEP_S, self._tell)
        self._store()

    def _store(self) -> None:
        self._next += 1
        hashes = [self._next * PROMPT_BLOCKS + block for block in range(PROMPT_BLOCKS)]
        tokens = [self._next, *self._shapes[self._next % SHAPES][1:]]
        self._due.append(BlockStored(hashes, None, tokens, BLOCK_TOKENS, medium="GPU"))
        self._held.append(hashes)
        if len(self._held) > PROMPTS_HELD:
            self._due.append(BlockRemoved(self._held.popleft(), medium="GPU"))

    def _tell(self) -> None:
        self._source.add(self._due)
        self._due = []


class MockEngine(asyncio.Protocol):
    """One connection, one request at a time."""

    teller: Teller | None = None  # who hears of each prompt

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, separator, body = self.received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = 0
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(body) < length:
            return
        self.received = b""
        if self.teller is not None and length:
            self.teller.prompt()
        if PREFILL_SIGN in body or PREFILL_SIGN in body.replace(b" ", b""):
            self.transport.write(PREFILL_ANSWER)
        elif b'"stream":true' in body[:64] or b'"stream":true' in body.replace(b" ", b""):
            self.transport.write(STREAM_HEAD)
            self.stream(CHUNKS)
        else:
            self.transport.write(ANSWER)

    def stream(self, left: int) -> None:
        self.transport.write(CHUNK if left else b"0\r\n\r\n")
        if left:
            asyncio.get_running_loop().call_later(CHUNK_INTERVAL_S, self.stream, left - 1)


async def serve(port: int, events: str = "", replay: str = "", tells: str = "") -> None:
    teller = Teller(events, replay) if events else None
    MockEngine.teller = teller if tells else None
    server = await asyncio.get_running_loop().create_server(MockEngine, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), *sys.argv[2:]))
