"""SGLang's form of a hand-over: both engines get the same request at once, and meet in a room. First with
engines whose every byte is scripted, then with mock engines. The real one stands in test_with_sglang.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from moonpool.core.config.proxy_section import BreakerLimits, Deadlines, HealthChecks, Limits
from moonpool.disagg_proxy.engines import health
from moonpool.disagg_proxy.engines.engine import Engine
from moonpool.disagg_proxy.engines.sglang import (
    PROMPTS_MAX,
    BootstrapAddress,
    BootstrapRoomIds,
    ServerInfo,
    read_server_info,
)
from moonpool.disagg_proxy.settings import EngineSpec, Internals, ProxySettings
from moonpool.disagg_proxy.tools.mock_engine.server import MockEngine
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings
from tests.disagg_proxy.dispatch.test_handovers import (
    PROMPT,
    SELDOM,
    SLOW_PREFILL,
    check,
    engine_of,
    metrics_of,
    prefill_takes,
    text_for,
    until,
)
from tests.disagg_proxy.harness import Answer, Bed, Behaviour, Exchange, bed, with_deadline
from tests.disagg_proxy.harness import until as turned
from tests.disagg_proxy.test_fleet import Fleet, fleet, play, text_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY = b'{"model":"m","stream":false,"top_k":3,"max_tokens":7, "messages":[]}'
STREAM = b'{"model":"m","stream":true,"messages":[]}'
NAMES = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


async def never(exchange: Exchange) -> None:
    await exchange.gone.wait()


async def stream(exchange: Exchange) -> None:
    await exchange.begin_stream()
    for text in ("a", "b"):
        await exchange.event(text)
    await exchange.end_stream()


def status(code: int, body: bytes = b'{"error":"x"}', kind: str = "application/json") -> Behaviour:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(body, code, kind)

    return answer


def saying(value: object) -> Behaviour:
    return status(200, json.dumps(value).encode())


@asynccontextmanager
async def pair(roles: str = "pd", **more: Any) -> AsyncIterator[Bed]:
    """One engine for each letter: p(refill), d(ecode). They have no page: the setting says what they are."""
    names = {"p": "prefill", "d": "decode"}
    more.setdefault("handover", "one_shot")
    async with bed(len(roles), roles=[names[letter] for letter in roles], **more) as b:
        yield b


def rooms_of(exchange: Exchange) -> Any:
    return json.loads(exchange.body)["bootstrap_room"]


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
    bootstrap_server, rooms = BootstrapAddress("::1", 9000), BootstrapRoomIds()
    seen = [json.loads(dict(bootstrap_server.members(rooms, None))[b"bootstrap_room"]) for _ in range(1000)]
    seen += json.loads(dict(bootstrap_server.members(rooms, 1000))[b"bootstrap_room"])
    assert len(set(seen)) == 2000
    assert all(0 <= room < 1 << 63 for room in seen)
    assert seen[0] != BootstrapRoomIds().take()
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


# Logprobs of the prompt


def generated(text: str, of_prompt: Any, index: int | None = None) -> dict[str, Any]:
    meta = {"id": "x", "prompt_tokens": 3, "cached_tokens": 1, "input_token_logprobs": of_prompt}
    answer = {"text": text, "meta_info": {**meta, "completion_tokens": 2, "input_top_logprobs": None}}
    return answer if index is None else {**answer, "index": index}


OURS, THEIRS = [[-1.5, 7, None], [-0.25, 8, "x]"]], [[-2.0, 9, None]]


@with_deadline
@pytest.mark.parametrize("order", ["prefill first", "decode first"])
@pytest.mark.parametrize(
    ("prefill", "decode", "wanted"),
    [
        (generated("p", OURS), generated("d", THEIRS), generated("d", OURS + THEIRS)),
        (generated("p", OURS), generated("d", []), generated("d", OURS)),
        (generated("p", []), generated("d", []), generated("d", [])),
        (generated("p", OURS), generated("d", None), generated("d", None)),
        ({"odd": 1}, generated("d", THEIRS), generated("d", THEIRS)),
        (generated("p", OURS), {"odd": [1]}, {"odd": [1]}),
        (
            [generated("p", OURS), generated("p", THEIRS)],
            [generated("d", []), generated("e", [])],
            [generated("d", OURS), generated("e", THEIRS)],
        ),
    ],
)
async def test_the_prompts_logprobs_go_in_front(prefill: Any, decode: Any, wanted: Any, order: str) -> None:
    async with pair() as b:
        last, first = b.engines if order == "decode first" else reversed(b.engines)

        async def wait(exchange: Exchange) -> None:
            await turned(lambda: bool(first.seen))
            while b.proxy.relay.in_flight(b.engines.index(first)) and last is b.engines[1]:
                await asyncio.sleep(0)
            await exchange.answer(json.dumps(prefill if last is b.engines[0] else decode).encode())

        last.behave = wait
        first.behave = saying(decode if last is b.engines[0] else prefill)
        answer = await b.ask("POST", "/generate", b'{"text":"x","return_logprob":true}')
        assert (answer.status, answer.engine) == (200, "engine-1")
        assert json.loads(answer.body) == wanted


@with_deadline
@pytest.mark.parametrize("http_1_0", [False, True])
@pytest.mark.parametrize("batch", [False, True])
async def test_they_go_into_each_event_of_a_stream(batch: bool, http_1_0: bool) -> None:
    places = (1, 0) if batch else (None,)

    async def prefill(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for place in places:
            await exchange.event(json.dumps(generated("p", [[place, 1, None]], place)))
        await exchange.event("[DONE]")
        await turned(lambda: bool(b.engines[1].seen))
        await exchange.end_stream()

    async def decode(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for text in ("d", "de"):
            for place in reversed(places):
                event = f"data: {json.dumps(generated(text, THEIRS, place))}\n\n".encode()
                for half in (event[:20], event[20:]):
                    await exchange.send(b"%x\r\n%b\r\n" % (len(half), half))
        await exchange.event("[DONE]")
        await exchange.end_stream()

    async with pair() as b:
        b.engines[0].behave, b.engines[1].behave = prefill, decode
        body = b'{"text":"x","stream":true,"return_logprob":true}'
        answer = await (ask_as_http_1_0(b, body) if http_1_0 else b.ask("POST", "/generate", body))
        events = [line[6:] for line in answer.body.split(b"\n\n") if line]
        assert events.pop() == b"[DONE]"
        assert [json.loads(event) for event in events] == [
            generated(text, [[place, 1, None], *THEIRS], place)
            for text in ("d", "de")
            for place in reversed(places)
        ]


async def ask_as_http_1_0(b: Bed, body: bytes) -> Answer:
    client = await b.client()
    head = b"POST /generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    await client.send(head + body)
    return await client.answer()


@with_deadline
async def test_a_prefill_that_dies_while_decodes_answer_waits_for_it() -> None:
    async def die(exchange: Exchange) -> None:
        await turned(lambda: len(b.engines[2].seen) == 1)
        while b.metric("moonpool_proxy_upstream_connections", engine="engine-2") == 0:
            await asyncio.sleep(0)
        exchange.cut()

    async with pair("ppd") as b:
        b.engines[0].behave = die
        b.engines[1].behave = saying(generated("p", OURS))
        b.engines[2].behave = saying(generated("d", []))
        answer = await b.ask("POST", "/generate", b'{"text":"x","return_logprob":true}')
        assert json.loads(answer.body) == generated("d", OURS)


@with_deadline
@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, b'{"logprobs":true,"messages":[]}'), ("/generate", b'{"return_logprob":false}')]
)
async def test_other_answers_pass_as_they_come(path: str, body: bytes) -> None:
    async with pair() as b:
        b.engines[0].behave = never
        b.engines[1].behave = saying(generated("d", THEIRS))
        assert json.loads((await b.ask("POST", path, body)).body) == generated("d", THEIRS)


@with_deadline
async def test_an_error_of_decode_is_not_merged() -> None:
    async with pair() as b:
        b.engines[0].behave, b.engines[1].behave = never, status(400)
        answer = await b.ask("POST", "/generate", b'{"text":"x","return_logprob":true}')
        assert (answer.status, answer.body) == (400, b'{"error":"x"}')


LOGPROBS = b'{"text":"x","stream":true,"return_logprob":true}'


@with_deadline
@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_too_many_logprobs_are_no_engines_fault(who: str) -> None:
    large = saying(generated("x" * 5000, OURS))
    async with pair("ppdd", internals=Internals(prefill_answer_bytes_max=4000)) as b:
        for engine in b.engines:
            engine.behave = never
        for engine in b.engines[:2] if who == "prefill" else b.engines[2:]:
            engine.behave = large
        for _ in range(6):
            answer = await b.ask("POST", "/generate", b'{"text":"x","return_logprob":true}')
            assert answer.status == 502
            assert b"logprob_start_len" in answer.body
        assert sum(len(engine.seen) for engine in b.engines[:2]) == 6
        assert all(b.engine(place).breaker_closed for place in range(4))


@with_deadline
async def test_a_slow_client_holds_up_a_merged_stream() -> None:
    """Each event has the prompt's logprobs anew: they are made as the client takes them."""
    of_prompt = [[-1.5, token, "x" * 50] for token in range(2000)]
    count = 300

    async def prefill(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event(json.dumps(generated("p", of_prompt)))
        await exchange.end_stream()

    async def decode(exchange: Exchange) -> None:
        await turned(lambda: b.proxy.relay.in_flight(0) == 0)
        await exchange.begin_stream()
        events = b"".join(b"data: %b\n\n" % json.dumps(generated(str(n), [])).encode() for n in range(count))
        await exchange.send(b"%x\r\n%b\r\n" % (len(events), events))
        await exchange.end_stream()

    async with pair(limits=Limits(write_buffer_bytes_max=65536)) as b:
        b.engines[0].behave, b.engines[1].behave = prefill, decode
        client = await b.client()
        await client.request("POST", "/generate", LOGPROBS)
        await turned(lambda: b.connection()["write_paused"] == 1)
        assert b.connection()["unwritten"] < 1 << 20
        answer = await client.answer()
        events = [json.loads(line[6:]) for line in answer.body.split(b"\n\n") if line]
        assert [event["text"] for event in events] == [str(n) for n in range(count)]
        assert all(event["meta_info"]["input_token_logprobs"] == of_prompt for event in events)


@with_deadline
async def test_a_client_that_leaves_a_merged_stream_ends_it() -> None:
    async def decode(exchange: Exchange) -> None:
        await exchange.begin_stream()
        while not exchange.gone.is_set():
            await exchange.event(json.dumps(generated("d", THEIRS)))
            await asyncio.sleep(0)

    async with pair(limits=Limits(write_buffer_bytes_max=4096)) as b:
        b.engines[0].behave, b.engines[1].behave = saying(generated("p", OURS * 1000)), decode
        client = await b.client()
        await client.request("POST", "/generate", LOGPROBS)
        await client.head()
        client.leave()
        await b.engines[1].seen[0].gone.wait()


# What engines are


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"[]",
        b"{}",
        b'{"disaggregation_mode":3}',
        b'{"disaggregation_mode":null}',
        b'{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":70000}',
    ],
)
def test_other_pages_say_nothing(page: bytes) -> None:
    assert read_server_info(page) is None


