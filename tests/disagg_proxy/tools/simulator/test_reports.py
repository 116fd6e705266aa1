"""Proxies that hear of engines late, at intervals, or with errors."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.policy import POLICIES, make_policy
from moonpool.disagg_proxy.data_plane.observations import Observation, Stage
from moonpool.disagg_proxy.tools.simulator.cluster import Cluster, ClusterSettings
from moonpool.disagg_proxy.tools.simulator.faults import parse
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.reports import PROMPT, ReportSettings
from moonpool.disagg_proxy.tools.simulator.runs import Plan, simulate
from moonpool.disagg_proxy.tools.simulator.simulated_proxy import SimulatedProxy
from moonpool.disagg_proxy.tools.simulator.trace import Arrival
from tests.disagg_proxy.tools.simulator.clusters import PLAIN, at_random, unshared_prompts

ONE = ClusterSettings(whole=1, machine=PLAIN)
PROMPTS = [Arrival(0.0, 1000, 11, (1, 2)), Arrival(0.0, 1000, 11, (3, 4))]


def heard(reports: ReportSettings, arrivals: list[Arrival]) -> list[tuple[float, Stage, float]]:
    """What one proxy was told of one instance: when, what, and at what time that was by the report."""
    told = []
    proxy = SimulatedProxy(make_policy("conductor"), reports=reports, seed=7)
    cluster = Cluster(ONE, [proxy], lambda job: None)
    observe = proxy.scheduler.observe

    def tell(observation: Observation, now_s: float | None = None) -> None:
        stage = Stage(observation.stage)
        at_s = observation.last_byte_s if stage is Stage.ENDED else observation.first_byte_s
        told.append((cluster.events.now_s, stage, at_s))
        observe(observation, now_s)

    proxy.scheduler.observe = tell  # type: ignore[method-assign]
    cluster.run(arrivals)
    cluster.check_integrity()
    return told


def test_reports_are_told_at_once_without_settings() -> None:
    assert all(now_s == at_s for now_s, _, at_s in heard(PROMPT, PROMPTS))


def test_a_lag_puts_reports_off_and_keeps_their_times() -> None:
    told = heard(ReportSettings(lag_s=0.75), PROMPTS)
    assert [at_s for _, _, at_s in told] == pytest.approx([at_s for _, _, at_s in heard(PROMPT, PROMPTS)])
    assert all(now_s == pytest.approx(at_s + 0.75) for now_s, _, at_s in told)


def test_reports_at_intervals_come_together() -> None:
    told = heard(ReportSettings(lag_s=0.1, period_s=2.0), PROMPTS)
    assert len(told) == 4
    assert {now_s for now_s, _, _ in told} == {2.0, 4.0}


def test_reports_of_a_silence_come_at_its_end() -> None:
    exact = heard(PROMPT, PROMPTS)
    told = heard(ReportSettings(silent_from_s=0.5, silent_s=1.0), PROMPTS)
    assert [at_s for _, _, at_s in told] == pytest.approx([at_s for _, _, at_s in exact])
    assert [now_s for now_s, _, _ in told] == pytest.approx(
        [1.5 if 0.5 <= at_s < 1.5 else at_s for _, _, at_s in exact]
    )
    assert told[0][0] == 1.5


def test_errors_change_the_times_of_stages_and_none_is_negative() -> None:
    told = heard(ReportSettings(noise=2.0), at_random(random.Random(5), 60, 1.0))
    exact = heard(PROMPT, at_random(random.Random(5), 60, 1.0))
    assert [now_s for now_s, _, _ in told] == [now_s for now_s, _, _ in exact]
    assert all(math.isfinite(at_s) for _, _, at_s in told)
    assert sum(now_s != at_s for now_s, _, at_s in told) > 100


def test_a_skewed_engine_reports_all_its_times_by_one_factor() -> None:
    (_, _, first_s), (_, _, last_s) = heard(ReportSettings(skew=4.0), PROMPTS[:1])
    factor = first_s / 1.0
    assert factor != pytest.approx(1.0)
    assert 0.25 <= factor <= 4.0
    assert last_s - first_s == pytest.approx(factor * 0.1)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_under_late_and_wrong_reports(policy: str, rng: random.Random) -> None:
    settings = ClusterSettings(prefill=2, decode=2, whole=1, machine=PLAIN)
    reports = ReportSettings(lag_s=1.5, period_s=0.7, noise=0.6, skew=3.0)
    jobs: list[Job] = []
    faults = [
        "20 kill prefill-0",
        "30 join prefill-0",
        "40 slow whole-0 3",
        "50 leave decode-1",
        "60 kill whole-0",
    ]
    cluster = Cluster(
        settings,
        [SimulatedProxy(make_policy(policy), reports=reports, seed=each) for each in range(2)],
        jobs.append,
        [parse(each) for each in faults],
    )
    cluster.run(at_random(rng, 150, 1.5))
    cluster.check_integrity()
    assert len(jobs) == 150


@pytest.mark.parametrize(
    "reports",
    [
        ReportSettings(lag_s=2.0),
        ReportSettings(period_s=1.0),
        ReportSettings(noise=0.4),
        ReportSettings(silent_from_s=100.0, silent_s=30.0),
    ],
)
def test_late_or_wrong_reports_cost_the_conductor_little(reports: ReportSettings, tmp_path: Path) -> None:
    plan = Plan(unshared_prompts(tmp_path, per_s=6.0), ClusterSettings(prefill=4, decode=4))
    prompt_s = simulate(plan).results.ttft_mean_s
    late_s = simulate(replace(plan, reports=reports)).results.ttft_mean_s
    print(f"at once {prompt_s:.3f} s, {reports} {late_s:.3f} s")
    assert late_s < 1.06 * prompt_s


@pytest.mark.parametrize(
    "wrong", [{"lag_s": -1.0}, {"period_s": math.inf}, {"silent_s": -1.0}, {"noise": 3.0}, {"skew": 0.5}]
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ReportSettings(**wrong)
