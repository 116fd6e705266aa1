"""An engine that answers at once, or streams 64 chunks 2 ms apart: little of the CPU is its own.

python -m benchmarks.proxy.mock_engine PORT
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

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


class MockEngine(asyncio.Protocol):
    """One connection, one request at a time."""

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


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(MockEngine, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
