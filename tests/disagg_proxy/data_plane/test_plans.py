"""Prefill and decode apart, over real sockets; and what happens when an engine or the client goes."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
from typing import Any

import pytest

from moonpool._native import ProxyRequest
from moonpool.core.config.proxy_section import Deadlines, Limits
from moonpool.disagg_proxy import server
from moonpool.disagg_proxy.conductor.plan import Answer, Decision, Plan
from moonpool.disagg_proxy.data_plane.observations import Stage, read
from moonpool.disagg_proxy.dispatch.dispatcher import Dispatcher
from tests.disagg_proxy.data_plane.plans_bed import BODY, CHAT, GIVEN, pd_bed, prefill, stream
from tests.disagg_proxy.harness import (
    NEVER_S,
    Behaviour,
    Exchange,
    FakeClock,
    bed,
    until,
    with_deadline,
)


async def never(exchange: Exchange) -> None:
    await exchange.gone.wait()


async def cut(exchange: Exchange) -> None:
    exchange.cut()


def status(code: int, body: bytes = b'{"error":"x"}') -> Behaviour:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(body, code)

    return answer


@with_deadline
async def test_two_steps() -> None:
    async with pd_bed() as b:
        answer = await b.ask("POST", CHAT, BODY, "X-Request-Id: one\r\nAccept-Encoding: gzip\r\n")
        assert answer.body == b"data: a\n\ndata: b\n\n"
        assert answer.engine == "engine-1"
        (p,), (d,) = b.engines[0].seen, b.engines[1].seen
        assert json.loads(p.body) == {
            "model": "m",
            "messages": [],
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
        assert d.body == BODY[:-1] + b',"kv_transfer_params":' + GIVEN + b"}"  # byte for byte, both of them
        assert p.headers["x-request-id"] == d.headers["x-request-id"] == "one"
        assert p.headers["traceparent"] == d.headers["traceparent"]
        assert "accept-encoding" not in p.headers
        assert d.headers["accept-encoding"] == "gzip"
        assert b.metric("moonpool_proxy_prefills_total", engine="engine-0", outcome="handed_over") == 1


@with_deadline
async def test_what_prefill_had_cached_is_told() -> None:
    """The decode engine's own count has all that it was handed over in it."""
    usage = b'"usage":{"prompt_tokens":900,"prompt_tokens_details":{"cached_tokens":512}}'

    async def telling(exchange: Exchange) -> None:
        await exchange.answer(b'{"kv_transfer_params":%b,%b}' % (GIVEN, usage))

    async with pd_bed() as b:
        assert (await b.ask("POST", CHAT, BODY)).headers["x-moonpool-prefill-cached"] == "unknown"
        b.engines[0].behave = telling
        assert (await b.ask("POST", CHAT, BODY)).headers["x-moonpool-prefill-cached"] == "512"
        b.engines[0].behave = status(503)
        alone = await b.ask("POST", CHAT, BODY)
        assert (alone.status, "x-moonpool-prefill-cached" in alone.headers) == (200, False)


@with_deadline
@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":{"old":1},"a":1}',
        b'{"a":1,"kv_transfer_params":null,"kv_transfer_params":{"x":[{"y":"}"}]}}',
        '{"kv_transfer\\u005fparams":[1],"å":"日本 \\ud83d\\ude00 \\" }"}'.encode(),
        b' { "a" : { "kv_transfer_params" : 1 } , "b" : [ "kv_transfer_params" ] } \n',
        b'{"max_completion_tokens":9,"n":1e400}',
        b"{}",
    ],
)
async def test_odd_bodies_are_spliced(body: bytes) -> None:
    async with pd_bed() as b:
        assert (await b.ask("POST", CHAT, body)).status == 200
        got = json.loads(b.engines[1].seen[0].body, object_pairs_hook=list)
        assert [v for k, v in got if k == "kv_transfer_params"] == [json.loads(GIVEN, object_pairs_hook=list)]
        rest = [(k, v) for k, v in json.loads(body, object_pairs_hook=list) if k != "kv_transfer_params"]
        assert [(k, v) for k, v in got if k != "kv_transfer_params"] == rest


@with_deadline
@pytest.mark.parametrize("body", [b"[]", b"{", b'{"a":NaN}', b"\xff"])
async def test_what_is_no_object_goes_to_no_engine(body: bytes) -> None:
    async with pd_bed() as b:
        assert (await b.ask("POST", CHAT, body)).status == 400
        assert not any(engine.seen for engine in b.engines)


