"""Several simulated proxies before the same instances."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.policy import make_policy
from moonpool.disagg_proxy.tools.simulator.cluster import Cluster, ClusterSettings
from moonpool.disagg_proxy.tools.simulator.faults import parse
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.results import Slo
from moonpool.disagg_proxy.tools.simulator.runs import Plan, simulate
from moonpool.disagg_proxy.tools.simulator.simulated_proxy import SimulatedProxy
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival, read_trace

from ..replay.beds import write_trace

SEED = 20261121
SLO = Slo(ttft_s=1.5)
EIGHT = ClusterSettings(prefill=8, decode=8)


def busy(folder: Path, users: int = 0) -> Path:
    """At random, 12 a second: two thirds of what eight instances compute. users: whose prompts begin alike,
    each with four blocks of its own user; 0: nothing is shared."""
    random_ = random.Random(SEED)
    print("seed", SEED)
    rows, at_s, block = [], 0.0, 0
    for _ in range(1500):
        at_s += random_.expovariate(12)
        tokens = int(min(max(random_.lognormvariate(8.0, 0.8), 100), 20_000))
        count = -(-tokens // 512)
        blocks = list(range(block, block + count))
        if users:
            user = random_.randrange(users)
            blocks[:4] = [10**6 + 4 * user + place for place in range(min(4, count))]
        rows.append((at_s, tokens, 20, blocks))
        block += count
    return write_trace(folder, *rows)


@pytest.mark.parametrize("users", [0, 30])
def test_four_that_exchange_are_as_good_as_one(users: int, tmp_path: Path) -> None:
    plan = Plan(busy(tmp_path, users), EIGHT)

    def good(plan: Plan) -> float:
        return simulate(plan).results.summary(SLO).good

    one, four = good(plan), good(replace(plan, proxies=4))
    apart = good(replace(plan, proxies=4, cluster=replace(EIGHT, exchanging=False)))
    print(f"one {one:.3f}, four {four:.3f}, four that do not exchange {apart:.3f}")
    assert four >= 0.95 * one
    assert apart < 0.95 * one


def test_nothing_is_left_in_the_books_of_any(tmp_path: Path) -> None:
    proxies = [SimulatedProxy(make_policy("conductor")) for _ in range(3)]
    jobs: list[Job] = []
    trace = read_trace(busy(tmp_path, users=30))
    events = ["40s kill prefill-2", "60s leave decode-1", "90s join prefill-2", "100s join decode"]
    cluster = Cluster(EIGHT, proxies, jobs.append, [parse(each) for each in events])
    cluster.run(trace.arrivals())
    assert len(jobs) == 1500
    for proxy in proxies:
        assert len(proxy.shared) == len(proxy.scheduler.inflight) == len(proxy.expected) == 0
        assert not any(each.load.requests or each.pending_handover for each in proxy.fleet.workers)
    cluster.check_integrity()


@pytest.mark.parametrize(
    ("proxies", "exchanging", "later_s", "knows"),
    [
        (1, True, 0.001, True),
        (2, True, 0.001, False),  # it is on the way to the other
        (2, True, 0.010, True),
        (2, False, 0.010, False),
        (2, False, 30.0, True),  # it lies there, as engines tell all
    ],
)
def test_a_proxy_knows_of_anothers_prompt_when_it_has_heard_of_it(
    proxies: int, exchanging: bool, later_s: float, knows: bool
) -> None:
    blocks = tuple(range(20))
    proxies = [SimulatedProxy(make_policy("conductor")) for _ in range(proxies)]
    jobs: list[Job] = []
    cluster = Cluster(ClusterSettings(prefill=3, decode=1, exchanging=exchanging), proxies, jobs.append)
    cluster.run([Arrival(at_s, 20 * BLOCK_TOKENS + 1, 2, blocks) for at_s in (0.0, later_s)])
    first, second = sorted(jobs, key=lambda job: job.name)
    assert second.choice is not None
    asked, _ = second.choice
    assert asked.own[first.prefill_place] == (20 * BLOCK_TOKENS if knows else 0)
    cluster.check_integrity()
    assert not any(len(proxy.expected) for proxy in proxies)


def test_what_is_expected_is_what_is_under_way(rng: random.Random) -> None:
    """Few blocks, many requests at one time, instances that die: at any time each proxy's own are counted,
    and in the end nobody expects anything."""
    arrivals, at_s = [], 0.0
    for _ in range(400):
        at_s += rng.expovariate(40)
        count = rng.randrange(1, 12)
        blocks = [place * 3 + rng.randrange(3) for place in range(count)]
        arrivals.append(Arrival(at_s, count * BLOCK_TOKENS + 1, rng.randrange(1, 9), blocks))
    events = [
        f"{2 * number + 1}s {act}" for number, act in enumerate(("kill prefill-0", "join prefill-0") * 2)
    ]
    proxies = [SimulatedProxy(make_policy("conductor")) for _ in range(3)]
    jobs: list[Job] = []
    cluster = Cluster(
        ClusterSettings(prefill=3, decode=2), proxies, jobs.append, [parse(each) for each in events]
    )

    def look(arrivals: list[Arrival]) -> Iterator[Arrival]:
        for arrival in arrivals:
            yield arrival
            for number, proxy in enumerate(proxies):
                for job in cluster._live.values():
                    if job.proxy == number and job.expected:
                        bits = [proxy.expected.holders[each] for each in job.arrival.full_blocks]
                        assert all(each >> job.prefill_place & 1 for each in bits)
            cluster.check_integrity()

    cluster.run(look(arrivals))
    assert len(jobs) == 400
    assert not any(len(proxy.expected) for proxy in proxies)
    cluster.check_integrity()


def test_a_number_of_proxies_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 to 64 proxies"):
        Plan(tmp_path / "trace", EIGHT, proxies=0)
