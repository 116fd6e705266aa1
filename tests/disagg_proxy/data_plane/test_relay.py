"""Requests on their way to engines and back, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence

import pytest

from moonpool.core.config.proxy_section import BreakerLimits, Deadlines, Limits
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policies.round_robin import RoundRobin
from moonpool.disagg_proxy.conductor.worker import Worker
from tests.disagg_proxy.harness import (
    NEVER_S,
    Exchange,
    FakeClock,
    MockEngine,
    bed,
    filler,
    request_bytes,
    until,
    with_deadline,
)

CHAT = "/v1/chat/completions"


async def never(exchange: Exchange) -> None:
    await exchange.gone.wait()


async def cut(exchange: Exchange) -> None:
    exchange.cut()


@with_deadline
async def test_round_robin_over_keep_alive_connections() -> None:
    async with bed(3) as b:
        client = await b.client()
        names = [(await client.ask("POST", CHAT, b"{}")).engine for _ in range(9)]
        assert names == ["engine-0", "engine-1", "engine-2"] * 3
        assert [engine.connections for engine in b.engines] == [1, 1, 1]
        assert b.metric("moonpool_proxy_requests_total", engine="engine-0", status_class="2xx") == 3


@with_deadline
async def test_relay_and_policy_count_the_same_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay gives turns itself, but where a client wants the reasons, or an engine has a role."""
    asked = []
    choose = RoundRobin.choose

    def spy(policy: RoundRobin, request: Request, workers: Sequence[Worker], now_s: float) -> Choice:
        choice = choose(policy, request, workers, now_s)
        asked.append(choice.decode.name)
        return choice

    monkeypatch.setattr(RoundRobin, "choose", spy)
    why = "X-Moonpool-Decision: 1\r\n"
    async with bed(3) as b:
        heads = ["", "", why, "", why, ""]
        answers = [await b.ask("POST", CHAT, b"{}", head) for head in heads]
        assert [each.engine for each in answers] == ["engine-0", "engine-1", "engine-2"] * 2
        assert asked == ["engine-2", "engine-1"]
        assert ["x-moonpool-decision" in each.headers for each in answers] == [head == why for head in heads]
        b.proxy.relay.engine_role(1, "decode")
        asked.clear()
        answers = [await b.ask("POST", CHAT, b"{}") for _ in range(3)]
        assert [each.engine for each in answers] == asked == ["engine-0", "engine-1", "engine-2"]


@with_deadline
async def test_request_and_answer_pass_as_they_are() -> None:
    body = b'{"a":"' + bytes(range(0x23, 0x5B)) * 4000 + b'", "b" : [ 1.50 ] }'

    async def echo(exchange: Exchange) -> None:
        await exchange.answer(exchange.body, 201, "application/x-anything")

    async with bed(1) as b:
        b.engines[0].behave = echo
        for path in (
            CHAT,
            "/v1/completions",
            "/v1/embeddings",
            "/tokenize",
            "/detokenize",
            "/v1/responses?a=%20",
        ):
            answer = await b.ask("POST", path, body, "Authorization: Bearer key\r\nX-Request-Id: my-id\r\n")
            assert (answer.status, answer.body) == (201, body)
            assert answer.headers["content-type"] == "application/x-anything"
            assert answer.headers["x-request-id"] == "my-id"
            seen = b.engines[0].seen[-1]
            assert (seen.method, seen.target, seen.body) == ("POST", path, body)
            assert "authorization" not in seen.headers
            assert seen.headers["x-request-id"] == "my-id"
            assert seen.headers["host"] == f"127.0.0.1:{b.engines[0].port}"
        answer = await b.ask("GET", "/v1/models")
        assert answer.status == 201
        assert b.engines[0].seen[-1].method == "GET"
        assert answer.headers["x-request-id"] == b.engines[0].seen[-1].headers["x-request-id"] != ""


