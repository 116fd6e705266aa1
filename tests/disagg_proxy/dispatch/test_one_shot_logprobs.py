"""Logprobs of the prompt, which prefill alone knows, go into decode's answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from moonpool.core.config.proxy_section import Limits
from moonpool.disagg_proxy.settings import Internals
from tests.disagg_proxy.dispatch.one_shot_bed import (
    CHAT,
    never,
    pair,
    saying,
    status,
)
from tests.disagg_proxy.harness import Answer, Bed, Exchange, with_deadline
from tests.disagg_proxy.harness import until as turned

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
