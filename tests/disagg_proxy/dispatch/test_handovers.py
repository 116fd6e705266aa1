"""Hand-overs between mock engines behind the proxy, in all forms: the right text, whoever dies or leaves, and
nothing that stays behind. What is SGLang's alone stands in test_one_shot*.py; real engines in
tests/connectors/vllm/pd and test_with_sglang.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moonpool._native import PrefillModel
from moonpool.core.config.proxy_section import HealthChecks
from moonpool.disagg_proxy.engines import bootstrap_trust
from moonpool.disagg_proxy.tools.mock_engine.server import MockEngine
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings, Timing
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
from tests.disagg_proxy.fleet_bed import SEED, Fleet, fleet, play, text_of

FORMS = ("two_step", "concurrent")
ALL_FORMS = (*FORMS, "one_shot", "context_first", "generation_first")
SLOW = Timing(step_s=0.005, prefill_s_per_token=5e-5, handover_s_per_token=5e-5)


async def stream_of(f: Fleet, prompt: str, **more: Any) -> str:
    body = {"model": "mock", "prompt": prompt, "max_tokens": 4, "stream": True, **more}
    async with f.session.post(f.url + "/v1/completions", json=body) as answer:
        assert answer.status == 200
        events = [line[6:] for line in (await answer.read()).split(b"\n\n") if line]
    assert events.pop() == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@pytest.mark.parametrize(
    ("handover", "form"),
    [
        ("auto", "concurrent"),
        ("concurrent", "concurrent"),
        ("two_step", "two_step"),
        ("one_shot", "one_shot"),
        ("context_first", "context_first"),
        ("generation_first", "generation_first"),
    ],
)
@pytest.mark.parametrize("policy", ["conductor", "round_robin"])
def test_all_forms_give_the_same_answers(handover: str, form: str, policy: str) -> None:
    async def scenario() -> None:
        async with fleet("prefill", "prefill", "decode", "decode", policy=policy, handover=handover) as f:
            for number in range(8):
                answer, why = await f.ask(f"{number} {PROMPT}")
                assert why["handover"] == form
                assert text_of(answer) == text_for(f"{number} {PROMPT}")
                assert await stream_of(f, f"s{number} {PROMPT}") == text_for(f"s{number} {PROMPT}")
            decodes = [engine for name, engine in f.engines.items() if name.startswith("decode")]
            assert sum(engine.counts["fetched_tokens"] for engine in decodes) > 16 * 1_200
            assert sum(engine.counts["failed_fetches"] for engine in decodes) == 0
            await f.settle()
            counted = await metrics_of(f)
            label = f'form="{form}"'
            assert counted[f'moonpool_proxy_handovers_total{{{label},outcome="answered"}}'] == 16
            assert counted[f"moonpool_proxy_handovers_untaken_total{{{label}}}"] == 0
            for family in ("gap", "first_byte"):
                assert counted[f"moonpool_proxy_handover_{family}_seconds_count{{{label}}}"] == 8
            up = [value for name, value in counted.items() if name.startswith("moonpool_proxy_bootstrap_up")]
            assert up == ([1.0, 1.0] if form == "concurrent" else [])

    play(scenario)


def test_a_short_rest_is_not_split() -> None:
    async def scenario() -> None:
        async with fleet("prefill", "decode", handover="concurrent") as f:
            _, why = await f.ask("short")
            assert (why["prefill"], why["handover"]) == (None, None)
            assert engine_of(f, "prefill").counts["requests"] == 0

    play(scenario)


def test_decode_is_asked_while_prefill_computes() -> None:
    async def scenario() -> None:
        mock = MockSettings(timing=Timing(prefill_s_per_token=1e-3))
        async with fleet("prefill", "decode", handover="concurrent", mock=mock) as f:
            asking = asyncio.ensure_future(f.ask(PROMPT))
            prefill, decode = engine_of(f, "prefill"), engine_of(f, "decode")
            await until(lambda: bool(decode.batch.running and prefill.batch.running))
            assert prefill.counts["finished"] == 0
            await asking
            await f.settle()
            model = f.proxy._dispatcher.workers[0].prefill_model
            assert model.regression.own.samples == 1

    play(scenario)


def test_equal_engines_share_what_is_not_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is left out because of a first guess that the others have turned out not to deserve. One
    whose first prompt is late for another reason would be: so what is learnt is what the engine takes."""
    observe = PrefillModel.observe

    def on_time(
        model: PrefillModel, tokens: int, own: int, pool: int, seconds: float, *more: Any, **named: Any
    ) -> Any:
        return observe(model, tokens, own, pool, 2e-5 * tokens, *more, **named)

    monkeypatch.setattr(PrefillModel, "observe", on_time)

    async def scenario() -> None:
        mock = MockSettings(timing=Timing(prefill_s_per_token=2e-5))
        async with fleet("prefill", "prefill", "decode", "decode", mock=mock) as f:
            for number in range(80):
                await stream_of(f, f"{number} {PROMPT}")
            served = {name: engine.counts["finished"] for name, engine in f.engines.items()}
            assert min(served.values()) >= 15, served

    play(scenario)


