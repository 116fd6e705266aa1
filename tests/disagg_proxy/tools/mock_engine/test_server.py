"""Mock engines over real sockets: the API, both PD forms, accounts that return to nothing, KV events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.mock_engine.server import MockEngine
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings, Timing

DEADLINE_S = 20.0
BODY = {"model": "mock", "prompt": "x" * 400, "max_tokens": 5}
SLOW = Timing(step_s=30.0)
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_host": None,
}


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(bounded())


@asynccontextmanager
async def engine(**settings: Any) -> AsyncIterator[tuple[MockEngine, str]]:
    made = MockEngine(replace(MockSettings(port=0), **settings))
    url = await made.open()
    try:
        yield made, url
    finally:
        await made.close()


async def post(url: str, body: object, path: str = "/v1/completions") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session, session.post(url + path, data=data) as answer:
        return answer.status, json.loads(await answer.read())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def is_clean(mock: MockEngine) -> bool:
    accounts = mock.accounts()
    return not any(accounts[name] for name in ("waiting", "running", "blocks_held", "leases"))


def test_the_same_prompt_has_the_same_answer_everywhere_and_is_cached() -> None:
    async def scenario() -> None:
        async with engine() as (mock, url), engine() as (_, other):
            first, again, elsewhere = await post(url, BODY), await post(url, BODY), await post(other, BODY)
            assert first[0] == 200
            text = first[1]["choices"][0]["text"]
            assert text == again[1]["choices"][0]["text"] == elsewhere[1]["choices"][0]["text"]
            assert len(text.split()) == 5
            assert first[1]["usage"]["prompt_tokens"] == 100
            assert again[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
            other_prompt = await post(url, {**BODY, "prompt": "y" * 400})
            assert other_prompt[1]["choices"][0]["text"] != text
            assert is_clean(mock)

    play(scenario)


def test_a_stream_says_what_the_whole_answer_says() -> None:
    async def scenario() -> None:
        async with engine() as (_, url), aiohttp.ClientSession() as session:
            chat = {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            _, whole = await post(url, chat, "/v1/chat/completions")
            streamed = {**chat, "stream": True, "stream_options": {"include_usage": True}}
            async with session.post(url + "/v1/chat/completions", json=streamed) as answer:
                events = [line[6:] for line in (await answer.read()).split(b"\n\n") if line]
            assert events[-1] == b"[DONE]"
            pieces = [json.loads(event) for event in events[:-1]]
            text = "".join(piece["choices"][0]["delta"]["content"] for piece in pieces if piece["choices"])
            assert text == whole["choices"][0]["message"]["content"]
            assert pieces[-1]["usage"]["completion_tokens"] == 4

    play(scenario)


def test_the_two_step_form_hands_the_prompt_over_and_ends_the_lease() -> None:
    async def scenario() -> None:
        async with engine() as (prefill, p_url), engine() as (decode, d_url):
            plain = (await post(d_url, {**BODY, "prompt": "z" * 400}))[1]["choices"][0]["text"]
            await post(d_url, {}, "/reset_prefix_cache")
            asked = {**BODY, "prompt": "z" * 400, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
            params = (await post(p_url, asked))[1]["kv_transfer_params"]
            assert prefill.accounts()["leases"] == 1
            _, answer = await post(d_url, {**BODY, "prompt": "z" * 400, "kv_transfer_params": params})
            assert answer["choices"][0]["text"] == plain
            assert decode.counts["fetched_tokens"] >= 99
            assert is_clean(prefill)
            assert is_clean(decode)

    play(scenario)


def test_the_concurrent_form_takes_both_at_once_in_either_order() -> None:
    async def scenario() -> None:
        async with (
            engine() as (prefill, p_url),
            engine() as (decode, d_url),
            aiohttp.ClientSession() as session,
        ):
            async with session.get(p_url + "/query") as page:
                engine_id = (await page.json())["0"]["engine_id"]
            for number in range(4):
                prompt = chr(97 + number) * 400
                to_p = {**BODY, "prompt": prompt, "max_tokens": 1}
                to_p["kv_transfer_params"] = {"do_remote_decode": True, "transfer_id": f"x{number}"}
                to_d = {**BODY, "prompt": prompt}
                to_d["kv_transfer_params"] = {
                    "do_remote_prefill": True,
                    "transfer_id": f"x{number}",
                    "remote_bootstrap_addr": p_url,
                    "remote_engine_id": engine_id,
                }
                bodies = [(p_url, to_p), (d_url, to_d)]
                answers = await asyncio.gather(*(post(*pair) for pair in bodies[:: 1 if number % 2 else -1]))
                assert [status for status, _ in answers] == [200, 200]
            assert decode.counts["fetched_tokens"] >= 4 * 99
            assert decode.counts["failed_fetches"] == 0
            assert is_clean(prefill)

    play(scenario)


def test_a_concurrent_prefill_that_is_aborted_or_another_engines_lets_decode_go_on() -> None:
    async def scenario() -> None:
        long = {"prompt": "y" * 4_000, "max_tokens": 1}
        async with (
            engine(timing=Timing(prefill_s_per_token=1e-2), lease_s=15.0) as (prefill, p_url),
            engine(lease_s=15.0) as (decode, d_url),
            aiohttp.ClientSession() as session,
        ):
            gives = {"do_remote_decode": True, "transfer_id": "t"}
            asking = asyncio.ensure_future(
                session.post(p_url + "/v1/completions", json={**BODY, **long, "kv_transfer_params": gives})
            )
            takes = {"do_remote_prefill": True, "transfer_id": "t", "remote_bootstrap_addr": p_url}
            takes["remote_engine_id"] = prefill.engine_id
            decoding = asyncio.ensure_future(post(d_url, {**BODY, **long, "kv_transfer_params": takes}))
            await until(lambda: bool(prefill.leases._waiters) and bool(prefill.batch.running))
            asking.cancel()
            assert (await decoding)[0] == 200
            takes["remote_engine_id"] = "who it was before"
            prompt = {**long, "prompt": "z" * 400}
            assert (await post(d_url, {**BODY, **prompt, "kv_transfer_params": takes}))[0] == 200
            assert decode.counts["failed_fetches"] == 2
            assert is_clean(decode)
            await until(lambda: is_clean(prefill))

    play(scenario)


def test_one_transfer_id_for_two_requests_is_given_once() -> None:
    async def scenario() -> None:
        async with engine() as (mock, url):
            gives = {"do_remote_decode": True, "transfer_id": "twin"}
            bodies = [{**BODY, "prompt": letter * 400, "kv_transfer_params": gives} for letter in "ab"]
            answers = await asyncio.gather(*(post(url, body) for body in bodies))
            assert [status for status, _ in answers] == [200, 200]
            assert mock.accounts()["leases"] == 1
            wanted = {"id": "twin", "engine_id": mock.engine_id}
            assert await post(url, wanted, "/mock/handover") == (200, {"tokens": 100})
            assert is_clean(mock)

    play(scenario)


def test_a_lease_that_nobody_asks_for_ends() -> None:
    async def scenario() -> None:
        async with engine(lease_s=0.05) as (mock, url):
            await post(url, {**BODY, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE})
            await until(lambda: is_clean(mock))
            assert mock.leases.expired == 1

    play(scenario)


def test_a_dead_prefill_engine_costs_a_recompute() -> None:
    async def scenario() -> None:
        async with engine(lease_s=0.2) as (mock, url):
            plain = (await post(url, BODY))[1]["choices"][0]["text"]
            params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}
            params["remote_request_id"] = "gone"
            status, answer = await post(url, {**BODY, "kv_transfer_params": params})
            assert (status, answer["choices"][0]["text"]) == (200, plain)
            assert mock.counts["failed_fetches"] == 1
            assert is_clean(mock)

    play(scenario)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_frees_everything(streams: bool) -> None:
    async def scenario() -> None:
        async with engine(timing=SLOW) as (mock, url), aiohttp.ClientSession() as session:
            asks = [
                asyncio.ensure_future(session.post(f"{url}/v1/completions", json={**BODY, "stream": streams}))
                for _ in range(3)
            ]
            await until(lambda: mock.counts["requests"] == 3)
            assert not is_clean(mock)
            for ask in asks:
                ask.cancel()
            await session.close()
            await until(lambda: is_clean(mock))
            assert mock.counts["aborted"] == 3

    play(scenario)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"prompt": ""}', 400),
        (b'{"prompt": [1, -1]}', 400),
        (b'{"prompt": ["a", "b"]}', 400),
        (b'{"prompt": "x", "max_tokens": 0}', 200),
        (b'{"prompt": "x", "max_tokens": -1}', 400),
        (b'{"prompt": "x", "model": "other"}', 404),
        (b'{"prompt": "x", "max_tokens": 100000}', 400),
        (b'{"prompt": [[1, 2, 3]]}', 200),
    ],
)
def test_bad_requests_get_one_sentence(body: bytes, status: int) -> None:
    async def scenario() -> None:
        async with engine() as (mock, url):
            answer = await post(url, body)
            assert answer[0] == status
            assert status == 200 or answer[1]["error"]["message"]
            assert is_clean(mock)

    play(scenario)


def test_faults_happen_when_asked_for() -> None:
    async def scenario() -> None:
        async with engine() as (_, url):
            await post(url, {"status": 500}, "/mock/faults")
            assert (await post(url, BODY))[0] == 500
            await post(url, {"cut": True}, "/mock/faults")
            with pytest.raises(aiohttp.ClientError):
                await post(url, BODY)
            await post(url, {}, "/mock/faults")
            assert (await post(url, BODY))[0] == 200

    play(scenario)


def test_what_is_stored_and_removed_is_published_and_replayed() -> None:
    import msgspec
    import zmq
    import zmq.asyncio

    async def scenario() -> None:
        endpoints = {"events": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*"}
        async with engine(blocks=8, **endpoints) as (mock, url):
            await post(url, {**BODY, "prompt": "a" * 256, "max_tokens": 1})
            await post(url, {**BODY, "prompt": "b" * 256, "max_tokens": 1})
            context = zmq.asyncio.Context()
            dealer = context.socket(zmq.DEALER)
            dealer.connect(mock.endpoints[1])
            await dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            held: list[int] = []
            while (frames := await dealer.recv_multipart())[3]:
                for event in msgspec.msgpack.decode(frames[3])[1]:
                    for value in event["block_hashes"]:
                        (held.append if event["type"] == "BlockStored" else held.remove)(value)
                    if event["type"] == "BlockStored":
                        assert len(event["token_ids"]) == event["block_size"] == 16
            assert len(held) == mock.accounts()["blocks_cached"]
            dealer.close(linger=0)
            context.term()

    play(scenario)


def test_an_address_in_use_is_one_sentence() -> None:
    async def scenario() -> None:
        async with engine() as (mock, _):
            with pytest.raises(ConfigError, match="--port"):
                await MockEngine(MockSettings(port=mock.port)).open()

    play(scenario)
