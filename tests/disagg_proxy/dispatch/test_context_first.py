"""TensorRT-LLM's form of a hand-over, the context first, with engines whose every byte is scripted: the
fields are those of its OpenAI server (``disaggregated_params``). No real one was run: it needs a GPU.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.disagg_proxy.harness import Bed, Behaviour, Exchange, bed, with_deadline

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PARAMS = {
    "request_type": "context_only",
    "first_gen_tokens": [5],
    "ctx_request_id": 7,
    "encoded_opaque_state": "c3RhdGU=",
    "disagg_request_id": 9,
}


def context(reason: str | None = "length", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": "a", "finish_reason": reason, "disaggregated_params": PARAMS}
    return {"id": "c", "choices": [choice], "prompt_token_ids": [1, 2, 3], **more}


def saying(value: object, status: int = 200) -> Behaviour:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(json.dumps(value).encode(), status)

    return answer


@asynccontextmanager
async def pair(roles: str = "pd") -> AsyncIterator[Bed]:
    names = {"p": "prefill", "d": "decode"}
    async with bed(len(roles), roles=[names[letter] for letter in roles], handover="context_first") as b:
        for engine, letter in zip(b.engines, roles, strict=True):
            if letter == "p":
                engine.behave = saying(context())
        yield b


async def ask(b: Bed, path: str, body: dict[str, Any]) -> Any:
    answer = await b.ask("POST", path, json.dumps(body).encode(), "X-Moonpool-Decision: 1\r\n")
    assert answer.status == 200
    return answer


@with_deadline
@pytest.mark.parametrize(
    ("path", "prompt", "member"),
    [
        (CHAT, {"messages": []}, "prompt_token_ids"),
        (COMPLETIONS, {"prompt": "abc"}, "prompt"),
        (COMPLETIONS, {"prompt": [9, 9]}, "prompt"),
    ],
)
async def test_what_the_context_server_says_goes_to_the_generation_server(
    path: str, prompt: dict[str, Any], member: str
) -> None:
    async with pair() as b:
        more = {"max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}}
        answer = await ask(b, path, {**prompt, **more, "disaggregated_params": "mine"})
        assert answer.engine == "engine-1"
        assert json.loads(answer.headers["x-moonpool-decision"])["handover"] == "context_first"
        (p,), (d,) = b.engines[0].seen, b.engines[1].seen
        asked = json.loads(p.body)
        number = asked["disaggregated_params"].pop("disagg_request_id")
        assert 0 <= number < 1 << 63
        assert asked == {
            **prompt,
            "max_tokens": 7,
            "stream": False,
            "disaggregated_params": {"request_type": "context_only", "schedule_style": 0},
        }
        told = json.loads(d.body)
        assert told == {
            **prompt,
            **more,
            member: [1, 2, 3],
            "disaggregated_params": {**PARAMS, "request_type": "generation_only"},
        }


@with_deadline
@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": ["a", "b"]}), ("/v1/responses", {"input": "a"})]
)
async def test_a_clients_own_parameters_go_to_no_server(path: str, body: dict[str, Any]) -> None:
    async with pair() as b:
        await ask(b, path, {"disaggregated_params": PARAMS, **body})
        assert json.loads(b.engines[1].seen[0].body) == body
        assert (await b.ask("POST", path, b"[" * 600 + b"]" * 600)).status == 400
        b.engines[0].behave = saying({}, 500)  # the generation server computes the prompt itself
        answer = await ask(b, COMPLETIONS, {"disaggregated_params": PARAMS, "prompt": "a"})
        assert answer.engine == "engine-1"
        assert json.loads(b.engines[1].seen[1].body) == {"prompt": "a"}


@with_deadline
async def test_each_request_has_its_number() -> None:
    async with pair() as b:
        for _ in range(3):
            await ask(b, CHAT, {"messages": []})
        numbers = [json.loads(p.body)["disaggregated_params"]["disagg_request_id"] for p in b.engines[0].seen]
        assert len(set(numbers)) == 3


@with_deadline
@pytest.mark.parametrize("streams", [False, True])
async def test_a_first_token_that_is_the_last_is_the_answer(streams: bool) -> None:
    async with pair() as b:
        b.engines[0].behave = saying(context("stop", usage={"completion_tokens": 1}))
        answer = await ask(b, COMPLETIONS, {"prompt": "abc", "stream": streams})
        assert answer.engine == "engine-0"
        if streams:
            assert answer.headers["content-type"] == "text/event-stream"
            assert answer.body == b"data: [DONE]\n\n"
        else:
            choice = {"index": 0, "text": "a", "finish_reason": "stop"}
            assert json.loads(answer.body) == {
                "id": "c",
                "choices": [choice],
                "usage": {"completion_tokens": 1},
            }
        assert not b.engines[1].seen


@with_deadline
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"choices": []},
        {"choices": [{"finish_reason": "length"}]},
        {"choices": [{"disaggregated_params": 1}]},
        {"choices": context()["choices"] * 2},
        {"choices": 3},
    ],
)
async def test_without_parameters_the_generation_server_computes(said: Any) -> None:
    async with pair() as b:
        b.engines[0].behave = saying(said)
        body = {"prompt": "abc"}
        assert (await ask(b, COMPLETIONS, body)).engine == "engine-1"
        assert json.loads(b.engines[1].seen[0].body) == body


@with_deadline
async def test_several_prompts_are_not_split() -> None:
    async with pair() as b:
        body = {"prompt": ["a", "b"]}
        assert (await ask(b, COMPLETIONS, body)).engine == "engine-1"
        assert not b.engines[0].seen
        assert json.loads(b.engines[1].seen[0].body) == body


@with_deadline
async def test_failures_are_those_of_two_steps() -> None:
    async with pair("ppd") as b:
        b.engines[0].behave = saying({}, 503)
        assert (await ask(b, CHAT, {"messages": []})).engine == "engine-2"
        told = json.loads(b.engines[2].seen[0].body)
        assert told["disaggregated_params"]["ctx_request_id"] == 7
        assert len(b.engines[1].seen) == 1
    async with pair() as b:
        b.engines[0].behave = saying({"error": "too long"}, 400)
        answer = await b.ask("POST", CHAT, b'{"messages":[]}')
        assert (answer.status, json.loads(answer.body)) == (400, {"error": "too long"})
        assert not b.engines[1].seen