@pytest.mark.parametrize("handover", [*FORMS, "context_first", "generation_first"])
def test_a_short_prompt_does_not_wait_for_a_long_one(handover: str) -> None:
    async def scenario() -> None:
        mock = MockSettings(timing=SLOW_PREFILL)
        async with fleet("prefill", "decode", handover=handover, mock=mock) as f:
            asking = asyncio.ensure_future(f.ask(20 * PROMPT))
            prefill, decode = engine_of(f, "prefill"), engine_of(f, "decode")
            await until(lambda: bool(prefill.batch.running))
            answer, why = await f.ask(f"short {PROMPT}")
            assert text_of(answer) == text_for(f"short {PROMPT}")
            assert (why["prefill"], why["reason"]) == (None, "prefill_busy")
            assert not asking.done()
            assert text_of((await asking)[0]) == text_for(20 * PROMPT)
            _, why = await f.ask(f"another {PROMPT}")
            assert why["prefill"] == "prefill-0"  # which is idle
            await until(lambda: decode.accounts()["running"] == 0)

    play(scenario)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("handover", [*FORMS, "context_first", "generation_first"])
def test_a_prefill_engine_that_dies(handover: str, streams: bool) -> None:
    """Before its request comes, and in the middle of it; nobody but the request finds out."""

    async def scenario() -> None:
        async with fleet("prefill", "prefill", "decode", handover=handover, health=SELDOM) as f:

            async def ask(prompt: str) -> str:
                return await stream_of(f, prompt) if streams else text_of((await f.ask(prompt))[0])

            first, second = f.engines["prefill-0"], f.engines["prefill-1"]
            prefill_takes([first, second], 1e-2)
            asking = asyncio.ensure_future(ask("a " + PROMPT))
            await until(lambda: bool(first.counts["requests"] or second.counts["requests"]))
            hit, left = (first, second) if first.counts["requests"] else (second, first)
            prefill_takes([left], 1e-4)
            await hit.close()
            assert await asking == text_for("a " + PROMPT)
            # Where decode is asked at once it may find out first: then it has computed the prompt itself.
            at_once = handover in ("concurrent", "generation_first")
            by_decode = at_once and engine_of(f, "decode").counts["failed_fetches"] == 1
            assert left.counts["finished"] == 1 or (by_decode and not left.counts["requests"])
            for letter in "bcd":
                assert await ask(letter + PROMPT) == text_for(letter + PROMPT)
            await left.close()
            for letter in "efg":
                assert await ask(letter + PROMPT) == text_for(letter + PROMPT)
            decode = engine_of(f, "decode")
            await until(lambda: decode.accounts()["blocks_held"] == decode.accounts()["running"] == 0)

    play(scenario)


@pytest.mark.parametrize("handover", ALL_FORMS)
def test_a_decode_engine_that_dies(handover: str) -> None:
    async def scenario() -> None:
        # SGLang's decode fails when a lease ends; elsewhere those of the one that dies have to.
        mock = MockSettings(timing=SLOW_PREFILL, lease_s=30.0 if handover == "one_shot" else 0.5)
        async with fleet("prefill", "decode", "decode", handover=handover, mock=mock, health=SELDOM) as f:
            decodes = [engine for name, engine in f.engines.items() if name.startswith("decode")]
            asking = asyncio.ensure_future(f.ask(PROMPT))
            if handover in ("concurrent", "one_shot", "generation_first"):
                await until(lambda: any(decode.counts["requests"] for decode in decodes))
                dying = next(decode for decode in decodes if decode.counts["requests"])
            else:
                await until(lambda: engine_of(f, "prefill").counts["requests"] > 0)
                dying = decodes[0]
            await dying.close()
            answer, _ = await asking
            assert text_of(answer) == text_for(PROMPT)
            for letter in "abcd":
                assert text_of((await f.ask(letter + PROMPT))[0]) == text_for(letter + PROMPT)
            living = [engine for engine in f.engines.values() if engine is not dying]
            await until(lambda: all(engine.accounts()["blocks_held"] == 0 for engine in living))
            assert all(engine.accounts()["leases"] == 0 for engine in living)

    play(scenario)


