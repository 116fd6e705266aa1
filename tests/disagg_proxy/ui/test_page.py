"""/ui and /ui/data of a running proxy."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ..harness import Bed, Exchange, FakeClock, bed, until, with_deadline

COMPLETIONS = "/v1/completions"
SECRET = "a prompt that nobody else may read"


async def answer(exchange: Exchange) -> None:
    """A stream of one token, with usage."""
    await exchange.begin_stream()
    await exchange.event('{"choices":[{"text":"a"}]}')
    await exchange.event(
        '{"choices":[],"usage":{"prompt_tokens":300,"completion_tokens":1,'
        '"prompt_tokens_details":{"cached_tokens":250}}}'
    )
    await exchange.event("[DONE]")
    await exchange.end_stream()


async def ask(b: Bed, count: int) -> None:
    for engine in b.engines:
        engine.behave = answer
    body = json.dumps({"model": "m", "prompt": list(range(300)), "stream": True, "max_tokens": 1})
    for _ in range(count):
        assert (await b.ask("POST", COMPLETIONS, body.encode())).status == 200


async def data(b: Bed) -> dict[str, object]:
    found: dict[str, object] = json.loads((await b.ask("GET", "/ui/data")).body)
    return found


@with_deadline
async def test_the_page_may_run_its_own_script_and_nothing_else() -> None:
    async with bed(1) as b:
        page = await b.ask("GET", "/ui")
        assert page.status == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        allowed = page.headers["content-security-policy"]
        for name in (b"script", b"style"):
            (part,) = re.findall(rb"<%b>(.*?)</%b>" % (name, name), page.body, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(part).digest()).decode()
            assert f"{name.decode()}-src 'sha256-{digest}'" in allowed
        assert "default-src 'none'" in allowed
        assert "unsafe" not in allowed
        text = page.body.decode()
        links = re.findall(r"""(?:src|href|url\()\s*=?\s*["']?([^"'\s>)]+)""", text)
        assert set(links) == {"engines", "metrics"}  # nothing comes from elsewhere
        assert not re.findall(r"\s(?:style|on[a-z]+)=", text)  # what the policy would forbid
        head = await b.ask("HEAD", "/ui")
        assert (head.status, head.body) == (200, b"")
        assert (await b.ask("POST", "/ui", b"")).status == 405
        assert (await b.ask("GET", "/ui/other")).status == 404


@with_deadline
async def test_it_says_what_became_of_requests_and_why() -> None:
    async with bed(2, policy="conductor", tokenizer=("none",)) as b:
        await ask(b, 3)
        await b.ask("POST", COMPLETIONS, json.dumps({"model": "m", "prompt": SECRET}).encode())
        await b.ask("GET", "/nowhere")
        found = await data(b)
        assert (found["policy"], found["explains"], found["engines"], found["healthy"]) == (
            "conductor",
            True,
            2,
            2,
        )
        rows = [dict(zip(found["engine_columns"], row, strict=True)) for row in found["engine_rows"]]  # type: ignore[arg-type, attr-defined, call-overload]
        assert {row["name"] for row in rows} == {"engine-0", "engine-1"}
        assert sum(row["requests"] for row in rows) == 4
        assert found["rejected"] == {"unknown_path": 1}
        last = found["last"]
        assert isinstance(last, list)
        assert len(last) == 4
        blind, *others = last  # the last one first
        assert "its tokens were not known" in blind["why_miss"]
        assert {row["tokens"] for row in others} == {300}
        assert [row["own"] for row in others] == [256, 256, 0]
        assert [row["cached"] for row in others] == [250] * 3
        assert "no engine held its beginning" in others[-1]["why_miss"]
        assert "predicted" in others[0]["why_here"]
        assert all(row["ttft_s"] > 0 and row["predicted_s"] > 0 for row in others)
        assert len(found["points"]) == 3  # type: ignore[arg-type]
        assert SECRET not in json.dumps(found)


@with_deadline
async def test_a_policy_that_looks_at_no_prompt_explains_nothing() -> None:
    async with bed(1, policy="round_robin") as b:
        await ask(b, 2)
        found = await data(b)
        assert found["explains"] is False
        assert [(row["why_here"], row["why_miss"]) for row in found["last"]] == [("", "")] * 2  # type: ignore[attr-defined]
        (row,) = found["engine_rows"]  # type: ignore[misc, attr-defined]
        assert row[6:10] == [0.0, -1, -1, 0]


@pytest.mark.parametrize("policy", ["round_robin", "least_load", "conductor"])
@pytest.mark.parametrize("apart", [False, True])
@with_deadline
async def test_the_page_is_true_under_every_policy(policy: str, apart: bool) -> None:
    """Newcomer 6: under the default policy 0.0 requests a second, no first token, no last requests."""

    async def stream(exchange: Exchange) -> None:
        if not json.loads(exchange.body).get("stream"):
            return await exchange.answer(b'{"kv_transfer_params":{"a":1}}')
        await exchange.begin_stream()
        usage = '{"prompt_tokens":1000,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":600}}'
        await exchange.event('{"choices":[],"usage":' + usage + "}")
        await exchange.event("[DONE]")
        await exchange.end_stream()

    roles = ["prefill", "decode"] if apart else []
    async with bed(2, policy=policy, tokenizer=("none",), roles=roles) as b:
        for mock in b.engines:
            mock.behave = stream
        body = json.dumps({"model": "m", "prompt": list(range(1000)), "stream": True}).encode()
        engines = []
        for _ in range(4):
            answer = await b.ask("POST", COMPLETIONS, body, "X-Moonpool-Decision: 1\r\n")
            assert answer.status == 200
            decision = json.loads(answer.headers["x-moonpool-decision"])
            assert (decision["policy"], decision["engine"]) == (policy, answer.engine)
            assert decision["prefill"] == ("engine-0" if apart else None)
            engines.append(answer.engine)
        assert "x-moonpool-decision" not in (await b.ask("POST", COMPLETIONS, body)).headers
        history = b.proxy.ui.history
        await until(lambda: sum(step.requests for step in history.steps) == 5)
        assert sum(step.streams for step in history.steps) == 5
        assert sum(step.ttft_s for step in history.steps) > 0
        found: Any = await data(b)
        assert [row["engine"] for row in reversed(found["last"])][:4] == engines
        assert {row["prefill"] for row in found["last"]} == {"engine-0" if apart else None}
        assert {row["tokens"] for row in found["last"]} == {1000}
        assert all(row["ttft_s"] > 0 for row in found["last"])
        if not apart:
            assert (history.total.told, history.total.cached) == (5000, 3000)
            assert {row["cached"] for row in found["last"]} == {600}


@with_deadline
async def test_history_is_made_while_nobody_looks_and_a_page_is_kept_for_a_second() -> None:
    clock = FakeClock()
    async with bed(1, policy="conductor", clock=clock) as b:
        history = b.proxy.ui.history
        await until(lambda: len(history.steps) == 1)
        await ask(b, 1)
        await until(lambda: history.steps[0].requests == 1)
        clock.now += 6.0
        await until(lambda: len(history.steps) == 2)
        assert history.steps[1].requests == 0
        first = await b.ask("GET", "/ui/data")
        await ask(b, 1)
        assert (await b.ask("GET", "/ui/data")).body == first.body
        clock.now += 1.0
        assert (
            json.loads((await b.ask("GET", "/ui/data")).body)["clock_s"] > json.loads(first.body)["clock_s"]
        )


@with_deadline
async def test_the_page_is_open_and_its_data_wants_a_key_where_there_are_any(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alpha\n")
    async with bed(1, api_keys_file=str(file)) as b:
        for path in ("/metrics", "/ui"):
            assert (await b.ask("GET", path)).status == 200
        assert (await b.ask("GET", "/ui/data")).status == 401
        assert (await b.ask("GET", "/ui/data", head="Authorization: Bearer alpha\r\n")).status == 200
        assert (await b.ask("POST", COMPLETIONS, b"{}")).status == 401
