"""Engines that join and leave a running proxy: no request is lost, none goes to the wrong place."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from moonpool._native import ProxyRequest
from moonpool.core.config.proxy_section import Deadlines, HealthChecks
from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.plan import Decision
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine
from moonpool.disagg_proxy.engines.engine import Engine, host_field
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings
from tests.disagg_proxy.harness import Bed, Exchange, MockEngine, bed, broke_two_engines, until, with_deadline

BODY = b'{"model":"m","prompt":"hello"}'


async def joined(b: Bed, name: str, model: str = "") -> MockEngine:
    """One more engine, which is in the rotation."""
    mock = MockEngine(name)
    await mock.start()
    b.engines.append(mock)
    engine = b.proxy.fleet.join(DiscoveredEngine(mock.spec, model=model))
    await until(lambda: engine.liveness.healthy)
    return mock


async def ask(b: Bed) -> str:
    answer = await b.ask("POST", "/v1/completions", BODY)
    assert answer.status == 200, answer.body
    return answer.engine


@with_deadline
async def test_a_proxy_without_engines_says_so_until_one_joins() -> None:
    async with bed(0, discovery=("http",)) as b:
        answer = await b.ask("POST", "/v1/completions", BODY)
        assert answer.status == 503
        assert "retry-after" in answer.headers
        error = json.loads(answer.body)["error"]
        assert error["code"] == "no_engine"
        assert error["message"].startswith("no engine has been discovered yet")
        assert (await b.ask("GET", "/health")).status == 503
        await joined(b, "first")
        assert await ask(b) == "first"
        assert (await b.ask("GET", "/health")).status == 200


@with_deadline
async def test_one_that_joins_begins_with_what_engines_of_its_model_have_learnt() -> None:
    async with bed(0, discovery=("http",), engines_max=4) as b:
        await joined(b, "first", "small")
        learnt = b.proxy._dispatcher.workers[0].prefill_model
        prior_s = learnt.predict(10_000)
        for number in range(50):
            learnt.observe(1_000 * (number % 20), 0, 0, 0.1 + number % 20)
        for name, model in (("other", "large"), ("sister", "small"), ("untold", "")):
            await joined(b, name, model)
        first, other, sister, untold = (
            each.prefill_model.predict(10_000) for each in b.proxy._dispatcher.workers
        )
        assert first == pytest.approx(10.1, rel=0.1)
        assert other == prior_s
        assert sister == untold == first
        b.proxy.check_integrity()


@with_deadline
async def test_what_runs_on_an_engine_that_leaves_ends_there() -> None:
    async with bed(1, discovery=("http",), engines_max=2) as b:
        old, more = b.engines[0], asyncio.Event()

        async def stream(exchange: Exchange) -> None:
            await exchange.begin_stream()
            await exchange.event("one")
            await more.wait()
            await exchange.event("two")
            await exchange.end_stream()

        old.behave = stream
        client = await b.client()
        await client.request("POST", "/v1/completions", BODY)
        assert (await client.head()).engine == "engine-0"
        assert await client.chunk() == b"data: one\n\n"
        b.proxy.fleet.leave("engine-0")
        await joined(b, "new")
        for _ in range(4):
            assert await ask(b) == "new"
        rows = {row["name"]: row for row in json.loads((await b.ask("GET", "/engines")).body)["engines"]}
        assert (rows["engine-0"]["health"], rows["engine-0"]["in_flight"]) == ("leaving", 1)
        with pytest.raises(LookupError, match="no place"):
            b.proxy.fleet.join(DiscoveredEngine(EngineSpec("third", "http://127.0.0.1:1")))
        more.set()
        assert await client.chunk() == b"data: two\n\n"
        assert await client.chunk() == b""
        await until(lambda: b.proxy.fleet.room)
        assert [row.name for row in b.counters.engines] == ["new"]
        await joined(b, "third")  # at the first one's place
        assert {await ask(b) for _ in range(8)} == {"new", "third"}
        assert len(old.seen) == 1


@with_deadline
async def test_a_request_that_outlives_the_drain_is_cut_or_goes_elsewhere() -> None:
    deadlines = Deadlines(drain_s=0.05)
    async with bed(1, discovery=("http",), deadlines=deadlines) as b:
        never = asyncio.Event()

        async def hang(exchange: Exchange) -> None:
            if json.loads(exchange.body).get("stream"):
                await exchange.begin_stream()
                await exchange.event("one")
            await never.wait()

        b.engines[0].behave = hang
        begun, waiting = await b.client(), await b.client()
        await begun.request("POST", "/v1/completions", b'{"model":"m","prompt":"x","stream":true}')
        assert (await begun.head()).status == 200
        assert await begun.chunk()
        await waiting.request("POST", "/v1/completions", BODY)
        await until(lambda: len(b.engines[0].seen) == 2)
        await joined(b, "other")
        b.proxy.fleet.leave("engine-0")
        assert (await waiting.answer()).engine == "other"  # it had sent nothing yet
        assert b"engine engine-0 was removed before its answer was complete" in await begun.ended()
        await until(lambda: len(b.counters.engines) == 1)


@with_deadline
async def test_a_decision_for_an_engine_that_has_left_is_made_anew() -> None:
    """The place is kept while anybody may still name it, so no other engine can be taken for it."""
    asked: list[ProxyRequest] = []

    def decide(request: ProxyRequest) -> Decision:
        asked.append(request)
        return None if len(asked) == 1 else request.candidates[0]

    async with bed(1, discovery=("http",), engines_max=2, decide=decide) as b:
        client = await b.client()
        await client.request("POST", "/v1/completions", BODY)
        await until(lambda: len(asked) == 1)
        b.proxy.fleet.leave("engine-0")
        await joined(b, "other")
        assert await ask(b) == "other"
        assert not b.proxy.fleet.room
        b.proxy.relay.resume(asked[0], 0)
        assert (await client.answer()).engine == "other"
        await until(lambda: b.proxy.fleet.room)
        assert not b.engines[0].seen


@with_deadline
async def test_a_prefill_in_work_is_handed_to_the_decode_engine_that_leaves() -> None:
    async with bed(
        2, roles=["prefill", "decode"], discovery=("http",), policy="conductor", tokenizer=("none",)
    ) as b:
        prefill, decode = b.engines
        go = asyncio.Event()

        async def compute(exchange: Exchange) -> None:
            await go.wait()
            await exchange.answer(b'{"kv_transfer_params":{"a":1}}')

        prefill.behave = compute
        client = await b.client()
        await client.request(
            "POST", "/v1/completions", b'{"prompt":%b}' % json.dumps(list(range(999))).encode()
        )
        await until(lambda: len(prefill.seen) == 1)
        b.proxy.fleet.leave("engine-1")
        go.set()
        assert (await client.answer()).engine == "engine-1"
        assert json.loads(decode.seen[0].body)["kv_transfer_params"] == {"a": 1}
        await until(lambda: len(b.counters.engines) == 1)


@with_deadline
async def test_no_request_is_lost_while_engines_join_leave_and_die(rng: random.Random) -> None:
    """Only what had begun on an engine that died may end early."""
    health = HealthChecks(interval_s=0.02)
    async with bed(
        2, discovery=("http",), engines_max=6, health=health, policy="conductor", tokenizer=("none",)
    ) as b:
        there = ["engine-0", "engine-1"]
        mocks = {mock.name: mock for mock in b.engines}
        answered, done = 0, asyncio.Event()

        async def clients() -> None:
            nonlocal answered
            client = await b.client()
            while not done.is_set():
                answer = await client.ask("POST", "/v1/completions", BODY)
                if broke_two_engines(answer):
                    continue
                assert answer.status == 200, answer.body
                answered += 1

        async def after(count: int) -> None:
            target = answered + count
            await until(lambda: answered >= target)

        asking = [asyncio.ensure_future(clients()) for _ in range(16)]
        for number in range(40):
            if len(there) < 3 and b.proxy.fleet.room:
                mock = await joined(b, f"later-{number}")
                mocks[mock.name] = mock
                there.append(mock.name)
            else:
                name = there.pop(rng.randrange(len(there)))
                if rng.random() < 0.3:
                    await mocks[name].stop()  # it dies, and only then somebody says that it left
                b.proxy.fleet.leave(name)
            await after(rng.randrange(1, 60))
            b.proxy.check_integrity()
        done.set()
        await asyncio.gather(*asking)
        assert answered > 100
        await until(lambda: len(b.counters.engines) == len(there))


@with_deadline
async def test_metrics_name_each_engine_once_when_a_successor_has_its_name() -> None:
    async with bed(1, discovery=("http",)) as b:
        never = asyncio.Event()

        async def hang(exchange: Exchange) -> None:
            await never.wait()

        b.engines[0].behave = hang
        client = await b.client()
        await client.request("POST", "/v1/completions", BODY)
        await until(lambda: len(b.engines[0].seen) == 1)
        b.proxy.fleet.leave("engine-0")
        await joined(b, "engine-0")
        text = (await b.ask("GET", "/metrics")).body.decode()
        assert text.count('\nmoonpool_proxy_requests_in_flight{engine="engine-0"}') == 1
        assert '\nmoonpool_proxy_requests_in_flight{engine="engine-0"} 0.0' in text
        shown = json.loads((await b.ask("GET", "/ui/data")).body)
        rows = [dict(zip(shown["engine_columns"], row, strict=True)) for row in shown["engine_rows"]]
        assert [(row["health"], row["in_flight"]) for row in rows] == [("leaving", 1), ("healthy", 0)]
        client.leave()
        await until(lambda: len(b.counters.engines) == 1)


@with_deadline
async def test_a_bootstrap_page_is_used_while_it_is_one_engines_and_decode_reaches_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bed(0, discovery=("http",), handover="auto") as b:
        fleet = b.proxy.fleet

        def prefill(name: str, port: int) -> EngineSpec:
            return EngineSpec(name, f"http://127.0.0.1:{port}", "prefill", "9998")

        old = fleet.join(DiscoveredEngine(prefill("old", 1)))
        assert old.bootstrap is not None
        assert list(fleet._pages.values()) == [old.bootstrap]
        new = fleet.join(DiscoveredEngine(prefill("new", 2)))
        assert (old.bootstrap, new.bootstrap, fleet._pages) == (None, None, {})
        assert "engine old: prefill and decode take two steps" in caplog.text
        assert "at 127.0.0.1:9998, too; give each its own" in caplog.text
        fleet.leave("old")
        assert new.bootstrap is not None
        assert list(fleet._pages.values()) == [new.bootstrap]
        page = new.bootstrap
        fleet.join(DiscoveredEngine(EngineSpec("near", "http://127.0.0.1:3", "decode")))
        assert new.bootstrap is page  # nothing has changed: what is known of it stays
        fleet.join(DiscoveredEngine(EngineSpec("far", "http://10.0.0.1:3", "decode")))
        assert (new.bootstrap, fleet._pages) == (None, {})
        fleet.leave("far")
        assert list(fleet._pages.values()) == [new.bootstrap]


@with_deadline
async def test_an_engine_that_cannot_join_leaves_its_place_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bed(0, discovery=("http",), policy="conductor", tokenizer=("none",), engines_max=2) as b:
        fleet, reconciler = b.proxy.fleet, b.proxy._reconciler
        assert reconciler is not None
        became = b.proxy._dispatcher.became

        def broken(engine: Engine) -> None:
            if engine.name == "bad":
                raise RuntimeError("not today")
            became(engine)

        monkeypatch.setattr(b.proxy._dispatcher, "became", broken)
        specs = [EngineSpec(name, f"http://127.0.0.1:{port}") for port, name in ((1, "bad"), (2, "good"))]
        for _ in range(3):
            reconciler._found("http", [DiscoveredEngine(spec) for spec in specs], frozenset())
            assert [engine.name for engine in b.proxy.engines] == ["good"]
        assert reconciler._membership.refused["broken"] == 1
        assert fleet.room == 1
        b.proxy.check_integrity()


@with_deadline
async def test_an_engine_that_fails_once_it_is_in_leaves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not there when join has raised, and can join when what was wrong is mended. Its place is
    another's when the data plane has let go of it; nobody tries it again because of that."""
    async with bed(0, discovery=("http",), policy="conductor", tokenizer=("none",), engines_max=2) as b:
        fleet, freed = b.proxy.fleet, 0

        def looked() -> None:
            nonlocal freed
            freed += 1

        def broken(engine: Engine, relay: object) -> None:
            raise RuntimeError("not today")

        fleet.freed = looked
        bad = DiscoveredEngine(EngineSpec("bad", "http://127.0.0.1:1"), model="m")
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "attach_relay", broken)
            with pytest.raises(RuntimeError, match="not today"):
                fleet.join(bad)
        assert fleet.find("bad") is None
        assert not b.proxy.engines
        await until(lambda: fleet.room == 2)
        assert not freed
        b.proxy.check_integrity()
        fleet.join(bad)
        fleet.leave("bad")
        await until(lambda: freed == 1)