@with_deadline
async def test_an_empty_body_goes_to_the_decode_engine() -> None:
    async with pd_bed() as b:
        assert (await b.ask("POST", CHAT, b"")).engine == "engine-1"
        assert not b.engines[0].seen


@with_deadline
async def test_only_generation_is_taken_apart() -> None:
    async with pd_bed() as b:
        assert (await b.ask("POST", "/v1/embeddings", BODY)).engine == "engine-1"
        assert not b.engines[0].seen


@with_deadline
async def test_large_bodies_and_answers() -> None:
    body = b'{"prompt":"' + b"x" * 3_000_000 + b'","stream":false}'
    async with pd_bed() as b:

        async def large(exchange: Exchange) -> None:
            await exchange.answer(b'{"fill":"' + b"y" * 500_000 + b'","kv_transfer_params":%b}' % GIVEN)

        b.engines[0].behave = large
        assert (await b.ask("POST", CHAT, body)).status == 200
        assert b.engines[1].seen[0].body == body[:-1] + b',"kv_transfer_params":' + GIVEN + b"}"


@with_deadline
async def test_a_chunked_answer_of_the_prefill_engine() -> None:
    async def chunks(exchange: Exchange) -> None:
        text = b'{"kv_transfer_params":%b}' % GIVEN
        await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for octet in (text[:10], text[10:]):
            await exchange.send(b"%x\r\n%b\r\n" % (len(octet), octet))
        await exchange.end_stream()

    async with pd_bed() as b:
        b.engines[0].behave = chunks
        assert (await b.ask("POST", CHAT, BODY)).status == 200
        assert GIVEN in b.engines[1].seen[0].body


