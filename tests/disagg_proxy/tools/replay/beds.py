"""A server whose every byte is scripted, and traces of a few lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from moonpool.disagg_proxy.tools.simulator.trace import Trace, read_trace

MODELS = {"object": "list", "data": [{"id": "first"}, {"id": "second"}]}


def trace_of(folder: Path, *rows: tuple[float, int, int, list[int]]) -> Trace:
    """rows: (seconds, tokens, answer tokens, hash ids) each."""
    return read_trace(write_trace(folder, *rows))


def write_trace(folder: Path, *rows: tuple[float, int, int, list[int]]) -> Path:
    path = folder / "small.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, (at_s * 1000, *rest), strict=True))) for at_s, *rest in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


class Asked:
    """One POST: its headers and body, and the way to answer it."""

    def __init__(self, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.headers = headers
        self.body = body
        self.writer = writer
        self.closes = False  # the connection's end is the answer's

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def say(self, status: int, text: bytes) -> None:
        await self.send(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(text)) + text)

    async def begin(self, fields: bytes = b"") -> None:
        self.closes = b"chunked" not in fields
        await self.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + fields + b"\r\n")

    async def token(self) -> None:
        await self.send(b'data: {"choices":[{"text":"a"}]}\n\n')

    async def end(self, prompt: int, cached: int | None, made: int) -> None:
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        usage = {"prompt_tokens": prompt, "completion_tokens": made, **details}
        await self.send(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await self.send(b"data: [DONE]\n\n")


Behaviour = Callable[[Asked], Awaitable[None]]


@asynccontextmanager
async def server(
    behave: Behaviour, models: object = MODELS, connections: list[int] | None = None
) -> AsyncIterator[str]:
    """Its URL. connections: gets the number of requests of each connection at its end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served, closes = 0, False
        try:
            while not closes:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                rows = (line.partition(":") for line in head[1:])
                headers = {name.lower(): value.strip() for name, _, value in rows}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(headers, json.loads(body or b"{}"), writer)
                served += 1
                if head[0].startswith("GET /v1/models "):
                    await asked.say(200, json.dumps(models).encode())
                else:
                    await behave(asked)
                closes = asked.closes
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            if connections is not None:
                connections.append(served)
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        host, port = listening.sockets[0].getsockname()
        yield f"http://{host}:{port}"
