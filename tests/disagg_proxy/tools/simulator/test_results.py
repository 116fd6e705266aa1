import math
import random

import pytest

from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.loads import MOMENTS_MAX, Loads
from moonpool.disagg_proxy.tools.simulator.results import Results, Slo
from moonpool.disagg_proxy.tools.simulator.run_plots import over_time
from moonpool.disagg_proxy.tools.simulator.sample import Sample
from moonpool.disagg_proxy.tools.simulator.trace import Arrival


def served(at_s: float, ttft_s: float, *, gap_s: float = 0.0, predicted_s: float = math.nan) -> Job:
    job = Job(1, Arrival(at_s, 1000, 5, (1, 2)), own=200, fetched=300)
    job.first_s = at_s + ttft_s
    job.gap_s = gap_s
    job.predicted_ttft_s = predicted_s
    return job


def refused(at_s: float, why: str) -> Job:
    return Job(1, Arrival(at_s, 1000, 5, (1, 2)), why_not=why)


def test_a_sample_keeps_all_and_then_some_of_all(rng: random.Random) -> None:
    sample = Sample(2, 1000)
    for number in range(1000):
        sample.add((number, -number))
    assert list(sample.columns[0]) == list(range(1000))
    for number in range(1000, 50_000):
        sample.add((number, -number))
    first, second = sample.columns
    assert (len(sample), sample.count) == (1000, 50_000)
    assert all(one == -other for one, other in zip(first, second, strict=True))
    assert sum(first) / 1000 == pytest.approx(25_000, rel=0.1)


def test_the_summary_counts_everybody() -> None:
    results = Results()
    for number in range(9):
        results.add(served(float(number), 1.0 + number, gap_s=0.1, predicted_s=1.5 + number))
    results.add(refused(20.0, "ttft"))
    found = results.summary(Slo(5.0, 0.2))
    assert (found.requests, found.refused, dict(results.reasons)) == (10, 1, {"ttft": 1})
    assert (found.ttft_mean_s, found.ttft_p50_s, found.ttft_p90_s) == (5.0, 5.0, 9.0)
    assert found.good == 0.5
    assert results.summary(Slo(5.0, 0.05)).good == 0.0
    assert (found.own, found.fetched) == (0.2, 0.3)
    assert found.computed == pytest.approx(0.5)
    assert (found.error_p50_s, found.error_p99_s, found.bias_s) == (0.5, 0.5, -0.5)


def test_nothing_at_all_has_no_mean() -> None:
    found = Results().summary(Slo())
    assert math.isnan(found.ttft_mean_s)
    assert math.isnan(found.error_p90_s)
    assert (found.requests, found.good) == (0, 0.0)


def test_many_requests_take_the_memory_of_a_few(rng: random.Random) -> None:
    results = Results(kept_max=2_000)
    for number in range(30_000):
        results.add(refused(float(number), "gap") if number % 3 == 0 else served(float(number), rng.random()))
    found = results.summary(Slo(0.5))
    assert len(results.ttft_s) == len(results.refused_s) == 2_000
    assert (found.requests, found.refused) == (30_000, 10_000)
    assert found.good == pytest.approx(1 / 3, abs=0.04)
    assert found.ttft_p90_s == pytest.approx(0.9, abs=0.05)
    _, _, taken, gone = over_time(results)
    assert sum(taken) == pytest.approx(20_000)
    assert sum(gone) == pytest.approx(10_000)


def test_loads_are_seen_at_regular_moments_however_long_it_takes() -> None:
    loads = Loads()
    for tick in range(40_000):
        at_s = 0.1 * tick
        if at_s >= loads.next_s:
            loads.add(at_s, math.sin(at_s / 100), 1 - math.sin(at_s / 100))
    assert MOMENTS_MAX / 2 <= len(loads.at_s) < MOMENTS_MAX
    steps = [later - sooner for sooner, later in zip(loads.at_s, loads.at_s[1:], strict=False)]
    assert max(steps) < loads.every_s + 0.2
    assert loads.correlation() == pytest.approx(-1.0)


def test_what_never_moves_correlates_with_nothing() -> None:
    loads = Loads()
    assert math.isnan(loads.correlation())
    for tick in range(10):
        loads.add(float(tick), 1.0, float(tick))
    assert math.isnan(loads.correlation())
