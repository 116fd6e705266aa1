"""The conductor where an engine, a fleet, or the requests are not as usual, beside rules that count requests.
Deterministic: the same trace gives the same times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from moonpool.disagg_proxy.conductor.admission import Lookahead, Objective
from moonpool.disagg_proxy.tools.simulator.cluster import Cluster, ClusterSettings
from moonpool.disagg_proxy.tools.simulator.faults import parse
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.machine import MACHINES
from moonpool.disagg_proxy.tools.simulator.reports import Reporter, ReportSettings
from moonpool.disagg_proxy.tools.simulator.results import Slo, quantile
from moonpool.disagg_proxy.tools.simulator.runs import Plan, simulate
from tests.disagg_proxy.tools.simulator.clusters import one_prefix, unshared_prompts

WHOLE = ClusterSettings(whole=8, machine=MACHINES["h100_fp8"], chunk_tokens=8192)
SEPARATE = ClusterSettings(prefill=4, decode=4, machine=MACHINES["h100_fp8"])


@dataclass
class Day:
    """Seconds to the first token, and how many requests each instance computed, by place."""

    mean_s: float
    p99_s: float
    sent: Counter[int]


def day(plan: Plan, policy: str = "conductor") -> Day:
    sent: Counter[int] = Counter()
    submit = Cluster.submit

    def count(self: Cluster, job: Job) -> None:
        sent[job.prefill_place] += 1
        submit(self, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "submit", count)
        results = simulate(replace(plan, policy=policy)).results
    found = Day(results.ttft_mean_s, quantile(sorted(results.ttft_s), 0.99), sent)
    print(f"{policy}: mean {found.mean_s:.3f} s, p99 {found.p99_s:.3f} s, {sorted(sent.items())}")
    return found


@pytest.mark.parametrize("from_s", [0, 20])
def test_an_engine_ten_times_slower_than_its_sisters_gets_what_it_can_do(from_s: int, tmp_path: Path) -> None:
    well = Plan(unshared_prompts(tmp_path, per_s=6.0), WHOLE, speed=6.0)
    slow = replace(well, faults=(parse(f"{from_s} slow whole-1 10"),))
    ours, theirs = day(slow), day(slow, "least_load")
    assert ours.mean_s < 1.15 * day(well).mean_s
    assert ours.mean_s < theirs.mean_s
    assert ours.p99_s < theirs.p99_s
    assert 5 <= ours.sent[1] <= 150  # a tenth of what each sister gets is 25; before it slows down as much


def test_requests_are_not_refused_because_no_reports_come(tmp_path: Path) -> None:
    plan = Plan(unshared_prompts(tmp_path, per_s=6.0), SEPARATE, speed=4.0)
    plan = replace(plan, objective=Objective(ttft_s=1.0), admission=Lookahead.NEVER)
    silent = replace(plan, reports=ReportSettings(silent_from_s=20.0, silent_s=30.0))
    well, quiet = (simulate(each).results.summary(Slo(1.0)) for each in (plan, silent))
    print(f"refused: {well.refused}, in a silence of 30 s {quiet.refused}; good: {well.good}, {quiet.good}")
    assert quiet.refused <= well.refused + 40  # of the 720 that come in the silence
    assert quiet.good > well.good - 0.03


def test_a_fleet_that_doubles_within_a_second_is_used_at_once_and_evenly(tmp_path: Path) -> None:
    joins = tuple(parse("20 join whole") for _ in range(8))
    plan = Plan(unshared_prompts(tmp_path, per_s=6.0), WHOLE, speed=10.0, faults=joins)
    ours = day(plan)
    assert ours.mean_s < day(plan, "least_load").mean_s
    new = [ours.sent[place] for place in range(8, 16)]
    assert sum(new) > 2000 * 1 / 4 * 0.7  # they are half of the fleet in the last half of the time
    assert max(new) < 1.3 * min(new)


def test_short_prompts_do_not_wait_behind_long_ones(tmp_path: Path) -> None:
    plan = Plan(unshared_prompts(tmp_path, per_s=4.0, long_share=0.02), WHOLE, speed=6.0)
    ours = day(plan)
    assert ours.mean_s < 0.7 * day(plan, "least_load").mean_s
    assert ours.mean_s < 0.5 * day(plan, "round_robin").mean_s


@pytest.mark.parametrize("cluster", [WHOLE, SEPARATE])
def test_one_prefix_of_all_requests_overloads_no_engine(cluster: ClusterSettings, tmp_path: Path) -> None:
    plan = Plan(one_prefix(tmp_path, per_s=20.0), cluster, speed=6.0)
    ours, theirs = day(plan), day(plan, "round_robin")
    assert ours.mean_s < 1.02 * theirs.mean_s
    assert ours.p99_s < 1.2 * theirs.p99_s


@pytest.mark.parametrize("cluster", [WHOLE, SEPARATE])
@pytest.mark.parametrize("factor", [0.5, 0.25, 2.0])
def test_an_engine_that_reports_a_part_of_its_times_does_little_harm(
    cluster: ClusterSettings, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(unshared_prompts(tmp_path, per_s=6.0), cluster, speed=6.0 if cluster.whole else 4.0)
    well = day(plan)
    monkeypatch.setattr(Reporter, "_skew", lambda self, place: factor if place == 1 else 1.0)
    wrong = day(replace(plan, reports=ReportSettings(skew=2.0)))
    assert wrong.mean_s < 1.15 * well.mean_s
    assert wrong.sent[1] < 2 * well.sent[1]
