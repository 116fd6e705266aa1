"""Connections that say nothing keep no client of another address out, of the proxy or of an admin page."""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from pathlib import Path

import pytest
from aiohttp import web

from moonpool.core.config.proxy_section import Limits
from moonpool.core.service.addresses import Address
from moonpool.core.service.admin_http import AdminServer
from tests.disagg_proxy.harness import Client, MockEngine, bed, proxy_process, request_bytes, with_deadline

COMPLETIONS = "/v1/completions"
HALF = request_bytes("POST", COMPLETIONS, b"{}")[:40]
IDLE_BYTES_MAX = 8 << 10  # of the proxy's memory, for one connection


async def idle(host: str, port: int, count: int, address: str) -> list[Client]:
    """Opens connections; every second one sends half a head."""
    made = []
    for number in range(count):
        with suppress(ConnectionError):  # cut off already
            client = Client(*await asyncio.open_connection(host, port, local_addr=(address, 0)))
            made.append(client)
            if number % 2:
                await client.send(HALF)
    return made


@with_deadline
async def test_idle_connections_keep_no_client_out_of_the_proxy() -> None:
    """Three times as many as there may be, of one address."""
    async with bed(1, limits=Limits(client_connections_max=100)) as b:
        b.clients += await idle(b.host, b.port, 300, "127.0.0.2")
        for _ in range(50):
            assert (await b.ask("POST", COMPLETIONS, b"{}")).status == 200
        assert b.client_count <= 100


@pytest.mark.heavy
def test_ten_thousand_idle_connections() -> None:
    """Of 20 addresses, as many as the proxy has places for: it closes the oldest, and serves."""

    async def attack() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        engine = MockEngine("engine")
        await engine.start()
        async with proxy_process(engine) as proxy:
            before = resident(proxy.process.pid)
            opened = []
            for number in range(20):
                opened += await idle("127.0.0.1", proxy.port, 500, f"127.0.1.{number + 1}")
            for _ in range(50):
                client = await proxy.client()
                assert (await client.ask("POST", COMPLETIONS, b"{}")).status == 200
                client.leave()
            assert resident(proxy.process.pid) - before < len(opened) * IDLE_BYTES_MAX
            for client in opened:
                client.leave()
        await engine.stop()

    with_deadline(attack, 300.0)()


def resident(pid: int) -> int:
    """Bytes of a process that are in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_idle_connections_of_one_address_keep_no_other_out_of_an_admin_page() -> None:
    """A probe's connection stays while another address opens ten times as many as there may be."""

    async def page() -> web.Response:
        return web.Response(text="ok")

    async def attack() -> None:
        server = AdminServer(
            Address("127.0.0.1", 0), {"/health": page}, key="--http", connections_max=8, timeout_s=3600.0
        )
        await server.start()
        try:
            probe = Client(*await asyncio.open_connection(*server.address, local_addr=("127.0.0.3", 0)))
            await probe.send(b"GET /health HTTP/1.1\r\n")
            flood = await idle(*server.address, 80, "127.0.0.2")
            assert server.connections <= 8
            await probe.send(b"Host: x\r\n\r\n")
            assert (await probe.answer()).body == b"ok"
            for client in flood:
                client.leave()
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(attack(), 20.0))


def test_a_connection_that_says_nothing_costs_an_admin_page_no_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Handlers are a third of what an idle connection costs the loop."""
    made = 0
    make = web.Server.__call__

    def counted(server: web.Server) -> object:
        nonlocal made
        made += 1
        return make(server)

    monkeypatch.setattr(web.Server, "__call__", counted)

    async def page() -> web.Response:
        return web.Response(text="ok")

    async def attack() -> None:
        server = AdminServer(
            Address("127.0.0.1", 0), {"/health": page}, key="--http", connections_max=64, timeout_s=3600.0
        )
        await server.start()
        try:
            silent = [await asyncio.open_connection(*server.address) for _ in range(20)]
            probe = Client(*await asyncio.open_connection(*server.address))
            assert (await probe.ask("GET", "/health")).body == b"ok"
            assert (server.connections >= len(silent), made) == (True, 1)
            for _, writer in silent:
                writer.close()
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(attack(), 20.0))