@with_deadline
async def test_a_bootstrap_server_may_be_named() -> None:
    """The option is believed rather than the page: an engine does not know how others reach it."""
    page = b'{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":9001,"more":[1]}'
    for given, host, port in (("", "127.0.0.1", 9001), ("7000", "127.0.0.1", 7000), ("p.x:1", "p.x", 1)):
        async with bed(2, roles=["prefill", "decode"], handover="auto", prepare=paged(page)) as b:
            engine = b.proxy.engines[0]
            engine.spec = replace(engine.spec, bootstrap=given)
            engine.sglang = None
            await health.HealthChecker(engine, HealthChecks()).check()
            await b.ask("POST", CHAT, BODY)
            told = json.loads(b.engines[1].seen[0].body)
            assert (told["bootstrap_host"], told["bootstrap_port"]) == (host, port)


def paged(page: bytes) -> Callable[[list[Any]], None]:
    def prepare(engines: list[Any]) -> None:
        engines[0].pages["/server_info"] = page
        engines[1].pages["/server_info"] = b'{"disaggregation_mode":"decode"}'

    return prepare


@with_deadline
async def test_a_role_that_the_engine_denies_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    page = b'{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":9001}'
    async with bed(2, roles=["decode", "prefill"], handover="auto", prepare=paged(page)) as b:
        assert [engine.role for engine in b.proxy.engines] == ["prefill", "decode"]
        assert (await b.ask("POST", CHAT, BODY)).engine == "engine-1"
        rows = json.loads((await b.ask("GET", "/engines")).body)["engines"]
        assert [row["role"] for row in rows] == ["prefill", "decode"]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("was given as" in line for line in said) == 2


