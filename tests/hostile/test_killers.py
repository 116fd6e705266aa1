"""Requests that end, or stop, the engines that get them: at most two engines for each request."""

from __future__ import annotations

import json

import pytest

from moonpool.core.config.proxy_section import Deadlines
from tests.disagg_proxy.harness import Bed, Behaviour, Exchange, FakeClock, bed, until, with_deadline

COMPLETIONS = "/v1/completions"
BODY = b'{"prompt":"x"}'


async def die(exchange: Exchange) -> None:
    exchange.cut()


async def die_in_mid_head(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Le")
    exchange.cut()


async def babble(exchange: Exchange) -> None:
    await exchange.send(b"\x00\x01garbage\r\n\r\n")


def killed(b: Bed) -> int:
    return sum(bool(engine.seen) for engine in b.engines)


@with_deadline
@pytest.mark.parametrize("behave", [die, die_in_mid_head, babble])
async def test_a_request_that_kills_engines_kills_two_at_most(behave: Behaviour) -> None:
    async with bed(6) as b:
        for engine in b.engines:
            engine.behave = behave
        answer = await b.ask("POST", COMPLETIONS, BODY)
        assert answer.status == 502
        assert "as another engine did" in json.loads(answer.body)["error"]["message"]
        assert killed(b) == 2


@with_deadline
async def test_also_over_connections_that_were_idle() -> None:
    """There the end of a connection might be the engine's own timeout: the same engine is asked again, and
    has gone."""
    async with bed(4) as b:
        client = await b.client()
        for _ in range(4):
            assert (await client.ask("POST", COMPLETIONS, BODY)).status == 200
        seen = [len(engine.seen) for engine in b.engines]
        for engine in b.engines:

            async def die_for_good(exchange: Exchange, engine: object = engine) -> None:
                await engine.stop()  # type: ignore[attr-defined]
                exchange.cut()

            engine.behave = die_for_good
        assert (await client.ask("POST", COMPLETIONS, BODY)).status == 502
        assert sum(len(e.seen) > was for e, was in zip(b.engines, seen, strict=True)) == 2


@with_deadline
async def test_of_prefill_and_decode_engines_two() -> None:
    """The decode engine does not compute what has ended two prefill engines."""
    roles = ("prefill", "prefill", "prefill", "decode", "decode")
    async with bed(5, roles=roles, policy="conductor", handover="two_step") as b:
        for engine in b.engines:
            engine.behave = die
        assert (await b.ask("POST", COMPLETIONS, b'{"prompt":[1,2,3]}')).status == 502
        assert killed(b) == 2


@with_deadline
async def test_engines_that_refuse_a_connection_were_not_killed() -> None:
    async with bed(3) as b:
        await b.engines[0].stop()
        b.engines[1].behave = die
        assert (await b.ask("POST", COMPLETIONS, BODY)).engine == "engine-2"


@with_deadline
async def test_requests_leave_an_engine_that_stands_still() -> None:
    """Two health checks late, some seconds without an answer: what has none yet goes elsewhere."""
    clock = FakeClock()
    async with bed(2, clock=clock, deadlines=Deadlines(suspect_engine_s=5, silent_engine_s=500)) as b:
        gone = b.proxy.engines[0]

        async def stand_still(exchange: Exchange) -> None:
            await exchange.gone.wait()

        b.engines[0].behave = stand_still
        client = await b.client()
        await client.request("POST", COMPLETIONS, BODY)
        await until(lambda: bool(b.engines[0].seen))
        clock.now += 6  # it computes, and answers its health checks
        gone.answered_well()
        clock.now += 4
        gone.answered_late("late")
        clock.now += 1
        assert b.engine(0).in_flight == 1  # one late check is no sign
        gone.answered_late("late")
        b.proxy.engines[1].answered_well()
        clock.now += 1
        answer = await client.answer()
        assert (answer.status, answer.engine) == (200, "engine-1")
        assert (
            b.metric(
                "moonpool_proxy_upstream_errors_total",
                engine="engine-0",
                stage="before_first_byte",
                reason="silent",
            )
            == 1
        )
        assert {(await b.ask("POST", COMPLETIONS, BODY)).engine for _ in range(4)} == {"engine-1"}


@with_deadline
async def test_without_another_engine_they_wait_a_little_longer() -> None:
    clock = FakeClock()  # its own seconds pass besides
    async with bed(1, clock=clock, deadlines=Deadlines(suspect_engine_s=50, silent_engine_s=150)) as b:

        async def stand_still(exchange: Exchange) -> None:
            await exchange.gone.wait()

        b.engines[0].behave = stand_still
        client = await b.client()
        await client.request("POST", COMPLETIONS, BODY)
        await until(lambda: bool(b.engines[0].seen))
        for _ in range(2):
            b.proxy.engines[0].answered_late("late")
        clock.now += 100
        assert b.engine(0).in_flight == 1
        clock.now += 60
        answer = await client.answer()
        assert answer.status == 502
        assert b"health checks" in answer.body