@with_deadline
async def test_a_model_that_is_no_text_is_mended(tmp_path: Path) -> None:
    """Half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    told = tmp_path / "engines.json"

    def tell(model: str) -> None:
        row = {"name": "e", "url": "http://127.0.0.1:9", "model": model}
        told.write_text(json.dumps({"engines": [row]}))

    tell("\ud800")
    async with bed(0, discovery=(f"file:{told}",)) as b:
        assert not b.proxy.engines
        reconciler = b.proxy._reconciler
        assert reconciler is not None
        assert reconciler._membership.refused["broken"] == 1
        b.proxy.check_integrity()
        tell("fine")
        await until(lambda: len(b.proxy.engines) == 1)
        assert b.proxy.fleet.find("e") is not None
        b.proxy.check_integrity()


@with_deadline
async def test_a_page_that_cannot_be_made_is_answered() -> None:
    async with bed(1) as b:
        b.proxy._pages._data = None  # type: ignore[assignment]
        assert (await b.ask("GET", "/ui/data")).status == 500
        assert (await b.ask("GET", "/health")).status == 200


def test_a_host_of_other_letters_is_written_as_dns_has_it() -> None:
    assert host_field("b\u00fccher", 8000) == "xn--bcher-kva:8000"
    label = "a" * 55 + "\u00fc"
    assert host_field(label, 8000).endswith(":8000")
    assert host_field("::1", 80) == "[::1]:80"


def test_engines_have_as_many_places_as_the_indexes_have_holders() -> None:
    some = tuple(EngineSpec(f"e{number}", f"http://h{number}:1") for number in range(3))
    assert ProxySettings(engines=some).places == 3
    assert ProxySettings(engines=some, discovery=("http",), engines_max=100).places == 100
    with pytest.raises(Exception, match="3 engines are given, 2 may be there"):
        ProxySettings(engines=some, discovery=("http",), engines_max=2)


def test_more_than_a_policy_can_look_at_is_refused_and_not_cut() -> None:
    pool = tuple(EventSource(f"n{number}", "tcp://h:1", pool=True) for number in range(48))
    http: dict[str, Any] = {"discovery": ("http",)}
    assert ProxySettings(**http, events=pool, engines_max=2000, policy="conductor").places == 2000
    with pytest.raises(ConfigError, match=r"2,001 engines and 48 nodes .* 2,048 .* engines_max to 2,000"):
        ProxySettings(**http, events=pool, engines_max=2001, policy="conductor")
    assert ProxySettings(**http, events=pool, engines_max=5000, policy="round_robin").places == 5000
    many = tuple(EngineSpec(f"e{number}", f"http://h{number}:1") for number in range(2049))
    with pytest.raises(ConfigError, match=r"2,049 engines and 0 nodes .* take several proxies"):
        ProxySettings(engines=many, policy="conductor")
    assert ProxySettings(engines=many).places == 2049
