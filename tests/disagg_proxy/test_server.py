"""Starting, draining and ending, in this process and as a process of its own."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import threading

import pytest

from moonpool._native import ProxyRequest
from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.server import ProxySettings, _fit_open_files, run, serve
from moonpool.disagg_proxy.settings import Deadlines, EngineSpec

from .harness import (
    Client,
    Exchange,
    FakeClock,
    MockEngine,
    bed,
    proxy_process,
    request_bytes,
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


def test_address_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        settings = ProxySettings(port=port, engines=(MockEngine("a").spec,))
        assert run(settings) == 2
        message = capsys.readouterr().err
        assert f"127.0.0.1:{port} is in use" in message
        assert "--port" in message
        assert "Traceback" not in message


@with_deadline
async def test_an_address_of_another_machine() -> None:
    settings = ProxySettings(host="192.0.2.1", port=0, engines=(MockEngine("a").spec,))
    with pytest.raises(ConfigError, match=r"'192.0.2.1' is no address of this machine"):
        await serve(settings)


@with_deadline
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_process_finishes_its_request_on_a_signal_and_exits_with_0(number: signal.Signals) -> None:
    goon = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await goon.wait()
        await exchange.answer(b"{}")

    engine = MockEngine("a")
    engine.behave = wait
    await engine.start()
    async with proxy_process(engine) as proxy:
        client = await proxy.client()
        await client.send(request_bytes("POST", CHAT, b"{}"))
        await until(lambda: bool(engine.seen))
        probe = await proxy.client()
        await probe.ask("GET", "/health")
        proxy.process.send_signal(number)
        assert await probe.ended() == b""  # the idle connection goes first: the drain has begun
        goon.set()
        assert (await client.answer()).status == 200
        assert await proxy.process.wait() == 0
    await engine.stop()


@with_deadline
async def test_a_second_signal_ends_a_process_at_once() -> None:
    async def never(exchange: Exchange) -> None:
        await exchange.gone.wait()

    engine = MockEngine("a")
    engine.behave = never
    await engine.start()
    async with proxy_process(engine) as proxy:
        client, probe = await proxy.client(), await proxy.client()
        await client.send(request_bytes("POST", CHAT, b"{}"))
        await until(lambda: bool(engine.seen))
        await probe.ask("GET", "/health")
        proxy.process.send_signal(signal.SIGTERM)
        assert await probe.ended() == b""
        proxy.process.send_signal(signal.SIGTERM)
        assert await client.ended() == b""
        assert await proxy.process.wait() == 0
    await engine.stop()


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


PAIR = (EngineSpec("p", "http://127.0.0.1:1", "prefill"), EngineSpec("d", "http://127.0.0.1:2", "decode"))
ALONE = (EngineSpec("e", "http://127.0.0.1:1"),)


@pytest.mark.parametrize(
    ("engines", "handover", "allowed", "clients"),
    [
        (ALONE, "auto", 20_128, 10_000),
        (ALONE, "auto", 20_127, 9_999),
        (ALONE, "auto", 4_096, 1_984),
        (PAIR, "auto", 30_128, 10_000),
        (PAIR, "auto", 16_384, 5_418),
        (PAIR, "two_step", 16_384, 8_128),
        (ALONE, "auto", 64, 1),
        (ALONE, "auto", resource.RLIM_INFINITY, 10_000),
    ],
)
def test_all_clients_may_wait_for_an_answer_at_one_time(
    engines: tuple[EngineSpec, ...],
    handover: str,
    allowed: int,
    clients: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, allowed))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    settings = _fit_open_files(ProxySettings(engines=engines, handover=handover))
    assert settings.limits.client_connections_max == clients
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (clients < 10_000)
    assert all(f"takes {clients} clients at one time instead of 10000" in each for each in warned)