@with_deadline
async def test_two_steps_ask_for_no_page() -> None:
    page = b'{"disaggregation_mode":"prefill"}'
    async with bed(2, roles=["prefill", "decode"], handover="two_step", prepare=paged(page)) as b:
        await b.ask("POST", CHAT, BODY)
        assert "bootstrap_room" not in json.loads(b.engines[1].seen[0].body)


@with_deadline
async def test_sglangs_health_check_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HEALTH_S", 10.0)
    checks = HealthChecks(interval_s=1e6, timeout_s=0.05)
    async with bed(2, roles=["prefill", "decode"], handover="one_shot", health=checks) as b:
        engine = b.proxy.engines[0]

        async def slow(address: Any, path: str, connect_s: float = 0.0, *, key: str = "") -> Any:
            await asyncio.sleep(0.2 if path == "/health" else 0)  # more than timeout_s
            return 200, b"", engine.address

        monkeypatch.setattr(health, "_get", slow)
        for sglang, lates in ((True, 0), (False, 1)):
            engine.sglang = engine.waits = sglang
            await health.HealthChecker(engine, checks).check()
            assert engine.liveness.timeouts == lates


# With mock engines, which find out by themselves what they are


def test_engines_say_what_they_are() -> None:
    async def scenario() -> None:
        async with fleet("prefill", "prefill", "decode", handover="one_shot") as f:
            assert [engine.role for engine in f.proxy.engines] == ["prefill", "prefill", "decode"]
            ports = [engine.bootstrap_server and engine.bootstrap_server.port for engine in f.proxy.engines]
            assert ports == [f.engines["prefill-0"].port, f.engines["prefill-1"].port, None]
            for prompt in ("short", PROMPT):  # a decode engine computes none
                answer, why = await f.ask(prompt)
                assert why["handover"] == "one_shot"
                assert text_of(answer) == text_for(prompt)
            await f.settle()

    play(scenario)


