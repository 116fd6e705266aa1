"""SGLang's form of a hand-over: both engines get the same request at once, and meet in a room; with engines
whose every byte is scripted. The real one stands in test_with_sglang.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from moonpool.core.config.proxy_section import BreakerLimits, Deadlines, Limits
from moonpool.disagg_proxy.engines.sglang import (
    PROMPTS_MAX,
    BootstrapAddress,
    room_ids,
)
from moonpool.disagg_proxy.settings import Internals
from tests.disagg_proxy.dispatch.one_shot_bed import (
    BODY,
    CHAT,
    COMPLETIONS,
    NAMES,
    STREAM,
    never,
    pair,
    rooms_of,
    saying,
    status,
    stream,
)
from tests.disagg_proxy.harness import Exchange, with_deadline
from tests.disagg_proxy.harness import until as turned

# What is sent


@with_deadline
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate"])
async def test_both_get_the_same_request_at_once(path: str) -> None:
    async with pair(deadlines=Deadlines(linger_s=0.05)) as b:
        b.engines[0].behave = never  # decode's answer waits for none of prefill's
        answer = await b.ask("POST", path, BODY, "X-Request-Id: one\r\n")
        assert answer.body == b'{"engine":"engine-1"}'
        assert answer.engine == "engine-1"
        (p,), (d,) = b.engines[0].seen, b.engines[1].seen
        assert p.body == d.body
        assert d.body.startswith(BODY[:-1] + b',"bootstrap_host":"127.0.0.1","bootstrap_port":8998,')
        assert 0 <= rooms_of(d) < 1 << 63
        assert (p.target, p.headers["x-request-id"]) == (path, "one")
        await p.gone.wait()  # nothing is left of it
        assert b.metric("moonpool_proxy_prefills_total", engine="engine-0", outcome="overtaken") == 1


@with_deadline
async def test_prefills_late_answer_leaves_its_connection_as_it_was() -> None:
    async with pair() as b:
        prefill, decode = b.engines

        async def late(exchange: Exchange) -> None:
            await turned(lambda: b.proxy.relay.in_flight(0) == 0)  # the client has its answer
            await stream(exchange)

        prefill.behave = late
        for _ in range(3):
            assert (await b.ask("POST", CHAT, BODY)).status == 200
            await turned(lambda: b.metric("moonpool_proxy_upstream_connections", engine="engine-0") == 1)
            while not b.proxy.relay.counters()["engines"][0]["idle"]:
                await asyncio.sleep(0)
        assert (prefill.connections, decode.connections) == (1, 1)


@with_deadline
async def test_a_stream_begins_before_prefill_answers() -> None:
    async with pair() as b:
        b.engines[0].behave, b.engines[1].behave = never, stream
        assert (await b.ask("POST", CHAT, STREAM)).body == b"data: a\n\ndata: b\n\n"


@with_deadline
@pytest.mark.parametrize(
    ("path", "prompts", "count"),
    [
        (COMPLETIONS, {"prompt": "a"}, None),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, None),
        (COMPLETIONS, {"prompt": []}, None),
        (COMPLETIONS, {"prompt": ["a"]}, 1),
        (COMPLETIONS, {"prompt": ['a,"]', "b", ""]}, 3),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, 2),
        ("/generate", {"text": "a", "input_ids": None}, None),
        ("/generate", {"text": None, "input_ids": [1, 2]}, None),
        ("/generate", {"text": ["a", "b"]}, 2),
        ("/generate", {"input_ids": [[1], [2], [3], [4]]}, 4),
        (CHAT, {"messages": [{}, {}]}, None),
    ],
)
async def test_each_prompt_of_a_batch_has_its_room(path: str, prompts: Any, count: int | None) -> None:
    async with pair() as b:
        await b.ask("POST", path, json.dumps(prompts).encode())
        (p,), (d,) = b.engines[0].seen, b.engines[1].seen
        assert p.body == d.body
        host, port, room = (json.loads(d.body)[name] for name in NAMES)
        if count is None:
            assert (host, port) == ("127.0.0.1", 8998)
            assert isinstance(room, int)
        else:
            assert (host, port) == (["127.0.0.1"] * count, [8998] * count)
            assert len(set(room)) == count


@with_deadline
async def test_what_a_client_says_of_rooms_is_replaced() -> None:
    async with pair() as b:
        await b.ask("POST", CHAT, b'{"bootstrap_room":7,"bootstrap_host":"evil","bootstrap_port":1,"a":2}')
        told = json.loads(b.engines[1].seen[0].body)
        assert (told["bootstrap_host"], told["bootstrap_port"], told["a"]) == ("127.0.0.1", 8998, 2)
        assert told["bootstrap_room"] != 7


@with_deadline
async def test_a_batch_without_end_is_refused() -> None:
    async with pair() as b:
        body = json.dumps({"prompt": ["x"] * (PROMPTS_MAX + 1)}).encode()
        answer = await b.ask("POST", COMPLETIONS, body)
        assert answer.status == 400
        assert b"4096 prompts" in answer.body
        assert not b.engines[1].seen


def test_rooms_are_never_used_again() -> None:
    bootstrap_server, rooms = BootstrapAddress("::1", 9000), room_ids()
    seen = [json.loads(dict(bootstrap_server.members(rooms, None))[b"bootstrap_room"]) for _ in range(1000)]
    seen += json.loads(dict(bootstrap_server.members(rooms, 1000))[b"bootstrap_room"])
    assert len(set(seen)) == 2000
    assert all(0 <= room < 1 << 63 for room in seen)
    assert seen[0] != next(room_ids())
    assert dict(bootstrap_server.members(rooms, 0))[b"bootstrap_host"] == b"[]"
    assert dict(bootstrap_server.members(rooms, None))[b"bootstrap_host"] == b'"[::1]"'


@with_deadline
@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (
            "/v1/responses",
            b'{"bootstrap_host":"evil","bootstrap_port":1,"bootstrap_room":2,"a":3}',
            b'{"a":3}',
        ),
        ("/tokenize", b'{"a":3}', b'{"a":3}'),
        ("/tokenize", b"", b""),
    ],
)
async def test_no_client_says_where_to_meet(path: str, body: bytes, told: bytes) -> None:
    async with pair() as b:
        names = ("Host", "PORT", "room", "rid")
        head = "".join(f"X-Override-Bootstrap-{name}: evil\r\n" for name in names)
        assert (await b.ask("POST", path, body, head)).status == 200
        (seen,) = b.engines[1].seen
        assert json.loads(seen.body or b"0") == json.loads(told or b"0")
        await b.ask("POST", CHAT, BODY, head)
        for engine in b.engines:
            for exchange in engine.seen:
                assert not any(name.startswith("x-override") for name in exchange.headers)


@with_deadline
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
@pytest.mark.parametrize("body", [b'{"a":%b}' % (b"[" * 600 + b"]" * 600), b"\x1f\x8b...", b"[1]"])
async def test_a_body_that_cannot_be_read_goes_to_neither(path: str, body: bytes) -> None:
    """orjson, SGLang's, reads nesting that the proxy does not."""
    async with pair() as b:
        answer = await b.ask("POST", path, body)
        assert answer.status == 400
        assert b"JSON object" in answer.body
        assert not any(engine.seen for engine in b.engines)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@with_deadline
