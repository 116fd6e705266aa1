"""Health checks of engines over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
from typing import Any

import pytest

from moonpool.core.config.proxy_section import HealthChecks
from moonpool.disagg_proxy.conductor.liveness import Health
from moonpool.disagg_proxy.engines import health
from moonpool.disagg_proxy.engines.health import HealthChecker
from tests.disagg_proxy.harness import MockEngine, bed, until, with_deadline

OFTEN = HealthChecks(interval_s=0.01)


@with_deadline
async def test_an_engine_that_dies_leaves_and_comes_back_by_itself() -> None:
    async with bed(2, health=OFTEN) as b:
        first = b.proxy.engines[0]
        assert json.loads((await b.ask("GET", "/health")).body) == {
            "status": "ok",
            "engines_healthy": 2,
            "engines": 2,
        }
        await b.engines[0].stop()
        await until(lambda: first.liveness.state is Health.DEAD)
        rows = json.loads((await b.ask("GET", "/engines")).body)["engines"]
        assert rows[0]["health"] == "dead"
        assert "GET /health failed" in rows[0]["why"]
        assert {(await b.ask("POST", "/v1/completions", b"{}")).engine for _ in range(4)} == {"engine-1"}
        assert b.metric("moonpool_proxy_retries_total", engine="engine-0") == 0
        await b.engines[0].start()  # the same port
        await until(lambda: first.liveness.healthy)
        assert {(await b.ask("POST", "/v1/completions", b"{}")).engine for _ in range(4)} == {
            "engine-0",
            "engine-1",
        }


@with_deadline
async def test_an_engine_that_says_it_is_sick() -> None:
    async with bed(1, health=OFTEN) as b:
        b.engines[0].healthy = False
        await until(lambda: not b.proxy.engines[0].liveness.healthy)
        assert b.proxy.engines[0].liveness.why == "GET /health was answered with 503"
        answer = await b.ask("GET", "/health")
        assert answer.status == 503
        assert "none of 1 engines is healthy" in json.loads(answer.body)["error"]["message"]
        assert "retry-after" in answer.headers
        b.engines[0].healthy = True
        await until(lambda: b.proxy.engines[0].liveness.healthy)
        assert (await b.ask("GET", "/health")).status == 200


@with_deadline
async def test_an_engine_that_accepts_and_says_nothing() -> None:
    def mute(engines: list[MockEngine]) -> None:
        async def nothing(*args: object) -> None:
            await gone.wait()

        engines[0]._read = nothing  # type: ignore[assignment, method-assign]

    gone = asyncio.Event()
    checks = HealthChecks(interval_s=0.01, timeout_s=1.0, timeouts_max=3)
    async with bed(2, health=checks, prepare=mute) as b:
        assert (
            b.proxy.engines[0].liveness.state is Health.UNKNOWN
        )  # the first check was not answered: not used
        await until(lambda: b.proxy.engines[1].liveness.healthy)
        assert {(await b.ask("POST", "/v1/completions", b"{}")).engine for _ in range(4)} == {"engine-1"}
        # The check behind the first late one has half the time, later ones all of it.
        await until(lambda: "not answered within 0.5 s" in b.proxy.engines[0].liveness.why)
        await until(lambda: b.proxy.engines[0].liveness.state is Health.DEAD)
        assert "not answered within 1 s" in b.proxy.engines[0].liveness.why
        gone.set()


@with_deadline
async def test_checks_leave_no_connections_behind() -> None:
    async with bed(1, health=OFTEN) as b:
        seen: list[int] = []

        def enough() -> bool:
            seen.append(len(b.engines[0]._writers))
            return b.engines[0].health_checks >= 20

        await until(enough)
        assert max(seen) < 10  # of 40, though the mock ignores "Connection: close"
        assert b.metric("moonpool_proxy_upstream_connections", engine="engine-0") == 0


class Nameless:
    """A connection that was reset before the loop looked: it has no peer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.transport = writer.transport

    def get_extra_info(self, name: str) -> None:
        assert name == "peername"