def test_plain_engines_need_nobody() -> None:
    async def scenario() -> None:
        async with fleet("both", "both", handover="one_shot") as f:
            answer, why = await f.ask(PROMPT)
            assert (text_of(answer), why["handover"]) == (text_for(PROMPT), None)
            counted = await metrics_of(f)
            assert not any(name.startswith("moonpool_proxy_handover") for name in counted)

    play(scenario)


def test_an_engine_that_comes_back_may_be_another() -> None:
    async def scenario() -> None:
        often = HealthChecks(interval_s=0.02)
        async with fleet("prefill", "decode", "decode", handover="one_shot", health=often) as f:
            old = f.engines["decode-1"]
            await old.close()
            await until(lambda: not f.proxy.engines[1].liveness.healthy)
            new = MockEngine(replace(old.settings, port=old.port, sglang="prefill"))
            await new.open()
            try:
                await until(lambda: f.proxy.engines[1].role == "prefill")
                first = engine_of(f, "prefill")
                await first.close()
                await until(lambda: not f.proxy.engines[0].liveness.healthy)
                answer, why = await f.ask(PROMPT)
                assert (why["prefill"], why["engine"]) == ("decode-1", "decode-2")
                assert text_of(answer) == text_for(PROMPT)
            finally:
                await new.close()

    play(scenario)