async def test_a_broken_policy_lets_nothing_through() -> None:
    def decide(request: Any) -> Any:
        raise RuntimeError("broken")

    def prepare(engines: list[Any]) -> None:
        engines[0].healthy = False

    async with pair(decide=decide, prepare=prepare) as b:
        await b.ask("POST", CHAT, b'{"bootstrap_host":"evil","a":1}')
        assert b.engines[1].seen[0].body == b'{"a":1}'


@with_deadline
@pytest.mark.parametrize("embeds", [[[[1.0]], [[2.0]]], [[1.0], [2.0]]])
async def test_each_prompt_of_embeddings_has_its_room(embeds: Any) -> None:
    async with pair() as b:
        await b.ask("POST", "/generate", json.dumps({"text": None, "input_embeds": embeds}).encode())
        room = rooms_of(b.engines[1].seen[0])
        assert (len(room) == 2) if isinstance(embeds[0][0], list) else isinstance(room, int)


@with_deadline
async def test_a_body_of_very_many_pieces_arrives_whole() -> None:
    body = b"{" + b",".join(b'"bootstrap_room":%d,"a%d":1' % (n, n) for n in range(20000)) + b"}"
    async with pair(limits=Limits(members_max=40000)) as b:
        await b.ask("POST", CHAT, body)
        told = json.loads(b.engines[1].seen[0].body)
        assert len(told) == 20000 + 3
        assert told["a19999"] == 1