async def early_end(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    exchange.cut()


async def garbage(exchange: Exchange) -> None:
    await exchange.send(b"\x00\x01garbage\r\n\r\n")


@with_deadline
@pytest.mark.parametrize(
    ("behave", "outcome"),
    [
        (cut, "failed"),
        (early_end, "failed"),
        (garbage, "failed"),
        (status(500), "failed"),
        (status(503), "failed"),
        (status(429), "refused"),
        (status(200, b"not json"), "no_parameters"),
        (status(200, b"{}"), "no_parameters"),
        (status(200, b'{"kv_transfer_params":null}'), "no_parameters"),
        (status(200, b'{"kv_transfer_params":"x"}'), "no_parameters"),
    ],
)
async def test_a_failed_prefill_costs_a_recompute(behave: Behaviour, outcome: str) -> None:
    async with pd_bed() as b:
        b.engines[0].behave = behave
        answer = await b.ask("POST", CHAT, BODY)
        assert (answer.status, answer.engine) == (200, "engine-1")
        assert [exchange.body for exchange in b.engines[1].seen] == [BODY]
        assert b.metric("moonpool_proxy_prefills_total", engine="engine-0", outcome=outcome) == 1


@with_deadline
async def test_a_prefill_engine_that_is_gone() -> None:
    async with pd_bed("ppd") as b:
        await b.engines[0].stop()
        for _ in range(4):
            assert (await b.ask("POST", CHAT, BODY)).body == b"data: a\n\ndata: b\n\n"
        assert len(b.engines[1].seen) == 4  # the other one took all
        await b.engines[1].stop()
        assert (await b.ask("POST", CHAT, BODY)).engine == "engine-2"
        assert b.engines[2].seen[-1].body == BODY


@with_deadline
async def test_many_failed_prefills_end_in_a_recompute() -> None:
    async with pd_bed("ppppd", limits=Limits(retries_max=2)) as b:
        for engine in b.engines[:4]:
            engine.behave = status(503)
        assert (await b.ask("POST", CHAT, BODY)).engine == "engine-4"
        assert sum(len(engine.seen) for engine in b.engines[:4]) == 3
        retries = [b.metric("moonpool_proxy_retries_total", engine=f"engine-{place}") for place in range(5)]
        assert sum(retries) == 2


@with_deadline
async def test_a_record_tells_of_the_last_attempt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_OBSERVE_EVERY_S", 1e6)  # the records are for the test
    plans = (Plan(1, 0), Plan(3))
    for failing, behave in ((1, cut), (0, status(503))):  # after a prefill that went well, and at it
        async with pd_bed("pdpd", decide=lambda request: plans[request.attempt]) as b:
            b.engines[failing].behave = behave
            b.proxy.relay.take_observations()
            assert (await b.ask("POST", CHAT, BODY)).engine == "engine-3"
            (record,) = read(b.proxy.relay.take_observations())
            assert (record.attempts, record.prefill, record.decode) == (2, -1, 3)
            assert (record.sent_prefill_s, record.prefill_done_s) == (0, 0)
            assert record.arrived_s < record.sent_decode_s < record.first_byte_s


@with_deadline
async def test_a_prefill_that_was_refused_was_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_OBSERVE_EVERY_S", 1e6)  # the records are for the test
    async with pd_bed(limits=Limits(retries_max=0)) as b:
        b.engines[0].behave = status(503)
        b.proxy.relay.take_observations()
        assert (await b.ask("POST", CHAT, BODY)).engine == "engine-1"
        (record,) = read(b.proxy.relay.take_observations())
        assert record.sent_prefill_s > 0
        assert record.prefill_done_s == 0


@with_deadline
async def test_what_the_prefill_engine_says_of_a_bad_request_is_the_answer() -> None:
    async with pd_bed() as b:
        b.engines[0].behave = status(400, b'{"error":{"message":"prompt too long"}}')
        client = await b.client()
        for _ in range(10):
            answer = await client.ask("POST", CHAT, BODY)
            assert (answer.status, answer.engine) == (400, "engine-0")
            assert b"too long" in answer.body
        assert not b.engines[1].seen
        assert b.engine(0).breaker_closed


@with_deadline
async def test_a_decode_engine_that_fails_before_its_first_byte() -> None:
    async with pd_bed("pdd") as b:
        b.engines[1].behave = cut
        answer = await b.ask("POST", CHAT, BODY)
        assert (answer.status, answer.engine) == (200, "engine-2")
        assert GIVEN in b.engines[2].seen[0].body
        assert b.metric("moonpool_proxy_retries_total", engine="engine-1") == 1


@with_deadline
async def test_a_decode_engine_that_fails_in_mid_stream() -> None:
    async def half(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event("first")
        await broke.wait()
        exchange.cut()

    broke = asyncio.Event()
    async with pd_bed("pdd") as b:
        b.engines[1].behave = half
        client = await b.client()
        await client.request("POST", CHAT, BODY)
        await client.head()
        assert await client.chunk() == b"data: first\n\n"
        broke.set()
        assert b"engine-1 closed the connection" in await client.chunk()
        assert await client.ended() == b"0\r\n\r\n"
        assert not b.engines[2].seen


@with_deadline
async def test_a_prefill_that_never_answers_is_left_at_its_deadline() -> None:
    clock = FakeClock()
    async with pd_bed(deadlines=Deadlines(first_byte_s=600, silent_engine_s=NEVER_S), clock=clock) as b:
        b.engines[0].behave = never
        client = await b.client()
        await client.request("POST", CHAT, BODY)
        await until(lambda: bool(b.engines[0].seen))
        clock.now += 601
        assert (await client.answer()).engine == "engine-1"
        await b.engines[0].seen[0].gone.wait()


@with_deadline
async def test_the_client_leaves_in_prefill() -> None:
    async with pd_bed() as b:
        b.engines[0].behave = never
        client = await b.client()
        await client.request("POST", CHAT, BODY)
        await until(lambda: bool(b.engines[0].seen))
        client.leave()
        await b.engines[0].seen[0].gone.wait()
        assert not b.engines[1].seen
        assert b.metric("moonpool_proxy_client_disconnects_total", engine="engine-0", stage="waiting") == 1


@with_deadline
async def test_the_client_leaves_while_decode_has_not_begun_and_while_it_streams() -> None:
    async def first(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event("first")
        await exchange.gone.wait()

    async with pd_bed() as b:
        for behave, streaming in ((never, False), (first, True)):
            b.engines[1].behave = behave
            b.engines[1].seen.clear()
            client = await b.client()
            await client.request("POST", CHAT, BODY)
            await until(lambda: bool(b.engines[1].seen))
            if streaming:
                await client.head()
            client.leave()
            await b.engines[1].seen[0].gone.wait()
        for stage in ("waiting", "streaming"):
            assert b.metric("moonpool_proxy_client_disconnects_total", engine="engine-1", stage=stage) == 1


@with_deadline
async def test_the_client_leaves_while_the_policy_thinks() -> None:
    asked = []
    async with pd_bed(decide=lambda request: asked.append(request)) as b:
        client = await b.client()
        await client.request("POST", CHAT, BODY)
        await until(lambda: len(asked) == 1)
        client.leave()
        await until(lambda: asked[0].gone)
        b.proxy.relay.resume(asked[0], Plan(1, 0))  # too late: no engine is asked
        assert (await b.ask("GET", "/health")).status == 200
        assert not b.engines[0].seen
        assert bytes(asked[0].body) == BODY  # still its own


@with_deadline
async def test_a_decision_that_comes_later_and_what_it_may_be() -> None:
    asked = []
    async with pd_bed(decide=lambda request: asked.append(request)) as b:
        for decision, body in (
            (Plan(1, 0), b"data: a\n\ndata: b\n\n"),
            (Plan(0), b'{"id":"x","kv_transfer_params":%b,"choices":[]}' % GIVEN),
            (1, b"data: a\n\ndata: b\n\n"),
            (Answer(429, b"slow down", b"text/plain", ((b"Retry-After", b"3"),), "shed"), b"slow down"),
        ):
            client = await b.client()
            await client.request("POST", CHAT, BODY)
            await until(lambda: len(asked) == 1)
            b.proxy.relay.resume(asked.pop(), decision)
            assert (await client.answer()).body == body
        assert b.metric("moonpool_proxy_rejected_total", reason="shed") == 1


@with_deadline
async def test_a_decision_has_a_deadline() -> None:
    async with pd_bed(decide=lambda request: None, deadlines=Deadlines(decide_s=0.05)) as b:
        answer = await b.ask("POST", CHAT, BODY)
        assert answer.status == 503
        assert b"undecided" in answer.body


@pytest.mark.parametrize("policy", ["conductor", "least_load"])
@with_deadline
async def test_what_the_dispatcher_is_handed_with_a_request(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, bytes, bytes | None]] = []
    decide = Dispatcher.decide

    def noting(dispatcher: Dispatcher, request: ProxyRequest, *known: Any) -> Decision:
        asked.append(known)
        return decide(dispatcher, request, *known)

    monkeypatch.setattr(Dispatcher, "decide", noting)
    monkeypatch.setattr(server, "_OBSERVE_EVERY_S", 1e6)  # only decisions take records
    async with bed(1, policy=policy) as b:
        relay, times = b.proxy.relay, [b.proxy.relay.now()]
        for prompt in ("[1,2,65536]", '["a","b"]'):
            body = b'{"model":"m","max_tokens":4,"prompt":%b}' % prompt.encode()
            assert (await b.ask("POST", "/v1/completions", body)).status == 200
            times.append(relay.now())
        (first_s, nothing, ids), (second_s, records, none) = asked
        assert times[0] <= first_s <= times[1] <= second_s <= times[2]
        assert (nothing, none) == (b"", None)
        if policy == "least_load":  # it looks at no prompt, and learns from nothing
            assert (records, ids) == (b"", None)
            assert len(list(read(relay.take_observations()))) == 2
        else:
            assert ids == b"".join(n.to_bytes(4, "little") for n in (1, 2, 65536))
            (record,) = read(records)
            assert (record.stage, record.tracked, record.status) == (Stage.ENDED, 1, 200)
            assert first_s <= record.last_byte_s <= second_s
            assert b.proxy._dispatcher.workers[0].load.requests == 1  # the first was learnt of in time


@with_deadline
async def test_what_a_policy_sees() -> None:
    seen = []
    headers = "X-A: 1\r\nX-Moonpool-Decision: 1\r\nx-moonpool-GAP-slo: 2\r\nX-Moonpool-Gap-SLO: 3\r\n"

    def decide(r: ProxyRequest) -> Decision:
        seen.append(
            (
                r.kind,
                r.model,
                r.stream,
                r.max_tokens,
                r.cache_salt,
                r.path,
                r.method,
                r.headers("x-a"),
                r.headers("x-b"),
                r.moonpool_headers,
                r.prompt_tokens(),
                r.prompt_text(),
                r.candidates,
                r.attempt,
                bytes(r.body),
            )  # type: ignore[attr-defined]
        )
        return Plan(0, headers=((b"X-Moonpool-Decision", b"because"),), tracked=True)

    async with bed(2, decide=decide) as b:
        body = '{"model":"å","max_tokens":4,"stream":true,"prompt":[1,2,65536]}'.encode()
        answer = await b.ask("POST", "/v1/completions?x=1", body, headers)
        assert answer.headers["x-moonpool-decision"] == "because"
        assert "x-moonpool-decision" not in b.engines[0].seen[0].headers
        ids = b"".join(n.to_bytes(4, "little") for n in (1, 2, 65536))
        assert seen.pop() == (
            "completions",
            "å",
            True,
            4,
            None,
            b"/v1/completions",
            b"POST",
            b"1",
            None,
            {"decision": b"1", "gap-slo": b"2"},
            ids,
            None,
            (0, 1),
            0,
            body,
        )
        answer = await b.ask("POST", CHAT, b'{"prompt":"\\u00e9","cache_salt":"\\u00e8"}')
        assert "x-moonpool-decision" not in answer.headers
        assert seen[-1][4] == "è"
        assert seen.pop()[9:12] == (None, None, "é")


@with_deadline
@pytest.mark.parametrize("wrong", [7, -1, "x", (1, 2), Plan(0, 0), Answer(99, b"")])
async def test_a_policy_that_breaks_stops_nobody(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.unraisablehook", lambda *args: None)
    async with bed(2, decide=lambda request: wrong) as b:
        assert (await b.ask("POST", CHAT, BODY)).status == 200
        assert b.metric("moonpool_proxy_policy_errors_total") == 1


@with_deadline
async def test_both_at_once() -> None:
    goon = asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await goon.wait()
        await stream(exchange)

    plan = Plan(1, 0, b'{"p":1}', b'{"d":1}')
    async with pd_bed(decide=lambda request: plan if request.attempt == 0 else Plan(1)) as b:
        b.engines[1].behave = waits
        client = await b.client()
        await client.request("POST", CHAT, BODY)
        await until(lambda: bool(b.engines[0].seen) and bool(b.engines[1].seen))
        assert json.loads(b.engines[0].seen[0].body)["kv_transfer_params"] == {"p": 1}
        assert json.loads(b.engines[0].seen[0].body)["max_tokens"] == 1
        assert b.engines[1].seen[0].body == BODY[:-1] + b',"kv_transfer_params":{"d":1}}'
        goon.set()
        assert (await client.answer()).body == b"data: a\n\ndata: b\n\n"
        goon.clear()
        b.engines[0].behave = cut  # then decode waits for what will not come: asked anew, it computes
        await client.request("POST", CHAT, BODY)
        await until(lambda: len(b.engines[1].seen) == 3)
        await b.engines[1].seen[1].gone.wait()
        goon.set()
        assert (await client.answer()).status == 200
        assert b.engines[1].seen[2].body == BODY


@with_deadline
@pytest.mark.parametrize("fails", [cut, status(503), status(400)])
async def test_a_head_without_a_body_binds_nobody(fails: Behaviour) -> None:
    """Decode sends the head of a stream at once, and waits for a prefill that fails: the client sees one
    answer, of an engine that was asked anew."""
    headed = asyncio.Event()

    async def head_only(exchange: Exchange) -> None:
        await exchange.begin_stream()
        headed.set()
        await exchange.gone.wait()

    async def fails_late(exchange: Exchange) -> None:
        await headed.wait()
        await fails(exchange)

    def decide(request: ProxyRequest) -> Decision:
        return Plan(1, 0, b'{"p":1}', b'{"d":1}') if request.attempt == 0 else Plan(1, 2)

    async with pd_bed("pdp", decide=decide) as b:
        b.engines[0].behave = fails_late
        b.engines[1].behave = head_only
        client = await b.client()
        await client.request("POST", CHAT, BODY)
        await until(lambda: bool(b.engines[1].seen))
        b.engines[1].behave = stream
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"data: a\n\ndata: b\n\n")
        await b.engines[1].seen[0].gone.wait()
        blamed = fails.__name__ == "answer" and not b.engines[2].seen  # 400: no other prefill would do better
        assert b.engines[1].seen[1].body == BODY if blamed else GIVEN in b.engines[1].seen[1].body


@with_deadline
async def test_decode_fails_at_once_and_the_same_prefill_is_asked_anew() -> None:
    def decide(request: ProxyRequest) -> Decision:
        assert 0 in request.candidates
        number = b"%d" % request.attempt
        return Plan(1 + request.attempt, 0, b'{"p":%b}' % number, b'{"d":%b}' % number)

    async with pd_bed("pdd", decide=decide) as b:
        b.engines[0].behave = never
        b.engines[1].behave = cut
        assert (await b.ask("POST", CHAT, BODY)).engine == "engine-2"
        assert [json.loads(e.body)["kv_transfer_params"] for e in b.engines[0].seen] == [{"p": 0}, {"p": 1}]
        assert b.engines[2].seen[0].body == BODY[:-1] + b',"kv_transfer_params":{"d":1}}'


@with_deadline
async def test_the_first_token_does_not_wait_for_the_prefills_answer() -> None:
    plan = Plan(1, 0, b"{}", b"{}")
    async with pd_bed(decide=lambda request: plan) as b:
        b.engines[0].behave = never
        assert (await b.ask("POST", CHAT, BODY)).body == b"data: a\n\ndata: b\n\n"
        await b.engines[0].seen[0].gone.wait()  # nobody needs it any more
        assert b.metric("moonpool_proxy_prefills_total", engine="engine-0", outcome="overtaken") == 1


@with_deadline
async def test_headers_for_the_prefill_engine_stand_in_for_the_clients() -> None:
    own = ((b"X-data-parallel-rank", b"3"),)
    plan = Plan(1, 0, b"{}", b"{}", prefill_headers=own)
    async with pd_bed(decide=lambda request: plan) as b:
        await b.ask("POST", CHAT, BODY, "x-Data-Parallel-Rank: 9\r\nX-Other: 1\r\n")
        (p,), (d,) = b.engines[0].seen, b.engines[1].seen
        assert p.headers["x-data-parallel-rank"] == "3"
        assert "x-data-parallel-rank" not in d.headers
        assert p.headers["x-other"] == d.headers["x-other"] == "1"


@with_deadline
async def test_both_at_once_and_the_client_leaves() -> None:
    plan = Plan(1, 0, b"{}", b"{}")
    async with pd_bed(decide=lambda request: plan) as b:
        b.engines[0].behave = b.engines[1].behave = never
        client = await b.client()
        await client.request("POST", CHAT, BODY)
        await until(lambda: bool(b.engines[0].seen) and bool(b.engines[1].seen))
        client.leave()
        await asyncio.gather(*(engine.seen[0].gone.wait() for engine in b.engines))


@with_deadline
async def test_pipelined_requests_in_two_steps() -> None:
    async with pd_bed() as b:
        client = await b.client()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
        await client.send((head + BODY) * 50)
        for _ in range(50):
            assert (await client.answer()).body == b"data: a\n\ndata: b\n\n"
        assert [len(engine.seen) for engine in b.engines] == [50, 50]


@with_deadline
async def test_a_thousand_disconnects_at_random_leave_nothing_at_the_engines(rng: random.Random) -> None:
    async def slowly(exchange: Exchange) -> None:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        await prefill(exchange)

    async def slow_stream(exchange: Exchange) -> None:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        await exchange.begin_stream()
        for n in range(rng.randrange(10)):
            await exchange.event(str(n))
            await asyncio.sleep(0)
        await exchange.end_stream()

    async with pd_bed("ppdd") as b:
        for engine, letter in zip(b.engines, "ppdd", strict=True):
            engine.behave = slowly if letter == "p" else slow_stream

        async def once() -> None:
            client = await b.client()
            await client.request("POST", CHAT, BODY)
            for _ in range(rng.randrange(60)):
                await asyncio.sleep(0)
            client.leave()

        for _ in range(50):
            await asyncio.gather(*(once() for _ in range(20)))
        await until(lambda: b.counters.client_connections == 0)
        assert all(engine.in_flight == 0 for engine in b.counters.engines)
        for engine in b.engines:
            engine.behave = prefill
        assert (await b.ask("POST", CHAT, BODY)).status == 200


HOLDER = """
import resource, socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [socket.create_connection((host, port)) for _ in range(count)]
print("held", flush=True)
sys.stdin.read()
"""


def test_ten_thousand_idle_connections() -> None:
    """Their other ends are in another process: as many as open files allow here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(10_000, hard - 500)
    print(f"{count} idle connections ({hard} open files are allowed)")

    async def idle() -> None:
        async with bed(1, limits=Limits(client_connections_max=count, address_share=1)) as b:
            holder = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", HOLDER, b.host, str(b.port), str(count - 1)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert holder.stdin is not None
            assert holder.stdout is not None
            try:
                assert await holder.stdout.readline() == b"held\n"
                await until(lambda: b.client_count == count - 1)
                assert (await b.ask("POST", CHAT, b"{}")).status == 200
                holder.stdin.close()
                await holder.wait()
            finally:
                if holder.returncode is None:
                    holder.kill()
            await until(lambda: b.client_count == 0)
            assert (await b.ask("POST", CHAT, b"{}")).status == 200

    try:
        with_deadline(idle, 60)()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