@pytest.mark.parametrize("prompt", [{"text": PROMPT}, {"input_ids": [7] * 1_000}], ids=["text", "ids"])
def test_generate_goes_where_its_prefix_lies(prompt: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with fleet("prefill", "prefill", "decode", handover="one_shot", events=True) as f:
            body = {**prompt, "sampling_params": {"max_new_tokens": 3}}
            seen = []
            for _ in range(3):
                headers = {"X-Moonpool-Decision": "1"}
                async with f.session.post(f.url + "/generate", json=body, headers=headers) as answer:
                    assert answer.status == 200
                    seen.append((json.loads(answer.headers["X-Moonpool-Decision"]), await answer.json()))
                await f.settle()
                await f.hear()
            assert len({why["prefill"] for why, _ in seen}) == 1
            for turn, (why, content) in enumerate(seen):
                meta = content["meta_info"]
                tokens = meta["prompt_tokens"]
                assert why["prompt_tokens"] == tokens
                assert meta["completion_tokens"] == 3
                assert (why["own_tokens"] > tokens - 32) == (turn > 0)
            watches = f.proxy._dispatcher.scheduler.inflight.watches.values()
            assert sum(watch.reports for watch in watches) == 3
            assert sum(watch.wrong for watch in watches) == 0

    play(scenario)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_prefill_engine_that_dies_while_decode_waits(path: str, streams: bool) -> None:
    """Another one is taken, at once; when there is none, the client is told so, and nothing stays behind."""

    async def scenario() -> None:
        mock = MockSettings(lease_s=30.0)
        async with fleet("prefill", "prefill", "decode", handover="one_shot", mock=mock, health=SELDOM) as f:
            decode = engine_of(f, "decode")
            prefills = [f.engines["prefill-0"], f.engines["prefill-1"]]
            for left in (1, 0):
                prefill_takes(prefills, 1e-2)
                prompt = f"{left} {PROMPT}"  # a cached one takes no time
                body = {"prompt": prompt, "text": prompt, "max_tokens": 4, "stream": streams}
                asking = asyncio.ensure_future(asked(f, path, body))
                await until(lambda: any(e.batch.running for e in prefills) and bool(decode.batch.running))
                dying = next(engine for engine in prefills if engine.batch.running)
                prefill_takes(prefills, 1e-4)
                await dying.close()
                status, content = await asking
                assert status == (200 if left else 502), content
                assert (b"no other healthy engine is left" in content) != bool(left)
                await until(lambda: decode.accounts()["blocks_held"] == decode.accounts()["running"] == 0)

    play(scenario)


async def asked(f: Fleet, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with f.session.post(f.url + path, json=body) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs_are_those_of_one_engine(streams: bool) -> None:
    async def scenario() -> None:
        body = {
            "text": PROMPT,
            "sampling_params": {"max_new_tokens": 3},
            "return_logprob": True,
            "stream": streams,
        }
        async with (
            fleet("prefill", "decode", handover="one_shot") as f,
            fleet("both", handover="one_shot") as plain,
        ):
            found = [values_of((await asked(each, "/generate", body))[1]) for each in (f, plain)]
            for apart, together in zip(*found, strict=True):
                for value in (apart, together):
                    del value["meta_info"]["id"]
                assert apart == together
                assert len(apart["meta_info"]["input_token_logprobs"]) == apart["meta_info"]["prompt_tokens"]
            await f.settle()

    play(scenario)


def values_of(content: bytes) -> list[dict[str, Any]]:
    if not content.startswith(b"data:"):
        return [json.loads(content)]
    return [json.loads(line[6:]) for line in content.split(b"\n\n") if line.startswith(b"data: {")]


def test_a_prefill_engine_that_refuses_releases_decode() -> None:
    async def scenario() -> None:
        mock = MockSettings(timing=SLOW_PREFILL, lease_s=30.0)
        async with fleet("prefill", "decode", handover="one_shot", mock=mock, health=SELDOM) as f:
            decode = engine_of(f, "decode")
            for status, told in ((400, 400), (422, 422), (500, 502), (503, 502)):
                engine_of(f, "prefill").faults = {"status": status}
                assert (await asked(f, "/v1/completions", {"prompt": PROMPT}))[0] == told
                await until(lambda: not decode.accounts()["blocks_held"])
            engine_of(f, "prefill").faults = {}
            f.proxy.relay.advance_clock_for_test(10.0)  # its breaker rests
            await check(f)
            assert text_of((await f.ask(PROMPT))[0]) == text_for(PROMPT)
            await f.settle()

    play(scenario)


def test_configured_engines_need_no_page() -> None:
    """An engine behind a key of its own shows none."""

    async def scenario() -> None:
        from moonpool.disagg_proxy.server import Proxy
        from moonpool.disagg_proxy.settings import ProxySettings

        async with fleet("prefill", "decode", handover="one_shot", health=SELDOM) as f:
            prefill, decode = engine_of(f, "prefill"), engine_of(f, "decode")
            for engine in (prefill, decode):
                engine.faults = {"status": 401}
            specs = (
                EngineSpec("p", f"http://127.0.0.1:{prefill.port}", "prefill", str(prefill.port)),
                EngineSpec("d", f"http://127.0.0.1:{decode.port}", "decode"),
            )
            proxy = Proxy(ProxySettings(port=0, engines=specs, handover="one_shot", health=SELDOM))
            try:
                url = await proxy.open()
                for engine in (prefill, decode):
                    engine.faults = {}
                body = {"model": "mock", "prompt": PROMPT, "max_tokens": 4}
                async with f.session.post(url + "/v1/completions", json=body) as answer:
                    assert text_of(await answer.json()) == text_for(PROMPT)
            finally:
                await proxy.close()

    play(scenario)


@with_deadline
async def test_an_engine_is_not_used_before_it_has_said_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HEALTH_S", 0.1)
    asked: list[str] = []

    async def late(address: Any, path: str, connect_s: float = 0.0, *, key: str = "") -> Any:
        asked.append(path)
        if path == "/server_info":
            await asyncio.sleep(1e6)
        return 200, b"", address

    monkeypatch.setattr(health, "_get", late)
    checks = HealthChecks(interval_s=1e6, timeout_s=0.05)
    async with bed(1, handover="auto", health=checks) as b:
        engine = b.proxy.engines[0]
        assert asked.count("/server_info") == 1
        assert not engine.liveness.healthy
        assert "/server_info" in engine.liveness.why
        assert (await b.ask("POST", CHAT, BODY)).status == 503


@with_deadline
async def test_sglangs_engine_keeps_its_patience_when_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HEALTH_S", 10.0)
    page = b'{"disaggregation_mode":"prefill"}'
    checks = HealthChecks(interval_s=1e6, timeout_s=0.5)
    async with bed(2, roles=["prefill", "decode"], handover="auto", prepare=paged(page)) as b:
        engine = b.proxy.engines[0]
        engine.refused("GET /health was answered with 503")
        assert not engine.liveness.healthy
        real = health._get

        async def slow(address: Any, path: str, connect_s: float | None = None, *, key: str = "") -> Any:
            await asyncio.sleep(1.0 if path == "/health" else 0)  # more than timeout_s
            return await real(address, path, connect_s)

        monkeypatch.setattr(health, "_get", slow)
        await health.HealthChecker(engine, checks).check()
        assert engine.liveness.healthy

        async def busy(address: Any, path: str, connect_s: float | None = None, *, key: str = "") -> Any:
            await asyncio.sleep(1.0)
            return 503, b"", address

        monkeypatch.setattr(health, "_get", busy)  # its scheduler has said nothing: one late check, no more
        await health.HealthChecker(engine, checks).check()
        assert engine.liveness.healthy
        assert engine.liveness.timeouts == 1


@with_deadline
async def test_a_bootstrap_server_on_this_host_alone_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    specs = (
        EngineSpec("p", "http://localhost:1", role="prefill"),
        EngineSpec("d", "http://10.0.0.1:1", role="decode"),
    )
    engine = Engine(0, specs[0], ProxySettings(engines=specs))
    for _ in range(2):
        engine.set_server_info(ServerInfo("prefill", 9000))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("waits in vain" in line for line in said) == 1


@with_deadline
async def test_engines_of_two_kinds_are_no_pair() -> None:
    def prepare(engines: list[Any]) -> None:
        engines[1].pages["/server_info"] = b'{"disaggregation_mode":"decode"}'

    async with bed(2, roles=["prefill", "decode"], handover="auto", prepare=prepare) as b:
        answer = await b.ask("POST", CHAT, BODY)
        assert answer.status == 503
        assert b"engine-1 is SGLang's, and its prefill engine engine-0 is not" in answer.body
        assert not any(engine.seen for engine in b.engines)