# Failures


@with_deadline
@pytest.mark.parametrize("head", [False, True], ids=["silent", "head"])
async def test_what_prefill_says_against_a_request_is_the_answer(head: bool) -> None:
    """Decode would wait for ever."""

    async def begin(exchange: Exchange) -> None:
        if head:
            await exchange.begin_stream()
        await exchange.gone.wait()

    async with pair("ppd") as b:
        for engine in b.engines[:2]:
            engine.behave = status(400, b'{"error":"too long"}')
        b.engines[2].behave = begin
        answer = await b.ask("POST", CHAT, STREAM)
        assert (answer.status, answer.body) == (400, b'{"error":"too long"}')
        assert answer.engine.startswith("engine-")
        await b.engines[2].seen[0].gone.wait()
        assert sum(len(engine.seen) for engine in b.engines) == 2
        assert all(b.engine(place).breaker_closed for place in range(3))


@with_deadline
@pytest.mark.parametrize(
    ("code", "answered"), [(400, 200), (503, 200)], ids=["of the request", "of the engine"]
)
async def test_prefill_may_fail_in_a_stream(code: int, answered: int) -> None:
    """Its head says 200 before it knows."""

    async def fail(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event(json.dumps({"error": {"message": "no", "code": code}}))
        await exchange.event("[DONE]")
        await exchange.end_stream()

    async with pair("ppd") as b:
        b.engines[0].behave = fail
        b.engines[1].behave = fail if code == 400 else never
        b.engines[2].behave = lambda exchange: (never if len(b.engines[2].seen) < 2 else stream)(exchange)
        answer = await b.ask("POST", "/generate", b'{"text":"x","stream":true}')
        assert answer.status == answered
        if code == 400:
            assert b'"code": 400' in answer.body
            assert len(b.engines[2].seen) == 1
        else:
            assert answer.body == b"data: a\n\ndata: b\n\n"
            assert len(b.engines[2].seen) == 2


@with_deadline
@pytest.mark.parametrize("failure", ["refusal", "cut", "garbage"])
async def test_another_pair_is_asked_with_another_room(failure: str) -> None:
    async def cut(exchange: Exchange) -> None:
        exchange.cut()

    async def garbage(exchange: Exchange) -> None:
        await exchange.send(b"what?\r\n\r\n")

    behave = {"refusal": status(503), "cut": cut, "garbage": garbage}[failure]
    async with pair("ppd") as b:
        b.engines[0].behave, b.engines[1].behave = behave, never
        decode = b.engines[2]

        async def second(exchange: Exchange) -> None:
            await (exchange.gone.wait() if len(decode.seen) == 1 else exchange.answer(b"{}"))

        decode.behave = second
        assert (await b.ask("POST", CHAT, BODY)).status == 200
        first, last = decode.seen
        await first.gone.wait()  # released at once
        assert rooms_of(first) != rooms_of(last)
        assert rooms_of(b.engines[0].seen[0]) == rooms_of(first)
        assert rooms_of(b.engines[1].seen[0]) == rooms_of(last)


@with_deadline
async def test_one_clear_error_when_no_prefill_engine_is_left() -> None:
    async with pair("ppd", limits=Limits(retries_max=0)) as b:
        for engine in b.engines[:2]:
            engine.behave = status(500)
        b.engines[2].behave = never
        answer = await b.ask("POST", CHAT, BODY)
        assert answer.status == 502
        assert b"answered 500 to the prefill" in answer.body
        await b.engines[2].seen[0].gone.wait()
    async with pair() as b:
        b.engines[0].behave, b.engines[1].behave = status(500), never
        answer = await b.ask("POST", CHAT, BODY)
        assert answer.status == 502
        assert b"answered 500 to the prefill, and no other healthy engine is left" in answer.body
        await b.engines[1].seen[0].gone.wait()


@with_deadline
@pytest.mark.parametrize("left", ["p", "d"])
async def test_neither_half_of_a_pair_answers_alone(left: str) -> None:

    def prepare(engines: list[Any]) -> None:
        engines["dp".index(left)].healthy = False

    async with pair("pd", prepare=prepare) as b:
        answer = await b.ask("POST", CHAT, BODY)
        who, of = ("decode", 0) if left == "p" else ("prefill", 1)
        assert answer.status == 503
        assert f"no healthy {who} engine is left for engine-{of}".encode() in answer.body
        assert b.metric("moonpool_proxy_rejected_total", reason="no_engine") == 1
        assert (await b.ask("POST", "/tokenize", b"{}")).status == 200


@with_deadline
async def test_a_decode_engine_that_fails_ends_its_prefill() -> None:
    async def cut(exchange: Exchange) -> None:
        exchange.cut()

    async with pair("pdd") as b:
        b.engines[0].behave, b.engines[1].behave = never, cut
        assert (await b.ask("POST", CHAT, BODY)).engine == "engine-2"
        first, last = b.engines[0].seen
        await first.gone.wait()
        assert rooms_of(first) != rooms_of(last)


@with_deadline
@pytest.mark.parametrize("done", [False, True], ids=["prefill at work", "prefill done"])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_decode_engine_that_waits_in_vain_is_asked_again(streams: bool, done: bool) -> None:
    """SGLang's hears of a prefill engine that is gone by itself, too: 500, or an event that says so. Once
    prefill has answered, it is decode's own failure."""

    async def fail(exchange: Exchange) -> None:
        if len(b.engines[2].seen) > 1:
            return await (stream(exchange) if streams else exchange.answer(b"{}"))
        await turned(lambda: b.proxy.relay.in_flight(0) == (not done))
        if not streams:
            return await exchange.answer(b'{"error":"KVTransferError"}', 500)
        await exchange.begin_stream()
        await exchange.event('{"error":{"message":"KVTransferError","code":500}}')
        await exchange.end_stream()

    async with pair("ppd") as b:
        b.engines[0].behave = saying({}) if done else never
        b.engines[1].behave, b.engines[2].behave = never, fail
        answer = await b.ask("POST", "/generate", b'{"text":"x","stream":%b}' % (b"false", b"true")[streams])
        assert answer.status == (500 if done and not streams else 200)
        assert (b"KVTransferError" in answer.body) == done
        assert b.engine(2).breaker_closed


@with_deadline
@pytest.mark.parametrize("policy", ["round_robin", "least_load", "prefix_affinity", "conductor"])
async def test_two_prefill_engines_are_no_pair(policy: str) -> None:

    def prepare(engines: list[Any]) -> None:
        engines[2].healthy = False

    async with pair("ppd", prepare=prepare, policy=policy) as b:
        answer = await b.ask("POST", COMPLETIONS, b'{"prompt":[1,2,3]}')
        assert answer.status == 503
        assert b"no healthy decode engine is left" in answer.body
        assert not any(engine.seen for engine in b.engines)


@with_deadline
@pytest.mark.parametrize("policy", ["round_robin", "least_load"])
async def test_a_decode_engine_that_fails_always_is_found_out(policy: str) -> None:
    """Its only prefill engine is well, as the other decode engine shows."""
    async with pair("pdd", policy=policy, breaker=BreakerLimits(failures_max=2, open_s=1e6)) as b:
        b.engines[0].behave, b.engines[1].behave = never, status(500)
        for _ in range(20):
            assert (await b.ask("POST", CHAT, BODY)).engine == "engine-2"
        assert not b.engine(1).breaker_closed
        assert b.engine(0).breaker_closed
        assert b.engine(2).breaker_closed
        assert 2 <= len(b.engines[1].seen) <= 5
        assert b.metric("moonpool_proxy_prefills_total", engine="engine-0", outcome="failed") == 0


@with_deadline
async def test_a_prefill_engine_with_which_nobody_gets_on_is_found_out() -> None:
    async with pair("ppd", breaker=BreakerLimits(failures_max=2, open_s=1e6)) as b:
        b.engines[0].behave = b.engines[1].behave = never

        async def decode(exchange: Exchange) -> None:
            with_first = any(rooms_of(each) == rooms_of(exchange) for each in b.engines[0].seen)
            await (exchange.answer(b"{}", 500) if with_first else exchange.answer(b"{}"))

        async def slowly(exchange: Exchange) -> None:  # prefill's half first
            room = rooms_of(exchange)
            halves = [engine.seen for engine in b.engines[:2]]
            await turned(lambda: any(rooms_of(each) == room for seen in halves for each in seen))
            await decode(exchange)

        b.engines[2].behave = slowly
        for _ in range(20):
            assert (await b.ask("POST", CHAT, BODY)).status == 200
        assert not b.engine(0).breaker_closed
        assert b.engine(1).breaker_closed
        assert b.engine(2).breaker_closed


@with_deadline
@pytest.mark.parametrize("bytes_", [40_000, 100_000])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_long_refusal_arrives_whole(streams: bool, bytes_: int) -> None:
    said = json.dumps({"error": {"message": "x" * bytes_, "code": 400}}).encode()

    async def in_stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event(said.decode())
        await exchange.event("[DONE]")
        await exchange.end_stream()

    async with pair() as b:
        b.engines[0].behave = in_stream if streams else status(400, said)
        b.engines[1].behave = never
        answer = await b.ask("POST", CHAT, STREAM)
        if streams:
            assert answer.body.startswith(b"data: " + said + b"\n\n")
        else:
            assert (answer.status, answer.body) == (400, said)


@with_deadline
async def test_a_second_prefill_that_cannot_be_reached_fails_at_once() -> None:
    """Decode's head has come in the attempt before."""

    async def fail(exchange: Exchange) -> None:
        await turned(lambda: bool(b.engines[0].seen))
        b.proxy.relay.engine_address(1, "255.255.255.255", 9)  # where nobody can be
        await exchange.answer(b"{}", 500)

    async with pair("ppd", limits=Limits(retries_max=1)) as b:
        b.engines[0].behave, b.engines[2].behave = never, fail
        assert (await b.ask("POST", CHAT, BODY)).status == 502


@with_deadline
async def test_a_client_that_leaves_ends_both() -> None:
    async with pair() as b:
        for engine in b.engines:
            engine.behave = never
        client = await b.client()
        await client.request("POST", CHAT, BODY)
        await turned(lambda: all(engine.seen for engine in b.engines))
        client.leave()
        for engine in b.engines:
            await engine.seen[0].gone.wait()


@with_deadline
async def test_prefills_answer_is_drained_whatever_its_size() -> None:
    async def large(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for _ in range(64):
            await exchange.event("x" * 65536)
        await exchange.event('{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}')
        await exchange.end_stream()

    async with pair(internals=Internals(prefill_answer_bytes_max=1000)) as b:
        b.engines[0].behave = large
        done = lambda: b.metric(  # noqa: E731
            "moonpool_proxy_prefills_total", engine="engine-0", outcome="handed_over"
        )

        async def when_done(exchange: Exchange) -> None:
            await turned(lambda: done() == 1)
            await exchange.answer(b"{}")

        b.engines[1].behave = when_done
        assert (await b.ask("POST", CHAT, STREAM)).status == 200
