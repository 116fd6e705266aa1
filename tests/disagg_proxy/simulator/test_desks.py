"""Several simulated proxies before the same instances."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.simulator.cluster import ClusterSettings
from moonpool.disagg_proxy.simulator.results import Slo
from moonpool.disagg_proxy.simulator.runs import Plan, simulate

from ..replay.beds import write_trace

SEED = 20261121
SLO = Slo(ttft_s=1.5)
EIGHT = ClusterSettings(prefill=8, decode=8)


def busy(folder: Path) -> Path:
    """At random, 12 a second: two thirds of what eight instances compute."""
    random_ = random.Random(SEED)
    print("seed", SEED)
    rows, at_s, block = [], 0.0, 0
    for _ in range(1500):
        at_s += random_.expovariate(12)
        tokens = int(min(max(random_.lognormvariate(8.0, 0.8), 100), 20_000))
        count = -(-tokens // 512)
        rows.append((at_s, tokens, 20, list(range(block, block + count))))
        block += count
    return write_trace(folder, *rows)


def test_four_that_exchange_are_as_good_as_one(tmp_path: Path) -> None:
    plan = Plan(busy(tmp_path), EIGHT)

    def good(plan: Plan) -> float:
        return simulate(plan).results.summary(SLO).good

    one, four = good(plan), good(replace(plan, proxies=4))
    apart = good(replace(plan, proxies=4, cluster=replace(EIGHT, exchanging=False)))
    print(f"one {one:.3f}, four {four:.3f}, four that do not exchange {apart:.3f}")
    assert four >= 0.95 * one
    assert apart < 0.95 * one


def test_nothing_is_left_in_the_books_of_any(tmp_path: Path) -> None:
    from moonpool.disagg_proxy.conductor.policy import make_policy
    from moonpool.disagg_proxy.simulator.cluster import Cluster
    from moonpool.disagg_proxy.simulator.desk import Desk
    from moonpool.disagg_proxy.simulator.happenings import parse
    from moonpool.disagg_proxy.simulator.job import Job
    from moonpool.disagg_proxy.simulator.trace import read_trace

    desks = [Desk(make_policy("conductor")) for _ in range(3)]
    jobs: list[Job] = []
    events = ["40s kill prefill-2", "60s leave decode-1", "90s join prefill-2", "100s join decode"]
    cluster = Cluster(EIGHT, desks, jobs.append, [parse(each) for each in events])
    cluster.run(read_trace(busy(tmp_path)).arrivals())
    assert len(jobs) == 1500
    for desk in desks:
        assert len(desk.shared) == len(desk.accounts) == 0
        assert not any(each.books.requests or each.coming for each in desk.fleet.instances)
    cluster.check_integrity()


def test_a_number_of_proxies_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 to 64 proxies"):
        Plan(tmp_path / "trace", EIGHT, proxies=0)
