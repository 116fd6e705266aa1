"""Sums, samples and last requests: bounded, and right."""

from __future__ import annotations

import math

import pytest

from moonpool.disagg_proxy.ui.history import (
    FRESH_MAX,
    LAST_MAX,
    POINTS_MAX,
    STEP_S,
    STEPS_MAX,
    History,
    Totals,
)

from .made import finished


class Gauges:
    def __init__(self) -> None:
        self.wait_s = 0.0
        self.rejected: dict[str, int] = {}


def history_of(gauges: Gauges | None = None) -> History:
    gauges = gauges or Gauges()
    return History(lambda: gauges.wait_s, lambda: gauges.rejected)


def test_a_step_sums_up_what_ended_in_it() -> None:
    gauges = Gauges()
    history = history_of(gauges)
    history.gather(100.0)
    history.on_finish(finished(own=(600, 0, 0), pool=800, prompt_tokens=1000, cached_tokens=790))
    history.on_finish(finished(tokens=0))  # not known
    history.on_finish(finished(own=(50, 0, 0), why={"predicted_ttft_s": 0.2}))
    history.gather(100.5)
    history.on_finish(finished(stream=0))
    gauges.wait_s = 1.5
    history.gather(101.0)
    history.gather(100.0 + STEP_S)
    first, second = history.steps
    assert (first.requests, first.tokens, first.own, first.pool) == (4, 3000, 650, 200)
    assert (first.told, first.cached) == (1000, 790)
    assert history.total == Totals(3000, 650, 200, 1000, 790, saved=840)
    assert (first.streams, first.ttft_s) == (3, pytest.approx(1.5))
    assert first.wait_s == 1.5
    assert second.requests == 0
    assert list(history.points) == [(0.2, pytest.approx(0.5))]


def test_a_prediction_counts_from_arrival_as_what_is_observed_does() -> None:
    """It is made when a request is sent; one that waited in the queue before was not predicted badly."""
    history = history_of()
    history.gather(0.0)
    history.on_finish(finished(why={"predicted_ttft_s": 0.2}, sent_s=10.3))
    history.gather(1.0)
    assert list(history.points) == [(pytest.approx(0.5), pytest.approx(0.5))]


def test_what_an_engine_of_a_pair_had_is_told_by_prefill() -> None:
    apart = finished(
        prefill=1, own=(0, 300, 0), prompt_tokens=1000, cached_tokens=990, prefill_cached_tokens=280
    )
    assert apart.cached == 280
    assert apart.reused == (300, 0)


@pytest.mark.parametrize(
    "odd",
    [{"first_byte_s": 0.0}, {"status": 500}, {"stream": 0}],
)
def test_what_tells_no_first_token_is_no_sample(odd: dict[str, float]) -> None:
    history = history_of()
    history.gather(0.0)
    history.on_finish(finished(why={"predicted_ttft_s": 0.2}, **odd))
    history.gather(1.0)
    assert not history.points
    assert history.steps[0].streams == 0


def test_a_policy_of_ones_own_may_say_odd_things() -> None:
    history = history_of()
    history.gather(0.0)
    for odd in ("soon", math.nan, None):
        history.on_finish(finished(why={"predicted_ttft_s": odd}))  # type: ignore[dict-item]
    history.gather(1.0)
    assert not history.points
    assert history.steps[0].streams == 3


def test_nothing_grows_without_end() -> None:
    history = history_of()
    for at in range(STEPS_MAX + 50):
        for _ in range(10):
            history.on_finish(finished(why={"predicted_ttft_s": 0.2}))
        history.gather(at * STEP_S)
    for _ in range(FRESH_MAX + 100):
        history.on_finish(finished())
    history.gather((STEPS_MAX + 50) * STEP_S)
    assert history.steps[-1].requests == FRESH_MAX  # the oldest were forgotten
    assert (len(history.steps), len(history.last)) == (STEPS_MAX, LAST_MAX)
    assert len(history.points) == POINTS_MAX
    assert history.steps[0].at_s == 51 * STEP_S


def test_a_pause_leaves_a_gap_and_not_a_long_step() -> None:
    history = history_of()
    for now_s in (0.0, 1.0, 300.0, 300.0 + STEP_S + 1, 300.0 + 2 * STEP_S):
        history.gather(now_s)
    assert [step.at_s for step in history.steps] == [0.0, 300.0, 300.0 + STEP_S, 300.0 + 2 * STEP_S]


def test_refusals_of_the_last_quarter_of_an_hour() -> None:
    gauges = Gauges()
    gauges.rejected = {"ttft": 1000}
    history = history_of(gauges)
    assert history.rejected_lately(gauges.rejected) == {}
    history.gather(0.0)
    gauges.rejected = {"ttft": 1001, "gap": 2}
    assert history.rejected_lately(gauges.rejected) == {"ttft": 1, "gap": 2}
    for at in range(2 * STEPS_MAX):
        history.gather(at * STEP_S)
    assert history.rejected_lately(gauges.rejected) == {}