@pytest.mark.parametrize("handover", ALL_FORMS)
def test_a_client_that_leaves_at_each_stage(handover: str) -> None:
    """In prefill, while blocks are fetched, while the answer streams: both engines are empty soon."""

    async def scenario() -> None:
        slow = Timing(step_s=0.02, prefill_s_per_token=2e-4, handover_s_per_token=2e-4)
        mock = MockSettings(timing=slow)
        async with fleet("prefill", "decode", handover=handover, mock=mock) as f:
            prefill, decode = engine_of(f, "prefill"), engine_of(f, "decode")
            stages: dict[str, Callable[[], bool]] = {
                "prefill": lambda: prefill.counts["requests"] > came,
                "fetching": lambda: bool(decode.batch.running) and prefill.leases.fetched > fetched,
                "streaming": lambda: any(job.made for job in decode.batch.running),
            }
            for stage, reached in stages.items():
                came, fetched = prefill.counts["requests"], prefill.leases.fetched
                body = {"model": "mock", "prompt": f"{stage} {PROMPT}", "max_tokens": 50, "stream": True}
                asking = asyncio.ensure_future(f.session.post(f.url + "/v1/completions", json=body))
                await until(reached)
                aborted = decode.counts["aborted"] + prefill.counts["aborted"]
                if asking.done():
                    (await asking).close()
                asking.cancel()
                await asyncio.wait([asking])
                await until(
                    lambda aborted=aborted: decode.counts["aborted"] + prefill.counts["aborted"] > aborted
                )
                await f.settle()

    play(scenario)


def test_a_prefill_engine_that_restarts_has_another_id() -> None:
    async def scenario() -> None:
        mock = MockSettings(lease_s=1.0)
        async with fleet("prefill", "decode", handover="concurrent", mock=mock, health=SELDOM) as f:
            await f.ask("before " + PROMPT)
            old, decode = engine_of(f, "prefill"), engine_of(f, "decode")
            await old.close()
            new = MockEngine(replace(old.settings, port=old.port))
            await new.open()
            try:
                fetched = decode.counts["fetched_tokens"]
                answer, why = await f.ask("stale " + PROMPT)  # nobody knows yet: decode computes it
                assert text_of(answer) == text_for("stale " + PROMPT)
                assert why["handover"] == "concurrent"
                assert decode.counts["failed_fetches"] == 1
                assert decode.counts["fetched_tokens"] == fetched
                await check(f)
                counted = await metrics_of(f)
                label = '{engine="prefill-0"}'
                assert counted["moonpool_proxy_bootstrap_restarts_total" + label] == 1
                assert counted["moonpool_proxy_stale_handovers_total" + label] >= 1
                await f.ask("after " + PROMPT)
                assert decode.counts["failed_fetches"] == 1
                assert decode.counts["fetched_tokens"] > fetched
                await until(lambda: new.accounts()["blocks_held"] == 0)
            finally:
                await new.close()

    play(scenario)


def test_without_a_bootstrap_page_two_steps_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with fleet("prefill", "decode", handover="concurrent", health=SELDOM) as f:
            bootstrap = f.proxy.engines[0].bootstrap
            assert bootstrap is not None
            assert (await f.ask("a " + PROMPT))[1]["handover"] == "concurrent"
            there, bootstrap.address = bootstrap.address, (bootstrap.address[0], 1)
            for _ in range(5):
                await check(f)
            answer, why = await f.ask("b " + PROMPT)
            assert why["handover"] == "two_step"
            assert text_of(answer) == text_for("b " + PROMPT)
            warnings = [
                r for r in caplog.records if r.levelno == logging.WARNING and "bootstrap" in r.getMessage()
            ]
            assert len(warnings) == 1
            bootstrap.address = there
            bootstrap.engine_left()  # asked anew at once
            await check(f)
            assert (await f.ask("c " + PROMPT))[1]["handover"] == "concurrent"
            await f.settle()

    play(scenario)


