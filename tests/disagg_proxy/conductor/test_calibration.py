"""Predicted against observed: what was learnt of it, and that nonsense does not get in."""

from __future__ import annotations

import math
import random

import pytest

from moonpool._native import PrefillModel
from moonpool.disagg_proxy.conductor.calibration import FEWEST, Ratios
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.inflight import InflightTracker
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.data_plane.observations import Observation, Stage

SEED = 20261121
BLANK = Observation(
    0, 1, -1, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1, -1, -1, -1, 200, 0, 1, 0, 1, 0, 1, b"", b"", b""
)
NONSENSE = (math.nan, math.inf, -math.inf, -1.0, -1e300, 1e300)


def true_s(tokens: int, own: int) -> float:
    return 0.06 + 1.146e-4 * (tokens - own) + 7.194e-10 * (tokens**2 - own**2)


def test_quantiles_say_by_how_much_predictions_are_exceeded() -> None:
    ratios, chance = Ratios(), random.Random(SEED)
    assert ratios.quantile(0.9) == 1.0  # nothing is known
    for _ in range(400):
        ratios.observe(2.0, 2.0 * chance.uniform(0.8, 1.6))
    assert ratios.quantile(0.9) == pytest.approx(1.52, abs=0.05)
    assert ratios.quantile(0.5) == pytest.approx(1.2, abs=0.08)
    assert 0.2 < ratios.noise < 0.6


def test_quantiles_follow_an_engine_that_changes() -> None:
    ratios = Ratios()
    for _ in range(300):
        ratios.observe(1.0, 1.0)
    assert ratios.quantile(0.99) == 1.0
    for _ in range(300):
        ratios.observe(1.0, 3.0)
    assert ratios.quantile(0.5) == 3.0


@pytest.mark.parametrize("bad", NONSENSE)
def test_what_is_no_time_is_refused_and_counted(bad: float) -> None:
    ratios = Ratios()
    for _ in range(FEWEST):
        ratios.observe(1.0, 1.0)
    assert not ratios.observe(bad, 1.0)
    assert not ratios.observe(1.0, bad)
    assert (ratios.observed, ratios.refused, ratios.quantile(0.99)) == (FEWEST, 2, 1.0)


def test_a_model_that_is_fed_with_nonsense_between_stays_right() -> None:
    chance, model = random.Random(SEED), PrefillModel()
    print("seed", SEED)
    fed = 0
    for number in range(600):
        tokens = chance.randrange(100, 40_000)
        own = chance.choice((0, chance.randrange(tokens)))
        if number > 100 and chance.random() < 0.1:  # an engine that stood still, or answered from nowhere
            model.observe(tokens, own, 0, chance.choice((3_600.0, 86_400.0, 0.0)))
        if chance.random() < 0.2:
            model.observe(tokens, own, 0, chance.choice(NONSENSE[:5]))
            fed += 1
        model.observe(tokens, own, 0, true_s(tokens, own) * chance.uniform(0.95, 1.05))
        model.regression.check_integrity()
    assert model.regression.own.refused == fed
    assert model.regression.own.odd > 10
    for tokens, own in ((2_000, 0), (10_000, 0), (30_000, 15_000)):
        assert model.predict(tokens, own) == pytest.approx(true_s(tokens, own), rel=0.1)


def test_an_engine_that_really_became_ten_times_slower_is_believed() -> None:
    chance, model = random.Random(SEED), PrefillModel()
    for factor in (1, 10):
        for _ in range(200):
            tokens = chance.randrange(500, 20_000)
            model.observe(tokens, 0, 0, factor * true_s(tokens, 0))
    assert model.predict(10_000) == pytest.approx(10 * true_s(10_000, 0), rel=0.15)
    assert model.regression.own.odd <= 10


@pytest.mark.parametrize("bad", [math.nan, math.inf, -5.0, 1e9])
def test_times_that_cannot_be_leave_books_and_models_as_they_were(bad: float) -> None:
    """Of every stage; the request after it is predicted as if nothing had been."""
    tracker = InflightTracker([Worker(0, "e")])
    engine = tracker.workers[0]
    now_s = 100.0

    def one(number: int, first_s: float, end_s: float) -> None:
        tracker.on_dispatch(number, Choice(engine), Request(tokens=4_000), streams=True, now_s=now_s)
        seen = BLANK._replace(request=number, first_byte_s=first_s)
        tracker.observe(seen._replace(stage=Stage.BEGUN))
        tracker.observe(seen._replace(last_byte_s=end_s, completion_tokens=11))
        tracker.check_integrity()

    for number in range(40):
        one(number, now_s + 1.0, now_s + 2.0)
        now_s += 10.0
    before_s, gap_s = engine.prefill_model.predict(4_000), engine.decode_model.predict(1, 4_000)
    for number in range(40, 60):
        one(number, bad, now_s + 2.0)
        now_s += 10.0
        one(1_000 + number, now_s + 1.0, bad)
        now_s += 10.0
    assert tracker.nonsense == 40
    assert len(tracker) == engine.load.requests == 0
    assert engine.load.wait_s(now_s) == 0.0
    assert engine.prefill_model.predict(4_000) == pytest.approx(before_s, rel=0.05)
    assert engine.decode_model.predict(1, 4_000) == pytest.approx(gap_s, rel=0.05)
    assert engine.ttft_ratios.quantile(0.9) < 1.2
    assert (engine.ttft_ratios.observed, engine.ttft_ratios.refused) == (
        60,
        0,
    )  # those whose first token can be
    tracker.on_dispatch(9_999, Choice(engine), Request(tokens=4_000), streams=True, now_s=now_s)
    assert engine.load.wait_s(now_s) == pytest.approx(before_s, rel=0.05)


def test_first_tokens_are_compared_with_what_was_predicted_for_them() -> None:
    tracker = InflightTracker([Worker(0, "e")])
    engine = tracker.workers[0]
    for number in range(50):
        start_s = number * 10.0
        tracker.on_dispatch(number, Choice(engine), Request(tokens=4_000), streams=True, now_s=start_s)
        seen = BLANK._replace(request=number, first_byte_s=start_s + 2.0)
        tracker.observe(seen._replace(stage=Stage.BEGUN))
        tracker.observe(seen._replace(last_byte_s=start_s + 5.0, completion_tokens=31))
    assert engine.ttft_ratios.observed == 50
    assert engine.ttft_ratios.quantile(1.0) > 2.0  # of the first ones: the prior was of a faster engine
    assert engine.ttft_ratios.quantile(0.5) == pytest.approx(1.0, rel=0.1)


def test_a_prompt_of_unknown_length_teaches_nothing() -> None:
    tracker = InflightTracker([Worker(0, "e")])
    engine = tracker.workers[0]
    tracker.on_dispatch(1, Choice(engine), Request(), streams=True, now_s=0.0)
    tracker.observe(BLANK._replace(request=1, first_byte_s=2.0, stage=Stage.BEGUN))
    assert engine.prefill_model.regression.own.samples == 0
    assert engine.ttft_ratios.observed == 0
