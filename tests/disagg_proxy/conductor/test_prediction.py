"""The cost models learn what engines cost, and survive nonsense."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from moonpool._native import DecodeModel, HandoverModel, PrefillModel, Regression
from moonpool.disagg_proxy.tools.simulator.machine import MACHINES

SEED = 20261121


def true_prefill_s(tokens: int, own: int, pool: int) -> float:
    """The paper's fit (facts of its figure 14), with a cost for tokens that come from the pool."""
    reused = own + pool
    return 0.06 + 1.146e-4 * (tokens - reused) + 7.194e-10 * (tokens**2 - reused**2) + 2.4e-6 * pool


def sample(rng: random.Random) -> tuple[int, int, int]:
    tokens = int(math.exp(rng.uniform(math.log(100), math.log(60_000))))
    own = rng.choice((0, rng.randrange(tokens)))
    pool = rng.choice((0, rng.randrange(tokens - own)))
    return tokens, own, pool


def worst_error(model: PrefillModel, rng: random.Random) -> float:
    shares = []
    for _ in range(200):
        case = sample(rng)
        true_s = true_prefill_s(*case)
        shares.append(abs(model.predict(*case) - true_s) / true_s)
    return sorted(shares)[int(len(shares) * 0.95)]


def plain_prefill_s(
    by: tuple[float, ...], tokens: int, own: int, pool: int, ahead_s: float, step_s: float, *, queued: bool
) -> float:
    """The formula of cost_model.hpp, with the coefficients as a regression has them."""
    base, token, square, load, latency, fetch_token, hidden, share, step, steps = by
    reused = min(own + pool, tokens)
    seconds = base + 1e-3 * token * (tokens - reused) + 1e-6 * square * (tokens**2 - reused**2)
    seconds += 1e-3 * load * min(own, tokens) + step_s * (step + 1e-3 * steps * (tokens - reused))
    if not pool:
        return seconds
    fetched = 1e-3 * min(pool, tokens)
    return seconds + (hidden * fetched if queued else latency + fetch_token * fetched + share * ahead_s)


def test_the_formulas() -> None:
    rng = random.Random(SEED)
    print("seed", SEED)
    for _ in range(500):
        model, by = PrefillModel(), tuple(rng.uniform(0, 1) for _ in range(10))
        assert model.regression.start(by)
        tokens, own, pool = (
            rng.randrange(1, 50_000),
            rng.randrange(50_000),
            rng.choice((0, rng.randrange(50_000))),
        )
        ahead_s, queued, step_s = rng.uniform(0, 9), rng.random() < 0.5, rng.choice((0.0, rng.random()))
        expected = plain_prefill_s(by, tokens, own, pool, ahead_s, step_s, queued=queued)
        found = model.predict(tokens, own, pool, ahead_s, queued=queued, step_s=step_s)
        assert found == pytest.approx(expected, rel=1e-9)
        longest = by[4] + max(by[5], by[6]) * 1e-3 * pool if pool else 0.0
        assert model.transfer_s(pool) == pytest.approx(longest, rel=1e-9)
        handover, decode = HandoverModel(), DecodeModel()
        assert handover.regression.start(by[:2])
        assert decode.regression.start(by[:4])
        assert handover.predict(tokens) == pytest.approx(by[0] + by[1] * 1e-3 * tokens, rel=1e-9)
        between_s = by[0] + by[1] * 7 + by[2] * 1e-3 * tokens
        assert decode.predict(7, tokens) == pytest.approx(between_s, rel=1e-9)
        stalled_s = decode.predict(7, tokens, step_s)
        assert stalled_s == pytest.approx(between_s + by[3] * step_s, rel=1e-9)
        assert decode.step_s(7, tokens) == decode.predict(7, tokens)
        assert decode.step_s(0.5, tokens) == pytest.approx(0.5 * decode.predict(1, tokens), rel=1e-9)
        assert decode.step_s(0, 0) == 0


