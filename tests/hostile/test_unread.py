"""Clients that ask and do not read: what waits for all of them together is bounded."""

from __future__ import annotations

import asyncio
import socket

from moonpool.core.config.proxy_section import Limits
from tests.disagg_proxy.harness import Bed, Client, Exchange, bed, until, with_deadline

COMPLETIONS = "/v1/completions"
LIMITS = Limits(unread_bytes_max=1 << 20, write_buffer_bytes_max=64 << 10)


async def deaf(b: Bed) -> Client:
    """Its host has room for little, and it reads nothing."""
    ours = socket.socket()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    ours.setblocking(False)
    await asyncio.get_running_loop().sock_connect(ours, (b.host, b.port))
    client = Client(*await asyncio.open_connection(sock=ours))
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    b.clients.append(client)
    return client


@with_deadline
async def test_unread_answers_of_all_connections_are_bounded() -> None:
    async def much(exchange: Exchange) -> None:
        await exchange.answer(b"x" * (16 << 20))

    async with bed(1, limits=LIMITS) as b:
        b.engines[0].behave = much
        for _ in range(16):
            await (await deaf(b)).request("POST", COMPLETIONS, b"{}")
        await until(lambda: b.counters.rejected.get("unread", 0) > 0)
        await until(lambda: b.counters.unread_bytes <= LIMITS.unread_bytes_max)
        b.engines[0].behave = b.engines[0].say_name
        assert (await b.ask("POST", COMPLETIONS, b"{}")).status == 200
        # For a moment it is more: what has just come is counted before somebody is cut for it.
        await until(lambda: 0 < b.metric("moonpool_proxy_unread_bytes") <= LIMITS.unread_bytes_max)


@with_deadline
async def test_also_of_the_proxys_own_pages_that_nobody_needs_a_key_for() -> None:
    """Pipelined requests for pages, as many as the proxy reads ahead."""
    pages = b"GET /metrics HTTP/1.1\r\nHost: p\r\n\r\n" * 2000
    async with bed(1, limits=LIMITS) as b:
        for _ in range(16):
            (await deaf(b)).writer.write(pages)
        await until(lambda: b.counters.rejected.get("unread", 0) > 0)
        await until(lambda: b.counters.unread_bytes <= LIMITS.unread_bytes_max)
        assert (await b.ask("GET", "/health")).status == 200
