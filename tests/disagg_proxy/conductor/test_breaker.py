"""What rests an engine, and what does not."""

from __future__ import annotations

from itertools import product

import pytest

from moonpool.disagg_proxy.conductor.breaker import Breaker, Verdict, verdict_on_status


def failed(breaker: Breaker, now: float) -> bool:
    return breaker.finished(Verdict.BAD, now, trial=breaker.started(now))


@pytest.mark.parametrize("status", [200, 302, 400, 401, 404, 422, 429, 499])
def test_these_answers_never_trip(status: int) -> None:
    breaker = Breaker(failures_max=2, open_s=1.0, open_s_max=8.0)
    for now in range(1000):
        breaker.finished(verdict_on_status(status), now, trial=breaker.started(now))
        assert breaker.closed
        assert breaker.allows(now)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_these_answers_are_failures(status: int) -> None:
    assert verdict_on_status(status) is Verdict.BAD


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(failures_max=3, open_s=1.0, open_s_max=8.0)
    assert not failed(breaker, 0.0)
    assert not failed(breaker, 0.0)
    breaker.finished(Verdict.GOOD, 0.0, trial=False)
    assert not failed(breaker, 0.0)
    assert not failed(breaker, 0.0)
    assert failed(breaker, 0.0)
    assert not breaker.closed
    assert not breaker.allows(0.99)


def test_one_trial_at_a_time_then_closed() -> None:
    breaker = Breaker(failures_max=1, open_s=1.0, open_s_max=8.0)
    failed(breaker, 0.0)
    assert breaker.allows(1.0)
    assert breaker.started(1.0)
    assert not breaker.allows(1.0)
    assert not breaker.started(1.0)
    assert breaker.finished(Verdict.GOOD, 2.0, trial=True)
    assert breaker.closed


def test_a_failed_trial_rests_twice_as_long_up_to_the_maximum() -> None:
    breaker, now, rests = Breaker(failures_max=1, open_s=1.0, open_s_max=5.0), 0.0, []
    failed(breaker, now)
    for _ in range(4):
        began = now
        while not breaker.allows(now):
            now += 0.5
        rests.append(now - began)
        failed(breaker, now)
    assert rests == [1.0, 2.0, 4.0, 5.0]


def test_a_client_that_leaves_is_no_verdict_but_frees_the_trial() -> None:
    breaker = Breaker(failures_max=1, open_s=1.0, open_s_max=8.0)
    breaker.finished(Verdict.NONE, 0.0, trial=False)
    assert breaker.closed
    failed(breaker, 0.0)
    assert breaker.started(1.0)
    breaker.finished(Verdict.NONE, 1.5, trial=True)
    assert not breaker.closed
    assert breaker.allows(1.5)


def test_invariants_over_all_short_histories() -> None:
    for history in product(Verdict, repeat=7):
        breaker = Breaker(failures_max=2, open_s=1.0, open_s_max=4.0)
        for now, verdict in enumerate(history):
            breaker.finished(verdict, now, trial=breaker.started(now))
            breaker.check_integrity()
