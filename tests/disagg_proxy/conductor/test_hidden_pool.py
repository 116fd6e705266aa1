"""Engines that share a pool of which the proxy is not told."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import Counter
from typing import Any

import pytest

from moonpool._native import PrefillModel
from moonpool.disagg_proxy.conductor.hidden_pool import SEEN_MIN, WINDOW, HiddenPool
from tests.disagg_proxy.events.beds import BLOCK, Engine, chain, stored
from tests.disagg_proxy.harness import Bed, Exchange, bed, until, with_deadline

TOKENS: dict[str, Any] = {"policy": "conductor", "tokenizer": ("none",)}
PROMPT = 4000


def test_it_is_seen_when_reports_say_so_and_lost_when_they_no_longer_do() -> None:
    pool = HiddenPool()
    assert [pool.report(1000, 900, 992) for _ in range(WINDOW)] == [None] * WINDOW  # a block more
    said = [pool.report(1000, 0, 992) for _ in range(2 * SEEN_MIN)]
    assert [each is not None for each in said].index(True) == SEEN_MIN - 1
    assert sum(each is not None for each in said) == 1
    assert "--pool-events" in str(said[SEEN_MIN - 1])
    assert pool.seen
    for _ in range(WINDOW):
        pool.report(1000, 900, 0)
    assert not pool.seen
    assert all(pool.report(1000, 0, 992) is None for _ in range(SEEN_MIN))
    assert pool.seen  # and is not said again


def test_nothing_is_hidden_while_nodes_tell() -> None:
    heard = False
    pool = HiddenPool(lambda: heard, lambda: "the remedy")
    said = [pool.report(1000, 0, 992) for _ in range(SEEN_MIN)]
    assert str(said[-1]).endswith("in reach of all: the remedy")
    assert pool.seen
    heard = True
    assert not pool.seen
    other = HiddenPool(lambda: heard)
    assert [other.report(1000, 0, 992) for _ in range(WINDOW)] == [None] * WINDOW
    heard = False
    assert not other.seen  # those were the pool's


async def ask(b: Bed, prompt: list[int]) -> str:
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()
    answer = await b.ask("POST", "/v1/completions", body)
    assert answer.status == 200
    return answer.engine


@with_deadline
async def test_equal_engines_share_what_only_the_pool_explains(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6: of 288 requests to two equal engines 276 went to one, and nothing said which flag is missing."""
    monkeypatch.setattr(PrefillModel, "observe", lambda *args, **options: None)  # how fast mocks are
    streams = [Engine(), Engine()]
    events = tuple(stream.spec(f"engine-{at}") for at, stream in enumerate(streams))
    held: list[asyncio.Event] = []

    async def cached(exchange: Exchange) -> None:
        """All of its prompt comes from the pool."""
        for each in held:
            await each.wait()
        tokens = len(json.loads(exchange.body)["prompt"])
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        usage |= {"prompt_tokens_details": {"cached_tokens": tokens - 1}}
        await exchange.answer(json.dumps({"choices": [], "usage": usage}).encode())

    try:
        async with bed(2, events=events, **TOKENS) as b:
            for mock in b.engines:
                mock.behave = cached
            for at, stream in enumerate(streams):
                stream.tell(stored(chain(100_000 * (at + 1), 2), 10))
            conversation = chain(0, PROMPT // BLOCK)
            streams[0].tell(stored(conversation, 1000, None))
            locator, ids = b.proxy._locator, array("I", conversation).tobytes()
            await until(lambda: locator.is_heard(0) and locator.is_heard(1))
            await until(lambda: locator.find(ids, b"").own[0] == len(conversation))

            async def at_once(count: int) -> Counter[str]:
                """So many turns of the conversation, none of which ends before all are there."""
                held.append(asyncio.Event())
                seen = sum(len(mock.seen) for mock in b.engines)
                asked = [asyncio.ensure_future(ask(b, [*conversation, *range(at)])) for at in range(count)]
                await until(lambda: sum(len(mock.seen) for mock in b.engines) == seen + count)
                held.pop().set()
                return Counter(await asyncio.gather(*asked))

            assert set(await at_once(12)) == {"engine-0"}  # it alone has the conversation, by its events
            hidden = b.proxy._dispatcher.scheduler.inflight.hidden_pool
            assert hidden is not None
            for number in range(SEEN_MIN):
                await ask(b, chain(1_000_000 + 10_000 * number, PROMPT // BLOCK))
                b.proxy._dispatcher.learn()
            await until(lambda: hidden.seen)
            assert caplog.text.count("--pool-events") == 1
            shared = await at_once(12)
            assert min(shared["engine-0"], shared["engine-1"]) >= 1, shared
            assert "moonpool_proxy_hidden_pool 1.0" in (await b.ask("GET", "/metrics")).body.decode()
    finally:
        for stream in streams:
            stream.stop()
