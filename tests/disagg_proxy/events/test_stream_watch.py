"""Streams of KV events that nobody publishes: noticed, said, and not worse than none."""

from __future__ import annotations

import json
import logging
from typing import Any, cast

import pytest

from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.events.stream_link import StreamState
from moonpool.disagg_proxy.events.stream_watch import POOL_EMPTY_S, SILENT_S, StreamWatch
from moonpool.disagg_proxy.events.subscriber import Subscriber
from tests.disagg_proxy.events.beds import Engine, chain, stored
from tests.disagg_proxy.harness import Bed, bed, until, with_deadline

DEAD = EventSource("engine-0", "ipc:///nonexistent/events")
TOKENS: dict[str, Any] = {"policy": "conductor", "tokenizer": ("none",)}


class Streams:
    """Of a subscriber that is made up."""

    def __init__(self, *states: StreamState) -> None:
        self._states = list(states)

    def say(self, *, lost_s: float | None, heard: bool = False) -> None:
        self._states[0] = self._states[0]._replace(lost_s=lost_s, heard=heard)

    def states(self) -> list[StreamState]:
        return self._states


@pytest.mark.parametrize("pool", [False, True])
def test_each_outage_is_said_once(pool: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    streams = Streams(StreamState(EventSource("one", "tcp://h:1", pool=pool), 0, 0.0, False))
    sent_s: float | None = None
    now_s = 100.0
    watch = StreamWatch(cast(Subscriber, streams), lambda place: sent_s, lambda: now_s)

    def look() -> tuple[str, int]:
        for _ in range(2):
            watch.look()
        return watch.rows()[0].state, len(caplog.messages)

    assert look() == ("waiting", 0)
    streams.say(lost_s=SILENT_S)
    assert look() == ("lost", 1)
    assert "one: nothing publishes at tcp://h:1 for 5 s" in caplog.messages[0]
    assert ("what the pool holds" if pool else "--kv-events-config") in caplog.messages[0]
    streams.say(lost_s=None)
    assert look() == ("waiting", 1)
    if not pool:
        sent_s = 100.0
        assert look() == ("waiting", 1)
        now_s = 100.0 + SILENT_S
        assert look() == ("silent", 2)
        assert "has said nothing in 5 s though prompts were sent" in caplog.messages[1]
    streams.say(lost_s=None, heard=True)
    state, said = look()
    assert state == "live"
    assert "are heard" in caplog.messages[-1]
    assert look() == ("live", said)
    streams.say(lost_s=SILENT_S)
    assert look() == ("lost", said + 1)
    streams._states[0] = streams._states[0]._replace(rests=True)
    assert look() == ("resting", said + 1)  # whoever cut it off has said so
    streams._states[0] = streams._states[0]._replace(rests=False)
    assert watch.of_engines() == ({} if pool else {0: "lost"})


def test_a_node_that_does_not_answer_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    streams = Streams(StreamState(EventSource("n", "tcp://h:1", pool=True), 0, None, False))
    watch = StreamWatch(cast(Subscriber, streams), lambda place: None, lambda: 0.0)
    watch.look()
    assert (watch.rows()[0].state, caplog.messages) == ("waiting", [])  # it holds no block yet
    streams._states[0] = streams._states[0]._replace(mute=True)
    for _ in range(2):
        watch.look()
    assert watch.rows()[0].state == watch.of_pool()[0].state == "silent"
    assert caplog.messages == [
        "the KV events of n: tcp://h:1 is connected, and has answered nothing in 5 s, so it is not known "
        "what the pool holds there (docs/events.md)"
    ]
    assert watch.remedy() is None
    streams._states[0] = streams._states[0]._replace(mute=False, heard=True)
    watch.look()
    assert watch.rows()[0].state == "live"
    assert "the nodes that report blocks (n) are not all" in str(watch.remedy())
    streams._states[0] = streams._states[0]._replace(mute=True)  # its blocks still count
    for _ in range(2):
        watch.look()
    assert watch.rows()[0].state == "silent"
    assert watch.remedy() is None
    assert caplog.messages[1:] == [
        "the KV events of n: tcp://h:1 is connected, and has answered nothing in 5 s, so what it reported "
        "before counts, and may no longer be true (docs/events.md)"
    ]


def test_nodes_without_a_block_are_said_once_engines_got_prompts(caplog: pytest.LogCaptureFixture) -> None:
    streams = Streams(StreamState(EventSource("n", "tcp://h:1", pool=True), 0, None, False))
    prompts, now_s = 7, 100.0
    watch = StreamWatch(cast(Subscriber, streams), lambda place: None, lambda: now_s, lambda: prompts)

    def look_after(seconds: float) -> int:
        nonlocal now_s
        now_s += seconds
        watch.look()
        return len(caplog.messages)

    assert look_after(0.0) == look_after(POOL_EMPTY_S) == 0  # those prompts were sent before
    prompts = 8
    assert look_after(0.0) == look_after(POOL_EMPTY_S - 1.0) == 0
    streams.say(lost_s=None, heard=True)
    assert look_after(POOL_EMPTY_S) == 0  # it had one
    streams.say(lost_s=None, heard=False)
    assert look_after(0.0) == look_after(POOL_EMPTY_S) == 0
    prompts = 9
    assert look_after(0.0) == 0
    assert look_after(POOL_EMPTY_S) == look_after(POOL_EMPTY_S) == 1
    assert "none of the nodes that the proxy follows (n at tcp://h:1) has a block 10 s later" in caplog.text


async def own_tokens(b: Bed, prompt: list[int]) -> int:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    answer = await b.ask("POST", "/v1/completions", body, "X-Moonpool-Decision: 1\r\n")
    assert answer.status == 200
    return int(json.loads(answer.headers["x-moonpool-decision"])["own_tokens"])


@with_deadline
async def test_a_dead_stream_is_not_worse_than_none() -> None:
    """Newcomer 4: the same prompt three times, of 2,404 tokens: 0, 2368, 2368 without --events, 0, 0, 0 with
    a stream that nobody publishes."""
    found = []
    for events in ((), (DEAD,)):
        async with bed(1, events=events, **TOKENS) as b:
            found.append([await own_tokens(b, list(range(2404))) for _ in range(3)])
    assert found[0] == found[1] == [0, 2368, 2368]


@with_deadline
async def test_a_dead_stream_is_seen_on_every_page(caplog: pytest.LogCaptureFixture) -> None:
    async with bed(1, events=(DEAD,), **TOKENS) as b:
        subscriber = b.proxy._subscriber
        assert subscriber is not None
        await until(lambda: bool(subscriber._links))  # its thread makes them
        (link,) = subscriber._links
        assert link.lost_since_s is not None
        link.lost_since_s -= SILENT_S
        await until(lambda: "nothing publishes at ipc:///nonexistent/events" in caplog.text)
        health = await b.ask("GET", "/health")
        lost = {"name": "engine-0", "state": "lost"}
        assert (health.status, json.loads(health.body)["events"]) == (200, [lost])
        (row,) = json.loads((await b.ask("GET", "/engines")).body)["engines"]
        assert row["events"] == "lost"
        (shown,) = json.loads((await b.ask("GET", "/ui/data")).body)["engine_rows"]
        assert shown[-1] == "lost"
        metrics = (await b.ask("GET", "/metrics")).body.decode()
        assert 'moonpool_proxy_events_connected{stream="engine-0"} 0.0' in metrics
        assert 'moonpool_proxy_events_heard{stream="engine-0"} 0.0' in metrics
        assert "moonpool_proxy_events_lag_seconds{" not in metrics


@with_deadline
async def test_a_stream_that_speaks_is_believed() -> None:
    engine = Engine()
    try:
        async with bed(1, events=(engine.spec("engine-0"),), **TOKENS) as b:
            prompt = chain(0, 40)
            assert await own_tokens(b, prompt) == 0
            assert await own_tokens(b, prompt) == 128  # as it was sent there
            engine.tell(stored(prompt[:8], 100))
            while await own_tokens(b, [*prompt[:8], 9]) != 8:
                pass
            (row,) = json.loads((await b.ask("GET", "/engines")).body)["engines"]
            assert row["events"] == "live"
            assert "events" not in json.loads((await b.ask("GET", "/health")).body)
            metrics = (await b.ask("GET", "/metrics")).body.decode()
            assert 'moonpool_proxy_events_lag_seconds{stream="engine-0"}' in metrics
    finally:
        engine.stop()