@with_deadline
async def test_an_engine_that_accepts_and_resets_is_dead_and_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resets = True
    connect = asyncio.open_connection

    async def connect_and_be_reset(*args: Any, **more: Any) -> tuple[asyncio.StreamReader, Any]:
        reader, writer = await connect(*args, **more)
        return reader, Nameless(writer) if resets else writer

    async with bed(1, health=OFTEN) as b:
        engine = b.proxy.engines[0]
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "open_connection", connect_and_be_reset)
            await until(lambda: engine.liveness.state is Health.DEAD)
            assert engine.liveness.why == "GET /health failed: reset the connection that it had accepted"
            resets = False
            await until(lambda: engine.liveness.healthy)


@with_deadline
async def test_a_page_of_models_that_fails_once_is_no_list_without_models() -> None:
    """Else it would be any engine's sister, and would serve any model."""
    async with bed(1) as b:
        (engine,), (mock,) = b.proxy.engines, b.engines
        checker = HealthChecker(engine, HealthChecks())
        mock.models = b'{"data":[{"id":"m"}]}'
        for status in (200, 500, 503, 401):
            mock.page_status = status
            await checker.check()
            assert engine.models is not None, status
            assert list(engine.models) == ["m"], status
        mock.models = None  # another program has come up
        await checker.check()
        assert engine.models is None


@with_deadline
async def test_a_check_that_breaks_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an engine whose first check breaks nobody knows anything; the proxy opens, and it is asked again."""
    broken = 3

    async def look(self: HealthChecker) -> None:
        nonlocal broken
        if broken:
            broken -= 1
            raise ZeroDivisionError("not thought of")

    monkeypatch.setattr(HealthChecker, "_look_at_models", look)
    async with bed(1, health=OFTEN) as b:
        await until(lambda: b.proxy.engines[0].liveness.healthy)
        assert broken == 0
    told = [record for record in caplog.records if "a check of engine engine-0 broke" in record.getMessage()]
    assert len(told) == 1
    assert told[0].exc_info


def open_for_ever(held: list[int]) -> None:
    while True:
        held.append(os.dup(0))


@with_deadline
async def test_too_many_open_files_here_are_no_verdict_on_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    """One engine was well and one was dead before; both stay what they were, and one warning each says so."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with bed(2) as b:
        well, dead = b.proxy.engines
        await b.engines[1].stop()
        checkers = [HealthChecker(engine, HealthChecks()) for engine in b.proxy.engines]
        for checker in checkers:
            await checker.check()
        caplog.clear()
        held: list[int] = []
        await until(lambda: not b.engines[0]._writers)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        try:
            for _ in range(10):  # connections of these checks are closed meanwhile
                with pytest.raises(OSError, match="open files"):
                    open_for_ever(held)
                await asyncio.sleep(0)
            for _ in range(5):
                for checker in checkers:
                    await checker.check()
            assert (well.liveness.state, dead.liveness.state) == (Health.HEALTHY, Health.DEAD)
            assert "Connect" in dead.liveness.why or "refused" in dead.liveness.why
        finally:
            for number in held:
                os.close(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 2
        assert all("open files" in warning for warning in warnings)
        await b.engines[1].start()
        for checker in checkers:
            await checker.check()
        assert well.liveness.healthy
        assert dead.liveness.healthy


@with_deadline
async def test_a_page_without_end_has_few_ports_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: an engine could make the proxy ask 255 ports of its host, once a second."""
    asked: list[int] = []

    async def get(address: tuple[str, int], path: str) -> tuple[int, bytes, tuple[str, int]]:
        asked.append(address[1])
        return 200, b'{"0": {"engine_id": "e_dp%d"}}' % (len(asked) - 1), address

    monkeypatch.setattr(health, "_get", get)
    ranks = await health._ranks_at("127.0.0.1", 9000, 10.0)
    assert len(ranks) == len(asked) == 16
    assert asked == list(range(9000, 9016))
