"""The proxy's gate in the simulator: who waits, who is refused, and what was computed for nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from moonpool.disagg_proxy.conductor.admission import Admission, Lookahead, Objective
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policies.conductor import Conductor
from moonpool.disagg_proxy.conductor.policy import Policy, make_policy
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.tools.simulator.cluster import Cluster, ClusterSettings
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.simulated_proxy import SimulatedProxy
from moonpool.disagg_proxy.tools.simulator.trace import Arrival
from tests.disagg_proxy.tools.simulator.clusters import PLAIN


def served(
    look: Lookahead,
    objective: Objective,
    arrivals: list[Arrival],
    queue: int = 0,
    policy: Policy | None = None,
) -> tuple[list[Job], float]:
    """(each request, seconds that prefill was busy); one prefill and one decode instance, where each request
    that decodes makes a gap 10 ms longer."""
    jobs: list[Job] = []
    machine = replace(PLAIN, step_request_s=0.01)
    cluster = Cluster(
        ClusterSettings(prefill=1, decode=1, machine=machine),
        [SimulatedProxy(policy or make_policy("conductor"), Admission(objective, look), queue, 60.0)],
        jobs.append,
    )
    cluster.run(arrivals)
    cluster.check_integrity()
    assert sorted(job.name for job in jobs) == list(range(1, len(arrivals) + 1))
    return sorted(jobs, key=lambda job: job.name), cluster.engines[0].busy_s


def crowd(count: int = 300) -> list[Arrival]:
    """Three a second, each 0.3 s of prefill and 100 tokens of an answer: more than decode takes in time."""
    return [Arrival(number * 0.32, 300, 100, (number,)) for number in range(count)]


def test_who_is_refused_after_its_prefill_has_cost_it() -> None:
    objective = Objective(gap_s=0.08)
    late, busy_late_s = served(Lookahead.AFTER, objective, crowd())
    early, busy_early_s = served(Lookahead.AHEAD, objective, crowd())
    refused = [sum(job.why_not == "gap" for job in jobs) for jobs in (late, early)]
    assert min(refused) > 20
    assert busy_late_s == pytest.approx(300 * 0.3, rel=0.01)
    assert busy_early_s == pytest.approx((300 - refused[1]) * 0.3, rel=0.01)


def test_long_prompts_of_one_length_leave_a_short_queue_to_the_others() -> None:
    """Decode could take half of them, if nobody else came in; such a queue served half as many as none."""
    chance = random.Random(1)
    arrivals = [
        Arrival(number / 4, 60_000 if chance.random() < 0.5 else 4_000, 300, (number,))
        for number in range(1200)
    ]
    objective = Objective(ttft_s=30.0, gap_s=0.05)
    good = []
    for queue in (0, 15):
        jobs: list[Job] = []
        proxy = SimulatedProxy(make_policy("conductor"), Admission(objective, Lookahead.AHEAD), queue, 60.0)
        Cluster(ClusterSettings(prefill=8, decode=1), [proxy], jobs.append).run(arrivals)
        good.append(sum(not job.why_not and job.ttft_s <= 30.0 and job.gap_s <= 0.05 for job in jobs))
    assert good[1] > good[0]


def test_a_queue_serves_later_what_would_be_refused_now() -> None:
    objective = Objective(ttft_s=120.0, gap_s=0.08)
    without, _ = served(Lookahead.AHEAD, objective, crowd(200))
    queued, _ = served(Lookahead.AHEAD, objective, crowd(200), queue=1_000)
    refused = [sum(job.why_not != "" for job in jobs) for jobs in (without, queued)]
    assert refused[1] < 0.75 * refused[0]
    gaps_s = [job.gap_s for job in queued[50:] if not job.why_not]  # when it has learnt what a request costs
    assert sum(gap_s < 0.1 for gap_s in gaps_s) > 0.8 * len(gaps_s)
    assert max(job.ttft_s for job in queued if not job.why_not) < 120.0


def test_who_waits_too_long_is_refused() -> None:
    jobs, _ = served(
        Lookahead.NEVER, Objective(), [Arrival(0.0, 300_000, 1, (n,)) for n in range(5)], queue=2
    )
    assert [job.why_not for job in jobs] == ["", "deadline", "deadline", "queue_full", "queue_full"]


def test_in_overload_it_is_long_prompts_that_are_refused() -> None:
    """About half more come than decode can take, where a prompt of 20,000 tokens takes what 200 of 100 do."""
    jobs: list[Job] = []
    chance = random.Random(3)
    machine = replace(
        PLAIN, prefill_token_s=1e-5, step_request_s=1e-4, step_token_s=1e-7, room_tokens=10_000_000
    )
    cluster = Cluster(
        ClusterSettings(prefill=4, decode=1, machine=machine),
        [SimulatedProxy(make_policy("conductor"), Admission(Objective(gap_s=0.05), Lookahead.AHEAD))],
        jobs.append,
    )
    cluster.run(
        Arrival(number * 0.25, chance.randrange(100, 20_000), 300, (number,)) for number in range(2_400)
    )
    late = [job for job in jobs if job.arrival.at_s > 100.0]
    short = [bool(job.why_not) for job in late if job.arrival.tokens < 10_000]
    long = [bool(job.why_not) for job in late if job.arrival.tokens >= 15_000]
    assert sum(long) > 3 * sum(short)
    assert any(job.why_not == "long" for job in late)


def swing(look: Lookahead, lead_s: int) -> float:
    """How far decode's load swings, the 5th to the 95th percentile over time as a share of what is allowed:
    twice as many come as decode can take, their prefill takes so long, their answers about half a minute."""
    machine = replace(PLAIN, step_request_s=0.001, room_tokens=10_000_000, prefill_token_s=lead_s / 1_000)
    allowed = Objective(gap_s=0.05)  # 40 at once
    cluster = Cluster(
        ClusterSettings(prefill=3 * lead_s, decode=1, machine=machine),
        [SimulatedProxy(make_policy("conductor"), Admission(allowed, look))],
        lambda job: None,
    )
    cluster.run(Arrival(number / 2.7, 1_000, 600, (number,)) for number in range(1_600))
    loads = cluster.loads
    seen = sorted(
        gap_s / allowed.gap_s for at_s, gap_s in zip(loads.at_s, loads.gap_s, strict=True) if at_s > 200.0
    )
    return seen[len(seen) * 95 // 100] - seen[len(seen) * 5 // 100]


def test_prediction_damps_the_swing_of_a_gate_that_looks_at_decode_as_it_is() -> None:
    """Mooncake, arXiv 2407.00079, section 7.3. What is let in while decode looks empty arrives there a whole
    prefill later, all together; the longer that takes the wider it swings."""
    assert swing(Lookahead.NOW, 1) < 0.25
    assert swing(Lookahead.NOW, 10) > 0.8
    assert swing(Lookahead.AHEAD, 10) < 0.3


class Counting(Conductor):
    def __init__(self) -> None:
        super().__init__()
        self.asked = self.told = 0

    def choose(self, request: Request, instances: Sequence[Worker], now_s: float) -> Choice:
        self.asked += 1
        return super().choose(request, instances, now_s)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        self.told += 1
        super().sent(request, choice, now_s)


def test_a_policy_hears_of_what_is_sent_and_of_nothing_else() -> None:
    policy = Counting()
    jobs, _ = served(Lookahead.AHEAD, Objective(ttft_s=5.0, gap_s=0.08), crowd(200), queue=10, policy=policy)
    sent = sum(not job.why_not for job in jobs)
    assert 0 < sent < len(jobs) < policy.asked
    assert policy.told == sent


def test_a_short_prompt_does_not_wait_in_line_for_engines_that_it_does_not_need() -> None:
    """Prefill is busy for a minute, and those that wait for it keep nobody from decode."""
    long = [Arrival(number * 0.1, 20_000, 10, (number,)) for number in range(3)]
    short = Arrival(1.0, 100, 10, (99,))
    jobs, _ = served(Lookahead.AHEAD, Objective(ttft_s=200.0), [*long, short], queue=50)
    assert [job.why_not for job in jobs] == [""] * 4
    assert jobs[-1].prefill_place == jobs[-1].decode_place == 1
    assert jobs[-1].first_s - short.at_s < 1.0
    assert jobs[1].first_s > 20.0
