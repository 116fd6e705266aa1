"""TensorRT-LLM's form of a hand-over in which both servers are asked at once, with servers whose every byte
is scripted: the fields are those of its OpenAI server. No real one was run: it needs a GPU. What every form
has to do stands in test_handovers.py and test_fleet.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moonpool.core.config.proxy_section import HealthChecks
from moonpool.disagg_proxy.engines.tensorrt_llm import read_server_info, transfer_ids
from tests.disagg_proxy.harness import Answer, Bed, Exchange, MockEngine, bed, until, with_deadline

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOLD = {"ctx_dp_rank": 0, "ctx_info_endpoint": ["tcp://10.0.0.1:4711", "tcp://10.0.0.1:4712"]}


def page(told: object = TOLD) -> bytes:
    return json.dumps({"disaggregated_params": told}).encode()


@asynccontextmanager
async def servers(roles: str = "pd", said: bytes | None = page(), **more: Any) -> AsyncIterator[Bed]:
    """p: context, d: generation."""
    names = {"p": "prefill", "d": "decode"}

    def prepare(engines: list[MockEngine]) -> None:
        for engine, letter in zip(engines, roles, strict=True):
            if letter == "p" and said is not None:
                engine.pages["/server_info"] = said

    roled = [names[letter] for letter in roles]
    async with bed(len(roles), roles=roled, handover="generation_first", prepare=prepare, **more) as b:
        yield b


def params_of(exchange: Exchange) -> dict[str, Any]:
    params: dict[str, Any] = json.loads(exchange.body)["disaggregated_params"]
    return params


async def ask(b: Bed, path: str = COMPLETIONS, **body: Any) -> Answer:
    content = json.dumps({"prompt": "abc", **body}).encode()
    return await b.ask("POST", path, content, "X-Moonpool-Decision: 1\r\n")


async def hang(exchange: Exchange) -> None:
    await exchange.gone.wait()


def after(other: MockEngine) -> Any:
    """Answers when the other one has been asked, too; in vain, where that waits for this."""

    async def answer(exchange: Exchange) -> None:
        await until(lambda: bool(other.seen))
        await exchange.answer(b'{"engine":"one that waited"}')

    return answer


@with_deadline
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": []}), (COMPLETIONS, {"prompt": [9, 9]})])
async def test_both_servers_are_asked_at_once(path: str, prompt: dict[str, Any], first: int) -> None:
    async with servers() as b:
        b.engines[first].behave = after(b.engines[1 - first])
        more = {"max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({**prompt, **more, "disaggregated_params": "mine"}).encode()
        answer = await b.ask("POST", path, body, "X-Moonpool-Decision: 1\r\n")
        assert (answer.status, answer.engine) == (200, "engine-1")
        assert json.loads(answer.headers["x-moonpool-decision"])["handover"] == "generation_first"
        (p,), (d,) = b.engines[0].seen, b.engines[1].seen
        number = params_of(p)["disagg_request_id"]
        assert 1 << 42 <= number < 1 << 63
        told = {"request_type": "context_only", "disagg_request_id": number, "schedule_style": 1}
        assert json.loads(p.body) == {
            **prompt,
            "max_tokens": 7,
            "stream": False,
            "disaggregated_params": told,
        }
        assert json.loads(d.body) == {
            **prompt,
            **more,
            "disaggregated_params": {
                "request_type": "generation_only",
                "ctx_request_id": number,
                "disagg_request_id": number,
                "schedule_style": 1,
                "ctx_dp_rank": 0,
                "ctx_info_endpoint": "tcp://10.0.0.1:4711",
            },
        }


@with_deadline
async def test_a_stream_begins_while_the_context_server_is_at_work() -> None:
    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event("first")
        await release.wait()
        await exchange.event("[DONE]")
        await exchange.end_stream()

    release = asyncio.Event()
    async with servers() as b:
        b.engines[0].behave, b.engines[1].behave = hang, stream
        client = await b.client()
        await client.request("POST", COMPLETIONS, b'{"prompt":"abc","stream":true}')
        assert (await client.head()).status == 200
        assert await client.chunk() == b"data: first\n\n"
        assert not b.engines[0].seen[0].gone.is_set()
        release.set()
        assert await client.chunk() == b"data: [DONE]\n\n"
        await b.engines[0].seen[0].gone.wait()  # nobody waits for it any more


@with_deadline
async def test_each_attempt_has_its_number() -> None:
    async def fail(exchange: Exchange) -> None:
        await exchange.answer(b"{}", 503)

    async with servers("ppd") as b:
        b.engines[0].behave, b.engines[2].behave = fail, after(b.engines[1])
        assert (await ask(b)).status == 200
        assert (await ask(b)).status == 200
        asked = [params_of(p)["disagg_request_id"] for engine in b.engines[:2] for p in engine.seen]
        assert len(asked) == len(set(asked)) >= 3
        told = [params_of(d)["disagg_request_id"] for d in b.engines[2].seen]
        assert set(told) == set(asked)


@with_deadline
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("how", ["500", "400", "cut"])
async def test_without_a_context_server_the_generation_server_computes(how: str, streams: bool) -> None:
    headed = asyncio.Event()

    async def fail(exchange: Exchange) -> None:
        await until(lambda: bool(b.engines[1].seen))
        if streams:
            await headed.wait()  # the head of a chunked answer is nothing to the one that has a length
        exchange.cut() if how == "cut" else await exchange.answer(b"{}", int(how))

    async def generate(exchange: Exchange) -> None:
        if "disaggregated_params" not in json.loads(exchange.body):
            return await exchange.answer(b'{"engine":"alone"}')
        if streams:
            await exchange.begin_stream()  # the head alone, as servers do
            headed.set()
        await exchange.gone.wait()  # what it waits for will not come

    async with servers() as b:
        b.engines[0].behave, b.engines[1].behave = fail, generate
        answer = await ask(b, stream=streams)
        assert (answer.status, answer.body) == (200, b'{"engine":"alone"}')
        assert json.loads(b.engines[1].seen[-1].body) == {"prompt": "abc", "stream": streams}
        assert all(seen.gone.is_set() for seen in b.engines[1].seen[:-1])


@with_deadline
async def test_a_generation_server_that_breaks_off_is_not_the_end() -> None:
    async def cut(exchange: Exchange) -> None:
        await until(lambda: bool(b.engines[0].seen))
        exchange.cut()

    async with servers("pdd") as b:
        b.engines[0].behave, b.engines[1].behave = hang, cut
        for _ in range(2):
            assert (await ask(b)).engine == "engine-2"
        assert len(b.engines[1].seen) >= 1
        await until(lambda: all(seen.gone.is_set() for seen in b.engines[0].seen))


@with_deadline
async def test_what_the_generation_server_says_is_the_answer() -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(b'{"error":"no transfer"}', 500)

    async with servers() as b:
        b.engines[0].behave, b.engines[1].behave = hang, refuse
        answer = await ask(b)
        assert (answer.status, answer.body) == (500, b'{"error":"no transfer"}')
        await until(lambda: b.engines[0].seen[0].gone.is_set())


@with_deadline
async def test_a_client_that_leaves_leaves_both() -> None:
    async with servers() as b:
        b.engines[0].behave = b.engines[1].behave = hang
        client = await b.client()
        await client.request("POST", COMPLETIONS, b'{"prompt":"abc"}')
        await until(lambda: bool(b.engines[0].seen and b.engines[1].seen))
        client.leave()
        for engine in b.engines:
            await engine.seen[0].gone.wait()


@with_deadline
@pytest.mark.parametrize("said", [None, page({}), b"nonsense"])
async def test_a_context_server_that_cannot_be_met_is_asked_first(said: bytes | None) -> None:
    async with servers(said=said) as b:
        answer = await ask(b)
        assert json.loads(answer.headers["x-moonpool-decision"])["handover"] == "context_first"
        assert params_of(b.engines[0].seen[0])["schedule_style"] == 0


@with_deadline
async def test_a_context_server_is_met_where_it_is_now() -> None:
    async with servers(health=HealthChecks(interval_s=0.02)) as b:
        for endpoint in ("tcp://10.0.0.1:1", "tcp://10.0.0.1:2"):
            b.engines[0].pages["/server_info"] = page({"ctx_info_endpoint": endpoint})
            await until(lambda wanted=endpoint: wanted.encode() in (b.proxy.engines[0].context or b""))
            await ask(b)
            assert params_of(b.engines[1].seen[-1])["ctx_info_endpoint"] == endpoint
        b.engines[0].healthy = False
        await until(lambda: b.proxy.engines[0].context is None)


@with_deadline
async def test_several_prompts_are_not_split() -> None:
    async with servers() as b:
        assert (await ask(b, prompt=["a", "b"])).engine == "engine-1"
        assert not b.engines[0].seen
        assert json.loads(b.engines[1].seen[0].body) == {"prompt": ["a", "b"]}


@pytest.mark.parametrize(
    ("told", "members"),
    [
        ({"ctx_info_endpoint": "a", "ctx_dp_rank": None}, {"ctx_info_endpoint": "a"}),
        ({"encoded_opaque_state": "c3Rh", "later": [1]}, {"encoded_opaque_state": "c3Rh", "later": [1]}),
        (
            {"ctx_info_endpoint": "a", "request_type": "x", "disagg_request_id": 1, "schedule_style": 0},
            {"ctx_info_endpoint": "a"},
        ),
        ({"ctx_info_endpoint": []}, None),
        ({"ctx_info_endpoint": None}, None),
        ({"ctx_info_endpoint": 3}, None),
        ({"ctx_dp_rank": 0}, None),
        (None, None),
    ],
)
def test_what_a_page_says(told: object, members: dict[str, Any] | None) -> None:
    found = read_server_info(page(told))
    assert (None if found is None else json.loads(b"{%b}" % found)) == members


def test_a_page_that_is_none() -> None:
    for body in (b"", b"[]", b"{}", b"[" * 100_000, b'{"disaggregation_mode":"prefill"}', b"\xff"):
        assert read_server_info(body) is None


def test_numbers_are_no_servers_own() -> None:
    first, second = transfer_ids(), transfer_ids()
    taken = [next(numbers) for numbers in (first, second) for _ in range(1_000)]
    assert len(set(taken)) == 2_000
    assert all(1 << 42 <= number < 1 << 63 for number in taken)
