"""What engines of SGLang say of themselves, and mock engines of its kind behind a whole proxy."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moonpool.core.config.proxy_section import HealthChecks
from moonpool.disagg_proxy.engines import health
from moonpool.disagg_proxy.engines.engine import Engine
from moonpool.disagg_proxy.engines.sglang import (
    ServerInfo,
    read_server_info,
)
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings
from moonpool.disagg_proxy.tools.mock_engine.server import MockEngine
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings
from tests.disagg_proxy.dispatch.handover_bed import (
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
from tests.disagg_proxy.dispatch.one_shot_bed import (
    BODY,
    CHAT,
)
from tests.disagg_proxy.fleet_bed import Fleet, fleet, play, text_of
from tests.disagg_proxy.harness import bed, with_deadline

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

        async def slow(address: Any, path: str, connect_s: float = 0.0, **_: Any) -> Any:
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

    async def late(address: Any, path: str, connect_s: float = 0.0, **_: Any) -> Any:
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

        async def slow(address: Any, path: str, connect_s: float | None = None, **_: Any) -> Any:
            await asyncio.sleep(1.0 if path == "/health" else 0)  # more than timeout_s
            return await real(address, path, connect_s)

        monkeypatch.setattr(health, "_get", slow)
        await health.HealthChecker(engine, checks).check()
        assert engine.liveness.healthy

        async def busy(address: Any, path: str, connect_s: float | None = None, **_: Any) -> Any:
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