@with_deadline
async def test_stream_arrives_before_the_engine_is_done() -> None:
    goon = asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event("first")
        await goon.wait()
        await exchange.event("second")
        await exchange.end_stream()

    async with bed(1) as b:
        b.engines[0].behave = stream
        client = await b.client()
        await client.request("POST", CHAT, b'{"stream":true}')
        head = await client.head()
        assert head.headers["transfer-encoding"] == "chunked"
        assert head.engine == "engine-0"
        assert await client.chunk() == b"data: first\n\n"  # the engine still waits for goon
        assert b.metric("moonpool_proxy_requests_in_flight", engine="engine-0") == 1
        goon.set()
        assert await client.chunk() == b"data: second\n\n"
        assert await client.chunk() == b""
        assert (await client.ask("POST", CHAT, b"{}")).status == 200  # the connection lives on
        assert b.metric("moonpool_proxy_requests_in_flight", engine="engine-0") == 0


@with_deadline
async def test_client_leaves_before_the_first_byte() -> None:
    async with bed(1) as b:
        b.engines[0].behave = never
        client = await b.client()
        await client.request("POST", CHAT, b"{}")
        await until(lambda: bool(b.engines[0].seen))
        client.leave()
        await b.engines[0].seen[0].gone.wait()
        assert b.metric("moonpool_proxy_client_disconnects_total", engine="engine-0", stage="waiting") == 1


@with_deadline
async def test_client_leaves_in_mid_stream_with_an_orderly_close() -> None:
    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event("first")
        await exchange.gone.wait()

    async with bed(1) as b:
        b.engines[0].behave = stream
        client = await b.client()
        await client.request("POST", CHAT, b"{}")
        await client.head()
        client.writer.close()
        await b.engines[0].seen[0].gone.wait()
        await until(lambda: b.engine(0).in_flight == 0)
        assert b.metric("moonpool_proxy_client_disconnects_total", engine="engine-0", stage="streaming") == 1
        assert b.engine(0).failures_in_a_row == 0


@with_deadline
async def test_failure_before_the_first_byte_goes_to_another_engine() -> None:
    async with bed(2) as b:
        b.engines[0].behave = cut
        body = filler(200_000)
        answer = await b.ask("POST", CHAT, body)
        assert (answer.status, answer.engine) == (200, "engine-1")
        assert b.engines[1].seen[0].body == body
        assert b.metric("moonpool_proxy_retries_total", engine="engine-0") == 1
        labels = {"engine": "engine-0", "stage": "before_first_byte", "reason": "lost"}
        assert b.metric("moonpool_proxy_upstream_errors_total", **labels) == 1


