"""What was saved, from the page of metrics to the command: a repeated prompt costs a mock engine nothing, and
the sums say how much that is."""

from __future__ import annotations

import asyncio
import json
import math
import random

import pytest

from moonpool.cli import run
from moonpool.disagg_proxy.conductor.savings import LEARNT, Saved, saved_by
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings, Timing
from moonpool.disagg_proxy.tools.savings import Savings, read_savings

from .fleet_bed import Fleet, fleet, play
from .ui.made import INSTANCES, finished

PREFILL_S_PER_TOKEN = 2e-4
MOCK = MockSettings(timing=Timing(prefill_s_per_token=PREFILL_S_PER_TOKEN))
LONG = 800  # tokens, of four bytes each


def prompts(rng: random.Random) -> list[str]:
    """As many as a model learns from, of many lengths; the last one is LONG."""
    lengths = [*(100 + 40 * at for at in range(LEARNT)), LONG]
    return ["".join(rng.choice("abcdefgh") for _ in range(4 * length)) for length in lengths]


async def ask(there: Fleet, prompt: str) -> None:
    body: dict[str, object] = {"model": "mock", "prompt": prompt, "max_tokens": 2, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with there.session.post(there.url + "/v1/completions", json=body) as answer:
        assert answer.status == 200
        await answer.read()


async def savings(there: Fleet) -> Savings:
    await there.settle()
    return await asyncio.to_thread(read_savings, [there.url])


def test_a_repeated_prompt_is_saved_and_a_new_one_is_not(
    rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with fleet("both", mock=MOCK) as there:
            made = prompts(rng)
            for prompt in made:
                await ask(there, prompt)
            before = await savings(there)
            assert (before.saved_tokens, before.saved_s) == (0, 0.0)
            for _ in range(4):
                await ask(there, made[-1])
            after = await savings(there)
            (engine,) = there.engines.values()
            assert after.saved_tokens == engine.counts["cached_tokens"]
            assert after.saved_tokens >= 4 * (LONG - MOCK.block_tokens)
            assert after.priced_prompts - before.priced_prompts == 4
            true_s = after.saved_tokens * PREFILL_S_PER_TOKEN
            assert 0.5 * true_s < after.saved_s < 3 * true_s
            assert after.ttft_s is not None
            assert after.recomputation_s is not None
            assert after.recomputation_s > 0.5 * LONG * PREFILL_S_PER_TOKEN

            assert await asyncio.to_thread(run, ["saved", "--url", there.url, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["saved_tokens"] == after.saved_tokens
            twice = ["saved", "--url", there.url, "--url", there.url]
            assert await asyncio.to_thread(run, twice) == 0
            assert f"{2 * after.saved_tokens:,}" in capsys.readouterr().out
            async with there.session.get(there.url + "/ui/data") as page:
                assert (await page.json())["total"]["saved"] == after.saved_tokens

    play(scenario)


def test_without_a_model_of_prefill_tokens_alone_are_known() -> None:
    """The engine's own report is all that a policy has which looks at no prompts."""

    async def scenario() -> None:
        async with fleet("both", policy="round_robin") as there:
            for _ in range(2):
                await there.ask("x" * 400, explain=False)
            found = await savings(there)
            assert found.saved_tokens == there.engines["both-0"].counts["cached_tokens"] > 0
            assert (found.priced_prompts, found.saved_s, found.ttft_s) == (0, 0.0, None)

    play(scenario)


def test_the_engines_report_goes_before_what_was_assumed() -> None:
    assumed = {"own": (600, 0, 0), "pool": 800, "prompt_tokens": 1000}
    assert saved_by(finished(**assumed)).tokens == 800  # type: ignore[arg-type]
    assert saved_by(finished(**assumed, cached_tokens=300)).tokens == 300  # type: ignore[arg-type]
    assert saved_by(finished(**assumed, cached_tokens=1000)).tokens == 1000  # type: ignore[arg-type]
    assert saved_by(finished(**assumed, status=500)) == Saved()  # type: ignore[arg-type]
    assert saved_by(finished(tokens=0)) == Saved()
    assert math.isnan(saved_by(finished(**assumed)).whole_s)  # type: ignore[arg-type]
    assert INSTANCES[0].prefill_model.regression.own.samples < LEARNT


def test_what_is_no_proxy_is_one_sentence(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    assert run(["saved", "--url", f"http://127.0.0.1:{free_port}"]) == 3
    assert "failed" in capsys.readouterr().err