@pytest.mark.parametrize("streams", [False, True])
def test_another_engines_page_is_found_out(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its id is good, but it never hears of the requests: decode waits, then computes."""
    monkeypatch.setattr(bootstrap_trust, "LATE_S", 0.1)

    async def scenario() -> None:
        mock = MockSettings(lease_s=0.3)
        async with (
            fleet("both", mock=mock) as other,
            fleet("prefill", "decode", handover="auto", mock=mock, health=SELDOM) as f,
        ):
            bootstrap = f.proxy.engines[0].bootstrap
            assert bootstrap is not None
            bootstrap.address = ("127.0.0.1", engine_of(other, "both").port)
            await check(f)
            for number in range(bootstrap_trust.LATE_MAX):
                prompt = f"{number} {PROMPT}"
                got = await stream_of(f, prompt) if streams else text_of((await f.ask(prompt))[0])
                assert got == text_for(prompt)
            assert engine_of(f, "decode").counts["failed_fetches"] == bootstrap_trust.LATE_MAX
            _, why = await f.ask("then " + PROMPT)
            assert why["handover"] == "two_step"
            await f.settle()

    play(scenario)


def test_one_page_for_two_engines_is_believed_for_neither() -> None:
    async def scenario() -> None:
        often = HealthChecks(interval_s=0.02)
        async with fleet("prefill", "prefill", "decode", handover="auto", health=often) as f:
            first, second = (f.proxy.engines[place].bootstrap for place in (0, 1))
            assert first is not None
            assert second is not None
            assert first.up
            assert second.up
            second.address = first.address  # by another name of the host
            await until(lambda: not first.up and not second.up)
            answer, why = await f.ask(PROMPT)
            assert (text_of(answer), why["handover"]) == (text_for(PROMPT), "two_step")

    play(scenario)


def test_hand_overs_of_which_nothing_arrives_are_counted() -> None:
    async def scenario() -> None:
        mock = MockSettings(lease_s=0.1)
        async with (
            fleet("both", mock=mock) as other,
            fleet("prefill", "decode", handover="auto", mock=mock, health=SELDOM) as f,
        ):
            assert f.proxy.engines[0].bootstrap is not None
            f.proxy.engines[0].bootstrap.address = ("127.0.0.1", engine_of(other, "both").port)
            await check(f)
            answer, _ = await f.ask(PROMPT)
            assert text_of(answer) == text_for(PROMPT)
            await f.settle()
            counted = await metrics_of(f)
            assert counted['moonpool_proxy_handovers_untaken_total{form="concurrent"}'] == 1

    play(scenario)


@pytest.mark.parametrize("handover", ALL_FORMS)
def test_clients_may_use_one_request_id_for_all(handover: str) -> None:
    async def scenario() -> None:
        mock = MockSettings(timing=SLOW)
        async with fleet("prefill", "prefill", "decode", "decode", handover=handover, mock=mock) as f:

            async def ask(number: int) -> str:
                body = {"model": "mock", "prompt": f"{number} {PROMPT}", "max_tokens": 4}
                headers = {"X-Request-Id": "the-same"}
                async with f.session.post(f.url + "/v1/completions", json=body, headers=headers) as answer:
                    assert answer.headers["X-Request-Id"] == "the-same"
                    return text_of(await answer.json())

            texts = await asyncio.gather(*map(ask, range(12)))
            assert texts == [text_for(f"{number} {PROMPT}") for number in range(12)]
            decodes = [engine for name, engine in f.engines.items() if name.startswith("decode")]
            assert sum(engine.counts["failed_fetches"] for engine in decodes) == 0
            await f.settle()

    play(scenario)


def test_engines_that_come_and_go_cost_no_answer() -> None:
    """Prefill engines restart at random under load, with new ids at the same ports."""

    async def scenario() -> None:
        print("seed", SEED)
        rng = random.Random(SEED)
        mock = MockSettings(timing=SLOW, lease_s=0.3)
        roles = ("prefill", "prefill", "decode", "decode")
        async with fleet(*roles, handover="concurrent", mock=mock, health=HealthChecks(interval_s=0.05)) as f:
            expected = [text_for(f"{number} {PROMPT}") for number in range(10)]

            answered = 0
            busy = asyncio.Semaphore(6)

            async def restart() -> None:
                for count in range(10, 60, 10):
                    await until(lambda count=count: answered >= count)
                    name = rng.choice(["prefill-0", "prefill-1"])
                    old = f.engines[name]
                    await old.close()
                    f.engines[name] = MockEngine(replace(old.settings, port=old.port))
                    await f.engines[name].open()

            async def once(number: int) -> dict[str, Any]:
                answer, _ = await f.ask(f"{number % 10} {PROMPT}", explain=False)
                return dict(answer)

            async def ask(number: int) -> None:
                nonlocal answered
                async with busy:
                    answer = None
                    while answer is None:
                        try:
                            answer = await once(number)
                        except AssertionError as error:
                            # Two restarts in a row: what two engines broke under goes to no third one.
                            if "as another engine did" not in str(error):
                                raise
                assert text_of(answer) == expected[number % 10]
                answered += 1

            restarting = asyncio.ensure_future(restart())
            try:
                await asyncio.gather(*map(ask, range(60)))
                await restarting
                await f.settle()
            finally:
                for engine in f.engines.values():
                    await engine.close()

    play(scenario)


def test_what_a_client_says_of_hand_overs_is_replaced() -> None:
    async def scenario() -> None:
        async with fleet("prefill", "decode", handover="concurrent") as f:
            params = {
                "do_remote_prefill": True,
                "transfer_id": "mine",
                "remote_bootstrap_addr": "http://127.0.0.1:1",
            }
            answer, _ = await f.ask(PROMPT, kv_transfer_params=params)
            assert text_of(answer) == text_for(PROMPT)
            assert engine_of(f, "decode").counts["failed_fetches"] == 0

    play(scenario)
