"""Bad input and slow clients over real sockets, while others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moonpool.core.config.proxy_section import Deadlines, Limits
from tests.disagg_proxy.harness import (
    Bed,
    Client,
    Exchange,
    FakeClock,
    bed,
    filler,
    request_bytes,
    until,
    with_deadline,
)

CHAT = "/v1/chat/completions"


async def others_are_served(b: Bed) -> None:
    assert (await b.ask("POST", CHAT, b"{}")).status == 200


@with_deadline
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x00\x01\x02\x03" * 100, 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (
            b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
            400,
        ),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 70000000\r\n\r\n", 413),
        (b"GET /" + b"a" * 40000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 10000, 431),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ],
)
async def test_refused_and_closed(data: bytes, status: int) -> None:
    async with bed(1) as b:
        client = await b.client()
        await client.send(data)
        answer = await client.answer()
        assert answer.status == status
        assert answer.headers["connection"] == "close"
        error = json.loads(answer.body)["error"]
        assert (error["message"] and error["type"] == "invalid_request_error") or status >= 500
        assert await client.ended() == b""
        assert b.metric("moonpool_proxy_rejected_total", reason=error["code"]) == 1
        assert not b.engines[0].seen
        await others_are_served(b)


@with_deadline
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v2/x", 404),
        ("POST", "/sleep", 404),
        ("GET", "/v1", 404),
        ("DELETE", "/v1/models", 405),
        ("GET", "/tokenize", 405),
        ("POST", "/metrics", 405),
    ],
)
async def test_refused_and_kept(method: str, path: str, status: int) -> None:
    async with bed(1) as b:
        client = await b.client()
        for _ in range(2):
            answer = await client.ask(method, path, b"{}")
            error = json.loads(answer.body)["error"]
            assert answer.status == status
            assert path in error["message"]
            assert error["param"] is None
        assert not b.engines[0].seen


@with_deadline
async def test_half_a_head_meets_its_deadline_however_it_drips() -> None:
    clock = FakeClock()
    async with bed(1, deadlines=Deadlines(head_s=20), clock=clock) as b:
        slow = await b.client()
        for piece in (b"POST /v1/completions", b" HTTP/1.1\r\n", b"Host: x\r\n"):
            await slow.send(piece)
            await others_are_served(b)
            clock.now += 6
        clock.now += 3  # 21 s since its first byte, 9 since its last
        answer = await slow.answer()
        assert answer.status == 408
        assert b"head did not arrive in time" in answer.body
        assert await slow.ended() == b""
        await others_are_served(b)


@with_deadline
async def test_half_a_head_behind_a_whole_request_meets_the_same_deadline() -> None:
    clock = FakeClock()
    async with bed(1, deadlines=Deadlines(head_s=20, client_idle_s=1000), clock=clock) as b:
        client = await b.client()
        assert (await client.ask("POST", CHAT, b"{}")).status == 200
        await client.send(b"POST /v1/completions HTTP/1.1\r\n")
        await until(lambda: b.connection()["busy"])
        clock.now += 21
        assert (await client.answer()).status == 408


@with_deadline
async def test_half_a_body_meets_its_deadline() -> None:
    clock = FakeClock()
    async with bed(1, deadlines=Deadlines(body_stall_s=30), clock=clock) as b:
        slow = await b.client()
        await slow.send(request_bytes("POST", CHAT, b"x" * 100)[:-50])
        await until(lambda: b.connection()["busy"])
        clock.now += 31
        answer = await slow.answer()
        assert answer.status == 408
        assert b"body did not arrive in time" in answer.body
        assert not b.engines[0].seen


@with_deadline
@pytest.mark.parametrize(("size", "survives"), [(1, False), (16384, True)])
async def test_a_body_that_drips_is_cut_and_a_steady_one_is_not(size: int, survives: bool) -> None:
    """1,024 bytes earn a second: one byte every 10 s is too slow, 16 KiB every 10 s is fine for ever."""
    clock = FakeClock()
    deadlines = Deadlines(body_stall_s=30, body_bytes_per_s_min=1024, linger_s=1000)
    async with bed(1, deadlines=deadlines, clock=clock) as b:
        client = await b.client()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n")
        await until(lambda: b.connection()["reading_body"])
        for sent in range(size, 12 * size + 1, size):
            await client.send(b"x" * size)
            await until(lambda want=sent: b.connection()["lingering"] or b.connection()["body"] == want)
            clock.now += 10
            if not survives and b.connection()["lingering"]:
                break
        assert b.connection()["lingering"] is not survives


@with_deadline
async def test_idle_connections_are_closed_without_a_word() -> None:
    clock = FakeClock()
    async with bed(1, deadlines=Deadlines(client_idle_s=75), clock=clock) as b:
        client = await b.client()
        assert (await client.ask("POST", CHAT, b"{}")).status == 200
        clock.now += 74
        assert (await client.ask("POST", CHAT, b"{}")).status == 200
        clock.now += 76
        assert await client.ended() == b""


@with_deadline
async def test_hundreds_of_silent_connections_do_no_harm() -> None:
    clock = FakeClock()
    async with bed(1, deadlines=Deadlines(head_s=20), clock=clock) as b:
        idle = [await b.client() for _ in range(300)]
        for client in idle[:150]:
            await client.send(b"POST /v1/completions HTTP/1.1\r\nHo")
        await others_are_served(b)
        clock.now += 21
        for client in idle:
            text = await client.ended()
            assert text == b"" or b" 408 " in text
        await others_are_served(b)


@contextlib.asynccontextmanager
async def full(places: int, **more: Any) -> AsyncIterator[tuple[Bed, list[Client], asyncio.Event]]:
    """A proxy all of whose places are taken by clients that wait for an answer, until the event."""
    goon = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await goon.wait()
        await exchange.answer(b"{}")

    async with bed(1, limits=Limits(client_connections_max=places, address_share=1), **more) as b:
        b.engines[0].behave = wait
        busy = [await b.client() for _ in range(places)]
        for client in busy:
            await client.request("POST", CHAT, b"{}")
        await until(lambda: len(b.engines[0].seen) == places)
        yield b, busy, goon


@with_deadline
async def test_connections_over_the_limit_are_told_so() -> None:
    async with full(3) as (b, busy, goon):
        refused = await b.client()
        answer = await refused.answer()
        assert answer.status == 503
        assert b"limit of 3 connections" in answer.body
        assert "retry-after" in answer.headers
        goon.set()
        for client in busy:
            assert (await client.answer()).status == 200
        assert (await busy[0].ask("POST", CHAT, b"{}")).status == 200
        busy[1].leave()
        refused.leave()
        await until(lambda: b.client_count == 2)
        await others_are_served(b)


@with_deadline
async def test_a_crowd_over_the_limit_holds_few_connections() -> None:
    async with full(3, deadlines=Deadlines(linger_s=100)) as (b, busy, goon):
        for _ in range(100):
            assert (await (await b.client()).answer()).status == 503  # and its end stays open
        assert b.metric("moonpool_proxy_rejected_total", reason="connections") == 100
        assert b.client_count == 3 + 32
        goon.set()
        for client in busy:
            assert (await client.answer()).status == 200


@with_deadline
async def test_request_bodies_together_are_bounded() -> None:
    async with bed(1, limits=Limits(bodies_bytes_max=100_000)) as b:
        first = await b.client()
        await first.send(request_bytes("POST", CHAT, filler(90_000))[:-1])
        await until(lambda: b.counters.held_body_bytes > 80_000)
        second = await b.client()
        await second.request("POST", CHAT, b"x" * 20_000)
        answer = await second.answer()
        assert answer.status == 503
        assert b"as many request bodies as it may" in answer.body
        await until(lambda: b.counters.held_body_bytes == 89_999)
        await first.send(b"}")
        assert (await first.answer()).status == 200
        await others_are_served(b)


@with_deadline
async def test_a_refusal_reaches_a_client_that_is_still_sending() -> None:
    async with bed(1, limits=Limits(body_bytes_max=1000), deadlines=Deadlines(linger_s=1000)) as b:
        client = await b.client()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n")
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(40):
            await client.send(b"x" * 100_000)
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        assert (await client.answer()).status == 413


@with_deadline
async def test_a_refused_client_that_never_stops_is_cut() -> None:
    clock = FakeClock()
    async with bed(1, deadlines=Deadlines(linger_s=2), clock=clock) as b:
        client = await b.client()
        await client.send(b"\x00garbage")
        await until(lambda: b.connection()["lingering"])
        clock.now += 3
        await until(lambda: b.client_count == 0)


@with_deadline
async def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    running = most = 0

    async def echo(exchange: Exchange) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        await exchange.answer(exchange.body)

    async with bed(2) as b:
        for engine in b.engines:
            engine.behave = echo
        client = await b.client()
        bodies = [b'{"n":"%b"}' % (b"%d" % n * (n % 7 + 1)) for n in range(200)]
        pieces = [request_bytes("POST", CHAT, body) + request_bytes("GET", "/health") for body in bodies]
        await client.send(b"".join(pieces))
        for body in bodies:
            assert (await client.answer()).body == body
            assert b'"ok"' in (await client.answer()).body
        assert most == 1


@with_deadline
async def test_read_ahead_is_bounded_and_nothing_of_it_is_lost() -> None:
    goon = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await goon.wait()
        await exchange.answer(b"%d" % len(exchange.body))

    async with bed(1, limits=Limits(pipelined_bytes_max=10_000)) as b:
        b.engines[0].behave = wait
        client = await b.client()
        await client.request("POST", CHAT, b"{}")
        await until(lambda: bool(b.engines[0].seen))
        client.writer.write(request_bytes("POST", CHAT, filler(30_000_000)))
        await until(lambda: b.connection()["held_back"])
        for _ in range(1000):
            await asyncio.sleep(0)
        assert b.connection()["held"] <= 10_000 + (256 << 10)  # the bound and one read
        await others_are_served_by_own_pages(b)
        goon.set()
        assert [(await client.answer()).body for _ in range(2)] == [b"2", b"30000000"]


@with_deadline
async def test_a_client_that_was_held_back_and_leaves_is_noticed() -> None:
    async def never(exchange: Exchange) -> None:
        await exchange.gone.wait()

    async with bed(1, limits=Limits(pipelined_bytes_max=10_000)) as b:
        b.engines[0].behave = never
        client = await b.client()
        await client.request("POST", CHAT, b"{}")
        await until(lambda: bool(b.engines[0].seen))
        await client.request("POST", CHAT, b"x" * 20_000)
        await until(lambda: b.connection()["held_back"])
        client.writer.close()
        await b.engines[0].seen[0].gone.wait()


async def others_are_served_by_own_pages(b: Bed) -> None:
    assert (await b.ask("GET", "/health")).status == 200


@with_deadline
async def test_answers_that_nobody_reads_stop_the_reading_of_requests() -> None:
    clock = FakeClock()
    async with bed(1, deadlines=Deadlines(client_stall_s=300), clock=clock) as b:
        client = await b.client()
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        ask = request_bytes("GET", "/metrics") * 1000
        while not b.connection()["held_back"] or not b.connection()["write_paused"]:
            client.writer.write(ask)
            await asyncio.sleep(0)
        assert b.connection()["unwritten"] < 4 << 20
        await others_are_served(b)
        await until(lambda: b.client_count == 1)
        clock.now += 0.1
        clock.now += 301
        await until(lambda: b.client_count == 0)
        assert b.metric("moonpool_proxy_rejected_total", reason="client_stalled") == 1


@with_deadline
async def test_expect_100_continue() -> None:
    async with bed(1) as b:
        client = await b.client()
        text = request_bytes("POST", CHAT, b"{}", "Expect: 100-continue\r\n")
        await client.send(text[:-2])
        assert (await client.head()).status == 100
        await client.send(b"{}")
        assert (await client.answer()).status == 200
        assert "expect" not in b.engines[0].seen[0].headers


@with_deadline
async def test_expect_with_a_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    async with bed(1, limits=Limits(body_bytes_max=10)) as b:
        client = await b.client()
        await client.send(request_bytes("POST", CHAT, b"x" * 11, "Expect: 100-continue\r\n")[:-11])
        assert (await client.answer()).status == 413


@with_deadline
async def test_chunked_request_body() -> None:
    async with bed(1) as b:
        client = await b.client()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        for piece in (head, b'3\r\n{"a\r\n', b'4;x=y\r\n":1}\r\n', b"0\r\n\r\n"):
            await client.send(piece)
        assert (await client.answer()).status == 200
        assert b.engines[0].seen[0].body == b'{"a":1}'
        assert b.engines[0].seen[0].headers["content-length"] == "7"


@with_deadline
async def test_head_of_the_proxys_own_pages() -> None:
    async with bed(1) as b:
        client = await b.client()
        for path in ("/health", "/metrics", "/engines", "/nowhere"):
            answer = await client.ask("HEAD", path)
            assert answer.status == (404 if path == "/nowhere" else 200)
            assert int(answer.headers["content-length"]) > 0
        assert (await client.ask("GET", "/health")).body.startswith(b"{")


@with_deadline
async def test_connection_close_is_obeyed() -> None:
    async with bed(1) as b:
        for path in ("/health", "/v1/models"):
            client = await b.client()
            answer = await client.ask("GET", path, head="Connection: close\r\n")
            assert answer.headers["connection"] == "close"
            assert await client.ended() == b""


@with_deadline
async def test_random_bytes_never_hurt() -> None:
    import random

    chance = random.Random(7)
    good = request_bytes("POST", CHAT, b"{}") + request_bytes("GET", "/health")
    async with bed(1, deadlines=Deadlines(linger_s=0.01)) as b:
        for _ in range(300):
            data = bytearray(good)
            for _ in range(chance.randrange(1, 5)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            client = Client(*await asyncio.open_connection(b.host, b.port))
            await client.send(bytes(data[: chance.randrange(1, len(data))]))
            client.leave()
        await others_are_served(b)
