"""An engine whose pages have no end: a check reads a bounded part of them, for a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator

import pytest

from moonpool.core.config.proxy_section import HealthChecks
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine
from moonpool.disagg_proxy.settings import EngineSpec
from tests.disagg_proxy.harness import bed, until, with_deadline

SENT_MAX = 24 << 20  # what sockets hold on their way besides the 1 MiB that a check reads
OK = b"HTTP/1.1 200 OK\r\n"
ROW = b'{"id":"m","x":"' + b"x" * 65_000 + b'"},'


def body_without_a_length() -> Iterator[bytes]:
    return itertools.chain([OK + b'\r\n{"data":['], itertools.repeat(ROW))


def body_of_a_terabyte() -> Iterator[bytes]:
    return itertools.chain([OK + b'Content-Length: 1099511627776\r\n\r\n{"data":['], itertools.repeat(ROW))


def head() -> Iterator[bytes]:
    return itertools.chain([OK], itertools.repeat(b"X: " + b"x" * 65_000 + b"\r\n"))


def line() -> Iterator[bytes]:
    return itertools.chain([OK + b"X: "], itertools.repeat(b"x" * 65_000))


@with_deadline
@pytest.mark.parametrize("page", [body_without_a_length, body_of_a_terabyte, head, line])
@pytest.mark.parametrize("drips", [False, True])
async def test_the_models_page_of_an_engine_has_no_end(page: object, drips: bool) -> None:
    sent: list[int] = []  # bytes of each page until the proxy cut it off

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            asked = await reader.readuntil(b"\r\n\r\n")
            if not asked.startswith(b"GET /v1/models "):
                writer.write(OK + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
                await writer.drain()
                return writer.close()
            sent.append(0)
            for piece in page():  # type: ignore[operator]
                writer.write(piece)
                await writer.drain()
                sent[-1] += len(piece)
                if drips:
                    await asyncio.sleep(0.02)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    checks = HealthChecks(interval_s=0.05, timeout_s=0.2 if drips else 5.0)
    async with bed(1, discovery=("http",), health=checks) as b:
        endless = b.proxy.fleet.join(DiscoveredEngine(EngineSpec("endless", f"http://127.0.0.1:{port}")))
        await until(lambda: len(sent) >= 3)  # it is looked at again: no check hangs
        assert max(sent) < SENT_MAX
        assert endless.models is None
        await until(lambda: endless.liveness.healthy)
        answers = [await b.ask("POST", "/v1/completions", b"{}") for _ in range(4)]
        assert {answer.engine for answer in answers} == {"engine-0", "endless"}
        server.close()