@with_deadline
async def test_half_a_head_or_garbage_is_retried_too() -> None:
    async def half(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-")
        exchange.writer.close()

    async def garbage(exchange: Exchange) -> None:
        await exchange.send(b"SSH-2.0-OpenSSH_9\r\n")

    async with bed(2) as b:
        for behave in (half, garbage):
            b.engines[0].behave = behave
            answers = [await b.ask("POST", CHAT, b"{}") for _ in range(2)]
            assert {(answer.status, answer.engine) for answer in answers} == {(200, "engine-1")}
        assert b.engine(0).retries >= 2


@with_deadline
async def test_dead_engine_is_skipped_at_once_and_leaves_the_rotation() -> None:
    async with bed(2) as b:
        await b.engines[0].stop()
        names = [(await b.ask("POST", CHAT, b"{}")).engine for _ in range(4)]
        assert names == ["engine-1"] * 4
        assert b.metric("moonpool_proxy_engine_healthy", engine="engine-0") == 0
        assert b.metric("moonpool_proxy_retries_total", engine="engine-0") == 1  # once, then it was known


@with_deadline
async def test_retries_end() -> None:
    async with bed(5, limits=Limits(retries_max=2)) as b:
        for engine in b.engines[:4]:
            await engine.stop()
        answer = await b.ask("POST", CHAT, b"{}")
        assert answer.status == 502
        assert "engine-2 cannot be reached" in json.loads(answer.body)["error"]["message"]
        assert not b.engines[4].seen


@with_deadline
async def test_an_idle_connection_that_the_engine_closed_is_no_failure() -> None:
    """The engine closes an idle connection just as the request arrives there: the same engine is asked
    again."""
    async with bed(1) as b:
        client = await b.client()
        assert (await client.ask("POST", CHAT, b"{}")).status == 200
        assert b.engine(0).idle == 1

        async def once(exchange: Exchange) -> None:
            b.engines[0].behave = b.engines[0].say_name
            exchange.cut()

        b.engines[0].behave = once
        assert (await client.ask("POST", CHAT, b"{}")).status == 200
        assert len(b.engines[0].seen) == 3
        assert not b.engine(0).failures


@with_deadline
async def test_stream_that_breaks_between_events_ends_with_an_error_event() -> None:
    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event("first")
        await broke.wait()
        exchange.cut()

    broke = asyncio.Event()
    async with bed(2) as b:
        b.engines[0].behave = stream
        client = await b.client()
        await client.request("POST", CHAT, b"{}")
        await client.head()
        assert await client.chunk() == b"data: first\n\n"
        broke.set()
        event = await client.chunk()
        error = json.loads(event.removeprefix(b"data: "))["error"]
        assert error["type"] == "server_error"
        assert "engine-0 closed the connection" in error["message"]
        assert await client.ended() == b"0\r\n\r\n"
        assert not b.engines[1].seen  # never retried after the first byte
        labels = {"engine": "engine-0", "stage": "after_first_byte", "reason": "lost"}
        assert b.metric("moonpool_proxy_upstream_errors_total", **labels) == 1


@with_deadline
async def test_stream_that_breaks_inside_a_chunk_is_cut() -> None:
    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(b"20\r\ndata: half")
        await broke.wait()
        exchange.cut()

    broke = asyncio.Event()
    async with bed(1) as b:
        b.engines[0].behave = stream
        client = await b.client()
        await client.request("POST", CHAT, b"{}")
        await client.head()
        assert await client.reader.readexactly(14) == b"20\r\ndata: half"
        broke.set()
        assert await client.ended() == b""


@with_deadline
async def test_an_answer_of_known_length_that_breaks_is_cut_short() -> None:
    async def part(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        exchange.writer.close()

    async with bed(1) as b:
        b.engines[0].behave = part
        client = await b.client()
        await client.request("POST", CHAT, b"{}")
        text = await client.ended()
        assert (b"error" not in text and b"200 OK" in text) or text == b""


@with_deadline
async def test_bytes_behind_an_answer_never_reach_the_client() -> None:
    async def two(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n\r\nevil")

    async with bed(1) as b:
        b.engines[0].behave = two
        answer = await b.ask("POST", CHAT, b"{}")
        assert answer.status == 502
        assert b"behind its answer" in answer.body


@with_deadline
async def test_an_answer_that_ends_with_the_connection() -> None:
    async def close(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it")
        exchange.writer.close()

    async with bed(1) as b:
        b.engines[0].behave = close
        answer = await b.ask("POST", CHAT, b"{}")
        assert answer.body == b"all of it"
        assert answer.headers["connection"] == "close"


@with_deadline
async def test_client_of_http_1_0_gets_no_chunks() -> None:
    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for text in ("a", "b"):
            await exchange.event(text)
        await exchange.end_stream()

    async with bed(1) as b:
        b.engines[0].behave = stream
        client = await b.client()
        await client.send(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        head = await client.head()
        assert "transfer-encoding" not in head.headers
        assert head.headers["connection"] == "close"
        assert await client.ended() == b"data: a\n\ndata: b\n\n"


@with_deadline
async def test_head_is_relayed_without_a_body() -> None:
    async def head(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n")

    async with bed(1) as b:
        b.engines[0].behave = head
        client = await b.client()
        for _ in range(2):
            answer = await client.ask("HEAD", "/v1/models")
            assert answer.status == 200
            assert answer.headers["content-length"] == "77"
        assert b.engines[0].seen[-1].method == "HEAD"


@with_deadline
async def test_slow_reader_of_a_huge_answer_keeps_the_proxy_small() -> None:
    """Nobody reads: the engine's writing must stop, with no more held here than the bounds say."""
    size, piece, sent = 64 << 20, b"x" * (256 << 10), 0

    async def flood(exchange: Exchange) -> None:
        nonlocal sent
        exchange.writer.transport.set_write_buffer_limits(high=0)
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            await exchange.send(piece)
            sent += len(piece)

    async with bed(1, limits=Limits(write_buffer_bytes_max=256 << 10)) as b:
        b.engines[0].behave = flood
        client = await b.client()
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await client.request("POST", CHAT, b"{}")
        await until(lambda: b.connection()["write_paused"])
        still, turns = -1, 0
        while turns < 2000:  # the engine made no progress for so many turns of the loop: it is held back
            turns = turns + 1 if sent == still else 0
            still = sent
            await asyncio.sleep(0)
        assert sent < size // 2  # the rest is in socket buffers
        assert b.connection()["unwritten"] < 1 << 20
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.answer()
        assert len(answer.body) == size


@with_deadline
async def test_engine_that_never_answers_meets_its_deadline() -> None:
    clock = FakeClock()
    async with bed(2, deadlines=Deadlines(first_byte_s=600, silent_engine_s=NEVER_S), clock=clock) as b:
        b.engines[0].behave = never
        client = await b.client()
        await client.request("POST", CHAT, b"{}")
        await until(lambda: bool(b.engines[0].seen))
        clock.now += 601
        answer = await client.answer()
        assert answer.status == 504
        assert b"did not answer within 600 s" in answer.body
        await b.engines[0].seen[0].gone.wait()
        assert not b.engines[1].seen


@with_deadline
async def test_stream_that_stalls_meets_its_deadline_measured_from_progress() -> None:
    clock = FakeClock()
    more: asyncio.Queue[str] = asyncio.Queue()

    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        while True:
            await exchange.event(await more.get())

    deadlines = Deadlines(stream_stall_s=100, silent_engine_s=NEVER_S)
    async with bed(1, deadlines=deadlines, clock=clock) as b:
        b.engines[0].behave = stream
        client = await b.client()
        await client.request("POST", CHAT, b"{}")
        await client.head()
        for n in range(5):
            clock.now += 90  # 450 s in all, never 100 s without an event
            more.put_nowait(str(n))
            assert await client.chunk() == f"data: {n}\n\n".encode()
        clock.now += 101
        assert b"sent nothing for 100 s" in await client.chunk()


@with_deadline
async def test_requests_of_a_silent_engine_go_elsewhere() -> None:
    clock = FakeClock()
    async with bed(2, deadlines=Deadlines(silent_engine_s=30), clock=clock) as b:
        b.engines[0].behave = never
        client = await b.client()
        await client.request("POST", CHAT, b"{}")
        await until(lambda: bool(b.engines[0].seen))
        for _ in range(2):
            b.proxy.engines[0].answered_late("late")
        clock.now += 31
        b.proxy.engines[1].answered_well()
        answer = await client.answer()
        assert (answer.status, answer.engine) == (200, "engine-1")


@with_deadline
async def test_breaker_rests_an_engine_that_fails_its_requests() -> None:
    clock = FakeClock()

    async def broken(exchange: Exchange) -> None:
        await exchange.answer(b"{}", 500)

    async with bed(2, breaker=BreakerLimits(failures_max=3, open_s=10), clock=clock) as b:
        b.engines[0].behave = broken
        statuses = [(await b.ask("POST", CHAT, b"{}")).status for _ in range(6)]
        assert statuses == [500, 200] * 3
        assert b.metric("moonpool_proxy_engine_breaker_open", engine="engine-0") == 1
        assert {(await b.ask("POST", CHAT, b"{}")).engine for _ in range(4)} == {"engine-1"}
        b.engines[0].behave = b.engines[0].say_name
        clock.now += 10
        assert {(await b.ask("POST", CHAT, b"{}")).engine for _ in range(4)} == {"engine-0", "engine-1"}
        assert b.metric("moonpool_proxy_engine_breaker_open", engine="engine-0") == 0


@with_deadline
async def test_bad_requests_never_rest_an_engine() -> None:
    async def bad(exchange: Exchange) -> None:
        await exchange.answer(b"{}", 400)

    async with bed(2, breaker=BreakerLimits(failures_max=2)) as b:
        b.engines[0].behave = bad
        statuses = [(await b.ask("POST", CHAT, b"{}")).status for _ in range(20)]
        assert statuses == [400, 200] * 10


@with_deadline
async def test_a_resting_engine_is_better_than_none() -> None:
    async def broken(exchange: Exchange) -> None:
        await exchange.answer(b"{}", 500)

    async with bed(1, breaker=BreakerLimits(failures_max=2, open_s=NEVER_S, open_s_max=NEVER_S)) as b:
        b.engines[0].behave = broken
        assert [(await b.ask("POST", CHAT, b"{}")).status for _ in range(4)] == [500] * 4


@with_deadline
async def test_no_healthy_engine() -> None:
    def sick(engines: list[MockEngine]) -> None:
        engines[0].healthy = False

    async with bed(1, prepare=sick) as b:
        client = await b.client()
        for path in (CHAT, "/v1/models"):
            answer = await client.ask("POST" if path == CHAT else "GET", path, b"{}")
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert "the only engine is not healthy" in json.loads(answer.body)["error"]["message"]
        assert b.metric("moonpool_proxy_rejected_total", reason="no_engine") == 2


@with_deadline
async def test_a_thousand_pipelined_refusals() -> None:
    """Refusals come from inside of the reading loop: no recursion, and the order stays."""

    def sick(engines: list[MockEngine]) -> None:
        engines[0].healthy = False

    async with bed(1, prepare=sick) as b:
        client = await b.client()
        count = 1000
        await client.send(
            b"".join(request_bytes("GET", "/v1/models", None, f"X-Request-Id: {n}\r\n") for n in range(count))
        )
        for n in range(count):
            answer = await client.answer()
            assert (answer.status, answer.headers["x-request-id"]) == (503, str(n))


@with_deadline
async def test_upstream_connections_that_idle_are_closed() -> None:
    clock = FakeClock()
    async with bed(1, deadlines=Deadlines(upstream_idle_s=4), clock=clock) as b:
        assert (await b.ask("POST", CHAT, b"{}")).status == 200
        assert b.engine(0).idle == 1
        clock.now += 4
        await until(lambda: b.engine(0).connections == 0)


@with_deadline
async def test_engine_that_accepts_no_connection() -> None:
    """A full backlog: connecting hangs, the deadline for connecting sends the request elsewhere."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = []
        async with bed(2, deadlines=Deadlines(connect_s=0.05)) as b:
            for _ in range(4):
                waiting.append(socket.socket())
                waiting[-1].setblocking(False)
                waiting[-1].connect_ex(full.getsockname())
            b.proxy.relay.engine_address(0, *full.getsockname())
            answer = await b.ask("POST", CHAT, b"{}")
            assert answer.engine == "engine-1"
            labels = {"engine": "engine-0", "stage": "before_first_byte", "reason": "connect"}
            assert b.metric("moonpool_proxy_upstream_errors_total", **labels) == 1
        for one in waiting:
            one.close()


def test_deadlines_default_to_a_long_prefill() -> None:
    assert Deadlines().first_byte_s == 600