@pytest.mark.parametrize("chunk", [512, 8_192, None])
def test_a_whole_engine_is_learnt_by_its_steps(chunk: int | None) -> None:
    """A step has a chunk of a prompt and a token of each request that decodes; without chunks decode stands
    still for a whole prompt."""
    rng = random.Random(SEED)
    print("seed", SEED)
    prefill, decode = PrefillModel(), DecodeModel()

    def step_s(batch: int, context: int) -> float:
        return 0.01 + 2e-4 * batch + 4e-8 * context

    def prefill_s(tokens: int, batch: int, context: int) -> float:
        steps = -(-tokens // chunk) if chunk and batch else 0
        return 0.01 + 2e-5 * tokens + steps * step_s(batch, context)

    def draw() -> tuple[int, int, int]:
        batch = rng.choice((0, rng.randrange(1, 60)))
        return rng.randrange(100, 30_000), batch, batch * rng.randrange(100, 8_000)

    for _ in range(600):
        tokens, batch, context = draw()
        stall_s = rng.choice((0.0, 0.05 * rng.random()))
        decode.observe(batch + 1, context + 500, step_s(batch + 1, context + 500) + stall_s, stall_s)
        prefill.observe(tokens, 0, 0, prefill_s(tokens, batch, context), step_s=decode.step_s(batch, context))
    errors = []
    for _ in range(300):
        tokens, batch, context = draw()
        assert decode.predict(batch + 1, context) == pytest.approx(step_s(batch + 1, context), rel=0.1)
        true_s = prefill_s(tokens, batch, context)
        found_s = prefill.predict(tokens, step_s=decode.step_s(batch, context))
        errors.append(abs(found_s - true_s) / true_s)
    assert sorted(errors)[int(len(errors) * 0.9)] < 0.1


def test_prefill_is_learnt_from_noisy_samples() -> None:
    rng = random.Random(SEED)
    print("seed", SEED)
    model = PrefillModel()
    before = worst_error(model, rng)
    for _ in range(300):
        case = sample(rng)
        model.observe(*case, true_prefill_s(*case) * rng.uniform(0.9, 1.1))
        model.regression.check_integrity()
    after = worst_error(model, rng)
    assert before > 0.3
    assert after < 0.08


def conversation(rng: random.Random) -> tuple[int, int]:
    """Long prompts of which most have their beginning in the engine's cache, in whole blocks, as the public
    conversation trace has them: (tokens, own)."""
    tokens = min(int(rng.lognormvariate(8.9, 1.0)), 120_000)
    return tokens, int(tokens * rng.choice((0.0, 0.0, rng.random(), 1.0))) // 512 * 512


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_what_is_reused_costs_its_load_and_leaves_the_rest_right(name: str) -> None:
    """Exact times of a machine that loads what is reused: each prompt, long or short, cold or cached."""
    rng, machine, model = random.Random(SEED), MACHINES[name], PrefillModel()
    print("seed", SEED)
    for _ in range(1_000):
        tokens, own = conversation(rng)
        model.observe(tokens, own, 0, machine.compute_s(tokens, own))
    for case in ((1_000, 0), (10_000, 0), (50_000, 0), (100_000, 0), (50_000, 49_000), (100_000, 50_000)):
        assert model.predict(*case) == pytest.approx(machine.compute_s(*case), rel=0.02)


def test_what_is_reused_is_learnt_under_noise_and_never_gets_below_nothing() -> None:
    """Of an engine that has it in the GPU's memory, where it costs nothing, and of one that loads it; within
    the noise that a sample has."""
    for load_s in (0.0, 2.4e-6, 2e-5):
        machine = replace(MACHINES["paper"], reuse_token_s=load_s)
        rng, model = random.Random(SEED), PrefillModel()
        for _ in range(1_000):
            tokens, own = conversation(rng)
            model.observe(tokens, own, 0, machine.compute_s(tokens, own) * rng.uniform(0.9, 1.1))
            model.regression.check_integrity()
        for case in ((10_000, 0), (50_000, 0), (50_000, 49_000), (50_000, 25_000)):
            assert model.predict(*case) == pytest.approx(machine.compute_s(*case), rel=0.1)
        assert min(model.regression.coefficients) >= 0.0


def test_few_samples_replace_the_prior() -> None:
    rng = random.Random(SEED)
    model = PrefillModel()
    for _ in range(20):
        tokens = rng.randrange(500, 5_000)
        model.observe(tokens, 0, 0, 1.0 + tokens * 1e-3)  # a slow engine: ten times the prior
    assert model.predict(2_000) == pytest.approx(3.0, rel=0.15)


def test_outliers_do_not_turn_the_model_over() -> None:
    rng = random.Random(SEED)
    model = PrefillModel()
    for _ in range(200):
        case = sample(rng)
        model.observe(*case, true_prefill_s(*case))
    expected = model.predict(8_000)
    for _ in range(5):
        model.observe(8_000, 0, 0, 300.0)  # an engine that stood still
    assert model.predict(8_000) < 2 * expected


def test_it_follows_an_engine_that_changes() -> None:
    model = HandoverModel()
    for _ in range(200):
        model.observe(4_000, 0.1)
    assert model.predict(4_000) == pytest.approx(0.1, rel=0.05)
    for _ in range(400):
        model.observe(4_000, 0.3)
    assert model.predict(4_000) == pytest.approx(0.3, rel=0.1)


def test_token_gap_grows_with_batch_and_context() -> None:
    rng = random.Random(SEED)
    model = DecodeModel()
    for _ in range(300):
        batch, context = rng.uniform(1, 64), rng.uniform(100, 200_000)
        model.observe(batch, context, 0.02 + 0.0002 * batch + 2e-8 * context)
    assert model.predict(32, 100_000) == pytest.approx(0.02 + 0.0064 + 0.002, rel=0.05)
    assert model.predict(64, 1_000) > model.predict(1, 1_000)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_nonsense_is_refused_and_counted(bad: float) -> None:
    model = HandoverModel()
    before = model.regression.coefficients
    assert model.observe(100, bad) is None
    assert model.regression.own.refused == 1
    assert model.regression.coefficients == before
    model.regression.check_integrity()


def test_a_million_equal_samples_do_not_wear_it_out() -> None:
    """Along directions without samples the variance must not grow beyond the prior's."""
    regression = Regression((1.0, 1.0), (1.0, 1.0), floor=0.01)
    for _ in range(5_000):
        regression.observe((1.0, 0.0), 2.0)
    regression.check_integrity()
    regression.observe((0.0, 1.0), 5.0)
    assert regression.predict((1.0, 0.0)) == pytest.approx(2.0, rel=0.02)
