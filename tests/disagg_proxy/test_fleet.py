"""A fleet of mock engines behind the proxy, over real sockets: who serves what, and nothing that is left
behind. The real engine stands in tests/connectors/vllm and in the demo.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence

import aiohttp
import pytest

from moonpool.disagg_proxy.conductor.calibration import FEWEST
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings, Timing
from tests.disagg_proxy.fleet_bed import SEED, fleet, play, text_of


@pytest.mark.parametrize("events", [False, True], ids=["dispatched", "events"])
def test_a_conversation_stays_where_its_prefix_lies(events: bool) -> None:
    async def scenario() -> None:
        async with fleet("both", "both", "both", events=events) as f:
            homes: dict[int, str] = {}
            for turn in range(4):
                for talk in range(6):
                    _, why = await f.ask(f"talk {talk}: " + "lorem ipsum " * 200 * (turn + 1))
                    assert homes.setdefault(talk, why["engine"]) == why["engine"], (turn, why)
                    assert (why["own_tokens"] > 0) == (turn > 0)
                if events:
                    await f.hear()
            assert len(set(homes.values())) == 3
            await f.settle()

    play(scenario)


def test_text_and_ids_of_one_prompt_are_one_prefix() -> None:
    async def scenario() -> None:
        async with fleet("both", "both") as f:
            first, why = await f.ask("x" * 4_000)
            ids = [0x78787878] * 1_000
            body = {"model": "mock", "prompt": ids, "max_tokens": 4}
            headers = {"X-Moonpool-Decision": "1"}
            async with f.session.post(f.url + "/v1/completions", json=body, headers=headers) as answer:
                again = json.loads(answer.headers["X-Moonpool-Decision"])
                assert text_of(await answer.json()) == text_of(first)
            assert again["engine"] == why["engine"]
            assert again["own_tokens"] >= 960
            assert again["prompt_tokens"] == why["prompt_tokens"] == 1_000

    play(scenario)


def test_a_salt_has_prefixes_of_its_own() -> None:
    async def scenario() -> None:
        async with fleet("both", events=True) as f:
            for salt, own in (("a", False), ("a", True), ("b", False), (None, False), ("b", True)):
                more = {} if salt is None else {"cache_salt": salt}
                _, why = await f.ask("lorem ipsum " * 200, **more)
                assert (why["own_tokens"] > 0) == own, (salt, why)
                await f.hear()
            broken = b'{"model":"mock","prompt":"lorem","max_tokens":1,"cache_salt":"\\ud800"}'
            async with f.session.post(f.url + "/v1/completions", data=broken) as answer:
                await answer.read()
            assert f.proxy._dispatcher.late_errors == 0
            await f.settle()

    play(scenario)


def test_long_prompts_are_split_and_short_rests_are_not() -> None:
    async def scenario() -> None:
        async with fleet("prefill", "prefill", "decode", "decode") as f, fleet("both") as plain:
            for number in range(8):
                prompt = f"{number} " + "long " * 1_000
                answer, why = await f.ask(prompt)
                assert why["prefill"].startswith("prefill")
                assert text_of(answer) == text_of((await plain.ask(prompt))[0])
                _, short = await f.ask(f"short {number}")
                assert short["prefill"] is None
            fetched = sum(f.engines[name].counts["fetched_tokens"] for name in ("decode-2", "decode-3"))
            assert fetched > 8 * 1_200
            await f.settle()

    play(scenario)


def test_without_tokens_requests_are_served_blind_and_counted() -> None:
    async def scenario() -> None:
        async with fleet("both", "both", tokenizer=("none",)) as f:
            _, why = await f.ask("y" * 4_000)
            assert why["prompt_tokens"] == 0
            async with f.session.get(f.url + "/metrics") as page:
                assert "moonpool_proxy_blind_decisions_total 1.0" in await page.text()

    play(scenario)


def test_an_engine_that_dies_is_forgotten_and_its_requests_go_elsewhere() -> None:
    async def scenario() -> None:
        async with fleet("both", "both") as f:
            _, why = await f.ask("z" * 4_000)
            await f.engines[why["engine"]].close()
            _, elsewhere = await f.ask("z" * 4_000)
            assert elsewhere["engine"] != why["engine"]
            dispatcher = f.proxy._dispatcher
            while dispatcher.healthy_count == 2:
                await asyncio.sleep(0.01)
            gone = next(engine for engine in f.proxy.engines if engine.name == why["engine"])
            assert dispatcher.scheduler.inflight.workers[gone.place].load.requests == 0

    play(scenario)


@pytest.mark.parametrize(
    "handover", ["two_step", "concurrent", "one_shot", "context_first", "generation_first"]
)
def test_clients_that_leave_at_any_moment_leave_nothing(handover: str) -> None:
    """Queued, tokenised, in prefill, between, streaming: whenever it was."""

    async def scenario() -> None:
        timing = Timing(step_s=0.002, prefill_s_per_token=2e-6, handover_s_per_token=1e-6)
        async with fleet(
            "prefill",
            "prefill",
            "decode",
            "decode",
            mock=MockSettings(timing=timing, lease_s=1.0),
            handover=handover,
        ) as f:
            rng = random.Random(SEED)
            print("seed", SEED)
            patience_s = 0.05

            def aborted() -> int:
                return sum(engine.counts["aborted"] for engine in f.engines.values())

            async def visit(number: int) -> None:
                prompt = f"{number % 40} " + "word " * rng.randrange(1_000)
                try:
                    async with asyncio.timeout(rng.expovariate(1 / patience_s)):
                        await f.ask(
                            prompt, explain=False, stream=rng.random() < 0.5, max_tokens=rng.randrange(1, 30)
                        )
                except (TimeoutError, aiohttp.ClientError, ValueError):
                    pass  # left; or a stream, which is no JSON

            batch, before = 0, 0
            while batch < 10 or (aborted() <= 50 and batch < 50):
                await asyncio.gather(*(visit(100 * batch + number) for number in range(100)))
                if aborted() < before + 5:  # a slow machine: they leave before an engine has heard of them
                    patience_s *= 2
                batch, before = batch + 1, aborted()
            await f.settle()
            assert aborted() > 50
            assert sum(engine.counts["rooms_reused"] for engine in f.engines.values()) == 0

    play(scenario)


def test_the_time_of_a_prefill_ends_with_the_first_token_not_with_the_head() -> None:
    """Less than half of what the model takes for granted at first. The head comes at once."""

    async def scenario() -> None:
        took_s = []
        async with fleet("both", mock=MockSettings(timing=Timing(prefill_s_per_token=5e-5))) as f:
            for number in range(FEWEST):
                body = {"model": "mock", "prompt": f"{number} " + "x" * 3_994, "stream": True}
                async with f.session.get(f.url + "/metrics") as page:
                    assert "ttft_observed_over_predicted{" not in await page.text()  # nor is it 1
                began_s = time.monotonic()
                async with f.session.post(f.url + "/v1/completions", json=body) as answer:
                    await answer.read()
                took_s.append(time.monotonic() - began_s)
            await f.settle()
            model = f.proxy._dispatcher.workers[0].prefill_model
            own = model.regression.own
            assert own.samples + own.odd == FEWEST  # one that was held up is too long
            print(f"learnt {model.predict(1_000):.4f} s; clients waited", *(f"{s:.3f}" for s in took_s))
            early_s = 0.001  # timers of the event loop have whole milliseconds
            assert 0.05 - early_s <= model.predict(1_000) <= max(took_s)
            whole_s = f.proxy.counters().engines[0].first_byte[1]
            assert FEWEST * (0.05 - early_s) <= whole_s <= sum(took_s)
            worker = f.proxy._dispatcher.workers[0]
            assert worker.ttft_ratios.observed == FEWEST
            async with f.session.get(f.url + "/metrics") as page:
                text = await page.text()
            name = worker.name
            assert f'moonpool_proxy_ttft_predictions_total{{engine="{name}"}} {FEWEST}.0' in text
            assert f'moonpool_proxy_ttft_observed_over_predicted{{engine="{name}",quantile="0.9"}}' in text
            learnt = model.regression.kind.samples
            assert f'moonpool_proxy_prefill_kind_samples{{engine="{name}"}} {learnt}.0' in text
            assert f'moonpool_proxy_prefill_own_share{{engine="{name}"}} ' in text
            assert f'moonpool_proxy_stall_seconds{{engine="{name}"}} 0.0' in text

    play(scenario)


@pytest.mark.parametrize("handover", ["two_step", "one_shot"])
def test_whole_engines_beside_one_for_prefill_compute_long_prompts_too(handover: str) -> None:
    """At the same time, so that lines form. It once took every prompt of more than 256 tokens."""

    async def scenario() -> None:
        timing = Timing(prefill_s_per_token=2e-5)
        async with fleet("prefill", "both", "both", mock=MockSettings(timing=timing), handover=handover) as f:
            asked = [f.ask(f"{number} " + "x" * 4_000, stream=False) for number in range(60)]
            decisions = [decision for _, decision in await asyncio.gather(*asked)]
            computed = Counter(each.get("prefill") or each["engine"] for each in decisions)
            print("computed", computed)
            assert set(computed) <= {"prefill-0", "both-1", "both-2"}
            # 15 each; 5 where most come after a pause, when it is known how fast prefill is
            assert min(computed["both-1"], computed["both-2"]) >= 3
            await f.settle()

    play(scenario)


class Broken:
    """A policy that fails where it looks at tokens."""

    uses_tokens = True

    def choose(self, request: Request, instances: Sequence[Worker], now_s: float) -> Choice:
        raise ValueError("not today")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_policy_that_fails_costs_no_request() -> None:
    async def scenario() -> None:
        async with fleet("both", "both", policy=f"{__name__}:Broken") as f:
            for _ in range(3):  # first by way of the tokeniser, then at once
                await f.ask("some text " * 20, explain=False)
            assert f.proxy._dispatcher.late_errors == 1
            await f.settle()

    play(scenario)


def test_predicted_and_observed_cache_hits_agree() -> None:
    async def scenario() -> None:
        async with fleet("both", "both", events=True) as f:
            for number in range(60):
                await f.ask(f"{number % 5} " + "same text again " * 200)
                if number < 5:
                    await f.hear()
            await f.settle()
            watches = f.proxy._dispatcher.scheduler.inflight.watches.values()
            assert sum(watch.reports for watch in watches) == 60
            assert sum(watch.wrong for watch in watches) == 0

    play(scenario)
