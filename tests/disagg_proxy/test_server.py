"""Starting, draining and ending."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from moonpool._native import ProxyRequest
from moonpool.core.config.proxy_section import Deadlines
from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.server import serve
from moonpool.disagg_proxy.settings import ProxySettings

from .harness import (
    Client,
    Exchange,
    FakeClock,
    MockEngine,
    bed,
    until,
    with_deadline,
)

CHAT = "/v1/chat/completions"


@with_deadline
async def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    goon = asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event("first")
        await goon.wait()
        await exchange.end_stream()

    async def wait(exchange: Exchange) -> None:
        await goon.wait()
        await exchange.answer(b"{}")

    async with bed(2) as b:
        b.engines[0].behave, b.engines[1].behave = stream, wait
        idle, streaming, waiting = await b.client(), await b.client(), await b.client()
        await idle.ask("GET", "/health")
        await streaming.request("POST", CHAT, b"{}")
        await streaming.head()
        assert await streaming.chunk() == b"data: first\n\n"
        await waiting.request("POST", CHAT, b"{}")
        await until(lambda: bool(b.engines[1].seen))
        draining = asyncio.ensure_future(b.proxy.drain())
        assert await idle.ended() == b""
        with pytest.raises(OSError):
            await b.client()
        assert not draining.done()
        goon.set()
        assert await streaming.ended() == b"0\r\n\r\n"
        answer = await waiting.answer()
        assert answer.status == 200
        assert answer.headers["connection"] == "close"
        assert await draining


@with_deadline
async def test_drain_has_a_deadline() -> None:
    async def never(exchange: Exchange) -> None:
        await exchange.gone.wait()

    async with bed(1, deadlines=Deadlines(drain_s=0.05)) as b:
        b.engines[0].behave = never
        client = await b.client()
        await client.request("POST", CHAT, b"{}")
        await until(lambda: bool(b.engines[0].seen))
        assert not await b.proxy.drain()
        await b.proxy.close()
        assert await client.ended() == b""
        await b.engines[0].seen[0].gone.wait()


@with_deadline
async def test_serve_says_when_it_is_ready_and_stops_when_told() -> None:
    engine = MockEngine("a")
    await engine.start()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.ensure_future(
        serve(ProxySettings(port=0, engines=(engine.spec,)), ready=ready.set_result, stop=stop)
    )
    url = await ready
    client = Client(*await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1])))
    assert (await client.ask("POST", CHAT, b"{}")).status == 200  # healthy from the first request on
    stop.set()
    await serving
    assert await client.ended() == b""
    await engine.stop()


@with_deadline
async def test_an_address_of_another_machine() -> None:
    settings = ProxySettings(host="192.0.2.1", port=0, engines=(MockEngine("a").spec,))
    with pytest.raises(ConfigError, match=r"'192.0.2.1' is no address of this machine"):
        await serve(settings)


@with_deadline
async def test_a_drain_serves_whoever_has_asked_or_connected_already() -> None:
    """More of them than the data plane looks at in one turn."""
    begun, release = threading.Event(), threading.Event()

    def decide(request: ProxyRequest) -> int:
        release.wait(20)  # the data plane looks at no socket meanwhile
        return request.candidates[0]

    async with bed(1, decide=decide) as b:
        kept = [await b.client() for _ in range(300)]
        await asyncio.gather(*(client.ask("GET", "/health") for client in kept))
        first = await b.client()
        await first.request("POST", CHAT, b"{}")
        queued = [await b.client() for _ in range(100)]
        for client in (*kept, *queued):
            await client.request("POST", CHAT, b"{}")

        def drain() -> bool:
            begun.set()
            return b.proxy.relay.drain(20)

        draining = asyncio.ensure_future(asyncio.to_thread(drain))
        await until(begun.is_set)
        release.set()
        for client in (first, *kept, *queued):
            assert (await client.answer()).status == 200
        assert await draining


@with_deadline
async def test_a_drain_waits_a_little_for_the_first_request_of_a_connection() -> None:
    clock = FakeClock()
    async with bed(1, clock=clock) as b:
        kept, late, silent = await b.client(), await b.client(), await b.client()
        await kept.ask("GET", "/health")
        await until(lambda: b.client_count == 3)
        draining = asyncio.ensure_future(b.proxy.drain())
        assert await kept.ended() == b""
        answer = await late.ask("POST", CHAT, b"{}")
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert not draining.done()
        clock.now += 3
        assert await silent.ended() == b""
        assert await draining


@pytest.mark.parametrize("policy", ["round_robin", "conductor"])
def test_a_proxy_that_has_ended_is_freed_with_its_files(policy: str) -> None:
    """Its relay held the proxy's methods, and the proxy its relay: no collector sees a cycle through C++."""
    proxies = []

    @with_deadline
    async def serve_one_answer() -> None:
        async with bed(2, policy=policy, tokenizer=("none",)) as b:
            assert (await b.ask("POST", CHAT, b"{}")).status == 200
            proxies.append(weakref.ref(b.proxy))

    serve_one_answer()
    gc.collect()
    assert proxies[0]() is None
