"""An engine that drops bodies of any size as they come and answers each with one token.

python -m benchmarks.proxy.sink_engine PORT
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import uvloop

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
_ANSWER = b'{"usage":{"prompt_tokens":5,"completion_tokens":1}}'
_ABSENT = (b"/server_info", b"/query", b"/tokenize")


class Sink(asyncio.Protocol):
    """One connection, one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        self.head = b""
        self.left = 0  # of the body

    def data_received(self, data: bytes) -> None:
        if self.left:
            self.left -= len(data)
        else:
            self.head += data
            head, separator, body = self.head.partition(b"\r\n\r\n")
            if not separator:
                return
            length = _LENGTH.search(head)
            self.head = head
            self.left = (int(length[1]) if length else 0) - len(body)
        if self.left <= 0:
            self.answer()

    def answer(self) -> None:
        path = self.head.split(b" ", 2)[1]
        absent = path.startswith(_ABSENT) or path.endswith(b"/render")
        status, body = (b"404 Not Found", b"") if absent else (b"200 OK", _ANSWER)
        if path == b"/v1/models":
            body = _MODELS
        form = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        self.transport.write(form % (status, len(body), body))
        if b" HTTP/1.0" in self.head[:200]:
            self.transport.close()
        self.head, self.left = b"", 0


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
