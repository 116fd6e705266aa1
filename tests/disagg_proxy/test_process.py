"""A proxy as a process of its own: signals, exit codes, open files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import signal
import socket
from typing import Any

import pytest

from moonpool.core.config.proxy_section import Limits
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.process import _fit_open_files, run
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings

from .harness import Exchange, MockEngine, proxy_process, request_bytes, until, with_deadline

CHAT = "/v1/chat/completions"


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


@functools.partial(with_deadline, deadline_s=60.0)  # two interpreters start in it
@pytest.mark.parametrize("ended_by", ["a second signal", "a successor"])
async def test_a_process_that_is_to_stop_serves_on_as_not_ready(ended_by: str) -> None:
    goon = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if exchange.body == b'{"long":1}':
            await goon.wait()
        await exchange.answer(b"{}")

    engine = MockEngine("a")
    engine.behave = answer
    await engine.start()
    async with contextlib.AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(
            proxy_process(engine, deadlines={"stop_delay_s": 3600}, take_over=True)
        )
        assert (await (await proxy.client()).ask("GET", "/health")).status == 200
        proxy.process.send_signal(signal.SIGTERM)
        kept = await proxy.client()
        while (page := await kept.ask("GET", "/health")).status == 200:
            pass
        assert page.status == 503
        assert b"this proxy is stopping" in page.body
        long = await proxy.client()  # new connections are served
        await long.send(request_bytes("POST", CHAT, b'{"long":1}'))
        await until(lambda: bool(engine.seen))
        if ended_by == "a second signal":
            proxy.process.send_signal(signal.SIGTERM)
        else:
            await stack.enter_async_context(proxy_process(engine, port=proxy.port, take_over=True))
        await kept.ended()  # the drain has begun
        goon.set()
        assert (await long.answer()).status == 200
        assert await proxy.process.wait() == 0
    await engine.stop()


@with_deadline
async def test_a_process_that_is_to_stop_ends_by_itself() -> None:
    engine = MockEngine("a")
    await engine.start()
    async with proxy_process(engine, deadlines={"stop_delay_s": 0.1}) as proxy:
        proxy.process.send_signal(signal.SIGTERM)
        assert await proxy.process.wait() == 0
    await engine.stop()


PAIR = (EngineSpec("p", "http://127.0.0.1:1", "prefill"), EngineSpec("d", "http://127.0.0.1:2", "decode"))
ALONE = (EngineSpec("e", "http://127.0.0.1:1"),)
TOKENS = {"policy": "conductor"}
STREAMS = (EventSource("e", "tcp://127.0.0.1:3"), EventSource("node", "tcp://127.0.0.1:4", pool=True))


@pytest.mark.parametrize(
    ("engines", "more", "allowed", "clients"),
    [
        (ALONE, {}, 20_129, 10_000),
        (ALONE, {}, 20_128, 9_999),
        (ALONE, {}, 4_096, 1_983),
        (ALONE, {"events": STREAMS, **TOKENS}, 20_141, 10_000),
        (ALONE, {"events": STREAMS, **TOKENS}, 20_140, 9_999),
        (ALONE, {"events": STREAMS}, 20_129, 10_000),  # nobody follows them
        (PAIR, {}, 30_130, 10_000),
        (PAIR, {}, 16_384, 5_418),
        (PAIR, {"handover": "two_step"}, 16_384, 8_127),
        (PAIR, {"discovery": ("http",), "engines_max": 100, **TOKENS}, 30_828, 10_000),
        (PAIR, {"discovery": ("http",), "engines_max": 100, **TOKENS}, 30_827, 9_999),
        (PAIR, {"discovery": ("http",), "engines_max": 100}, 30_228, 10_000),
        (ALONE, {"discovery": ("http",), "policy": "least_load"}, 20_000, 6_282),
        (ALONE, {"discovery": ("http",), **TOKENS}, 4_096, 682),  # room for many more engines than files
        (ALONE, {}, 64, 1),
        (ALONE, {}, resource.RLIM_INFINITY, 10_000),
    ],
)
def test_all_clients_may_wait_for_an_answer_at_one_time(
    engines: tuple[EngineSpec, ...],
    more: dict[str, Any],
    allowed: int,
    clients: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, allowed))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    caplog.set_level(logging.INFO)
    settings = _fit_open_files(ProxySettings(engines=engines, **more))
    assert settings.limits.client_connections_max == clients
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    line = f"{clients} clients at one time, not 10000, with ulimit -Hn {allowed}"
    assert said == ([(logging.INFO, line)] if clients < 10_000 else [])  # short, and no warning


def test_fewer_clients_than_were_asked_for_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4_096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    limits = Limits(client_connections_max=5_000)
    assert _fit_open_files(ProxySettings(engines=ALONE, limits=limits)).limits.client_connections_max == 1_983
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
