"""Engines that share a pool of which the proxy is not told."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from moonpool._native import PrefillModel
from moonpool.core.service.kv_event_publisher import BlockStored
from moonpool.core.store.keys import block_digests
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.hidden_pool import SEEN_MIN, WINDOW, HiddenPool
from moonpool.disagg_proxy.conductor.inflight import InflightTracker
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.data_plane.observations import Observation
from tests.disagg_proxy.events.beds import BLOCK, Engine, chain, stored
from tests.disagg_proxy.harness import Bed, Exchange, bed, until, with_deadline

TOKENS: dict[str, Any] = {"policy": "conductor", "tokenizer": ("none",)}
PROMPT = 4000
BLANK = Observation(
    0, 1, -1, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1, -1, -1, -1, 200, 0, 1, 0, 1, 0, 1, b"", b"", b""
)


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


def test_the_sentence_ends_with_what_to_do() -> None:
    pool = HiddenPool(lambda: "the remedy")
    said = [pool.report(1000, 0, 992) for _ in range(SEEN_MIN)]
    assert str(said[-1]).endswith("in reach of all: the remedy")


@pytest.mark.parametrize(
    ("reported", "presumed", "hidden"),
    [(0, 0, True), (500, 0, True), (1000, 0, False), (1000, 1000, True), (1000, 500, True)],
)
def test_what_nodes_report_of_a_prompt_is_explained_and_what_is_presumed_is_not(
    reported: int, presumed: int, hidden: bool
) -> None:
    """A pool that is presumed by earlier answers must not end its own detection."""
    tracker = InflightTracker([Worker(0, "e")], hears=lambda place: True)
    for number in range(WINDOW):
        asked = Request(1000, own=(100,), pool=reported, presumed=presumed)
        tracker.on_dispatch(number, Choice(tracker.workers[0]), asked, streams=False, now_s=0.0)
        over = BLANK._replace(request=number, prompt_tokens=1000, cached_tokens=992, last_byte_s=1.0)
        tracker.observe(over)
    assert tracker.hidden_pool.seen == hidden


async def ask(b: Bed, prompt: list[int]) -> str:
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()
    answer = await b.ask("POST", "/v1/completions", body)
    assert answer.status == 200
    return answer.engine


@pytest.mark.parametrize("heard", ["no node", "another pool's node", "one of the nodes"])
@with_deadline
async def test_equal_engines_share_what_only_the_pool_explains(
    heard: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6: of 288 requests to two equal engines 276 went to one, and nothing said which flag is missing. That
    some node is followed, which has other blocks or few of them, changes nothing."""
    monkeypatch.setattr(PrefillModel, "observe", lambda *args, **options: None)  # how fast mocks are
    streams = [Engine(), Engine()]
    events = tuple(stream.spec(f"engine-{at}") for at, stream in enumerate(streams))
    node = Engine()
    if heard != "no node":
        events += (replace(node.spec("node:n"), pool=True),)
    conversation = chain(0, PROMPT // BLOCK)
    few = conversation[: PROMPT // 10] if heard == "one of the nodes" else chain(9_000_000, 10)
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
            streams[0].tell(stored(conversation, 1000, None))
            locator, ids = b.proxy._locator, array("I", conversation).tobytes()
            await until(lambda: locator.is_heard(0) and locator.is_heard(1))
            await until(lambda: locator.find(ids, b"").own[0] == len(conversation))
            if heard != "no node":
                node.tell(BlockStored(block_digests(few, BLOCK), medium="CPU"))
                await until(lambda: locator.find(array("I", few).tobytes(), b"").pool == len(few))

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
            assert caplog.text.count("engines report more cached tokens") == 1
            assert ("(node:n) are not all of the engines' pool" in caplog.text) == (heard != "no node")
            assert "--pool-events" in caplog.text
            explained: list[int] = []
            with monkeypatch.context() as patch:
                patch.setattr(hidden, "report", lambda tokens, known, cached: explained.append(known))
                shared = await at_once(12)
                await until(lambda: b.proxy._dispatcher.learn() or len(explained) == 12)
            assert min(shared["engine-0"], shared["engine-1"]) >= 1, shared
            # The first there: that all of it is presumed in the pool explains nothing.
            assert min(explained) == (len(few) if heard == "one of the nodes" else 0)
            assert "moonpool_proxy_hidden_pool 1.0" in (await b.ask("GET", "/metrics")).body.decode()

            if heard == "no node":
                return
            # Its other nodes are heard, too: detection ends with the answers that they explain.
            prompts = [chain(2_000_000 + 10_000 * number, PROMPT // BLOCK) for number in range(WINDOW)]
            for each in prompts:
                node.tell(BlockStored(block_digests(each, BLOCK), medium="CPU"))
            last = array("I", prompts[-1]).tobytes()
            await until(lambda: locator.find(last, b"").pool == PROMPT)
            for each in prompts:
                await ask(b, each)
                b.proxy._dispatcher.learn()
            await until(lambda: not hidden.seen)
    finally:
        for stream in (*streams, node):
            stream.stop()
