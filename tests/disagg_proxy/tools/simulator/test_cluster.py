"""Small clusters whose every second can be computed by hand."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.admission import Admission, Lookahead, Objective
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policy import POLICIES, make_policy
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.tools.simulator.cluster import Cluster, ClusterSettings
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.simulated_proxy import SimulatedProxy
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival
from tests.disagg_proxy.tools.simulator.clusters import PLAIN, at_random


def run(
    settings: ClusterSettings,
    arrivals: list[Arrival],
    policy: str = "conductor",
    admission: Admission | None = None,
) -> list[Job]:
    """In the order of arrival."""
    jobs: list[Job] = []
    cluster = Cluster(settings, [SimulatedProxy(make_policy(policy), admission)], jobs.append)
    cluster.run(arrivals)
    cluster.check_integrity()
    assert len(jobs) == len(arrivals)
    return sorted(jobs, key=lambda job: job.name)


def test_a_prompt_takes_its_tokens_and_those_behind_it_wait() -> None:
    first, second = run(
        ClusterSettings(prefill=1, machine=PLAIN),
        [Arrival(1.0, 1000, 1, (1, 2)), Arrival(1.5, 500, 1, (9,))],
    )
    assert first.ttft_s == pytest.approx(1.0)
    assert second.ttft_s == pytest.approx(1.0)  # half a second of wait, half of its own


def test_what_was_computed_is_not_computed_again() -> None:
    blocks = tuple(range(4))
    jobs = run(
        ClusterSettings(prefill=1, machine=PLAIN),
        [Arrival(0.0, 2000, 1, blocks), Arrival(10.0, 2000, 1, blocks), Arrival(10.1, 2000, 1, blocks)],
    )
    assert [job.own for job in jobs] == [0, 3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS]
    assert jobs[1].ttft_s == pytest.approx(2.0 - 3 * BLOCK_TOKENS / 1000)


class First:
    """A policy that knows of one instance alone."""

    uses_tokens = False

    def choose(self, request: Request, instances: Sequence[Worker], now_s: float) -> Choice:
        return Choice(instances[0])


def test_who_has_computed_nothing_is_thought_to_be_as_its_sister_turned_out() -> None:
    jobs, proxy = list[Job](), SimulatedProxy(First())
    cluster = Cluster(ClusterSettings(whole=2, machine=PLAIN), [proxy], jobs.append)
    _, idle = proxy.fleet.workers
    cluster.run([Arrival(10.0 * number, 100 * (number + 1), 1, (number,)) for number in range(20)])
    assert {job.prefill_place for job in jobs} == {0}
    assert idle.prefill_model.regression.own.samples == 0
    assert idle.prefill_model.predict(1_000) == pytest.approx(1.0, rel=0.2)


def test_a_prompt_in_line_reuses_what_the_one_before_it_computes() -> None:
    blocks = tuple(range(4))
    jobs = run(
        ClusterSettings(prefill=1, machine=PLAIN),
        [Arrival(0.0, 2000, 1, blocks), Arrival(0.1, 2000, 1, blocks)],
    )
    assert jobs[1].own == 3 * BLOCK_TOKENS


def test_what_another_holds_is_fetched_with_a_pool_and_computed_without() -> None:
    blocks = tuple(range(4))
    arrivals = [
        Arrival(0.0, 2000, 1, blocks),
        Arrival(10.0, 9000, 1, tuple(range(50, 68))),
        Arrival(10.0, 2000, 1, blocks),
    ]
    with_pool = run(ClusterSettings(prefill=2, machine=PLAIN), arrivals, "round_robin")
    # The first and the third in turn go to one instance, the second to the other: turn it round.
    arrivals.insert(1, Arrival(5.0, 1, 1, (99,)))
    with_pool = run(ClusterSettings(prefill=2, machine=PLAIN), arrivals, "round_robin")
    without = run(ClusterSettings(prefill=2, machine=PLAIN, pool=False), arrivals, "round_robin")
    assert with_pool[3].prefill_place != with_pool[0].prefill_place
    assert (with_pool[3].own, with_pool[3].fetched) == (0, 3 * BLOCK_TOKENS)
    assert with_pool[3].ttft_s == pytest.approx(3 * BLOCK_TOKENS / 1e6 + 2.0 - 3 * BLOCK_TOKENS / 1000)
    assert (without[3].own, without[3].fetched) == (0, 0)
    assert without[3].ttft_s == pytest.approx(2.0)


def test_kv_is_handed_over_while_it_is_computed_or_after_it() -> None:
    slow = replace(PLAIN, link_bytes_s=2000.0, handover_s=0.25)
    arrivals = [Arrival(0.0, 1000, 11, (1, 2))]
    layerwise = run(ClusterSettings(prefill=1, decode=1, machine=slow), arrivals)[0]
    serial = run(ClusterSettings(prefill=1, decode=1, machine=slow, layerwise=False), arrivals)[0]
    assert layerwise.ttft_s == pytest.approx(1.0 + 0.25)
    assert serial.ttft_s == pytest.approx(1.0 + 0.5 + 0.25)
    assert serial.done_s == pytest.approx(serial.first_s + 10 * 0.01)
    assert serial.gap_s == pytest.approx(0.01)


def test_who_does_not_fit_beside_those_that_decode_waits() -> None:
    tight = replace(PLAIN, room_tokens=2500)
    arrivals = [Arrival(0.0, 1000, 501, (1, 2)), Arrival(0.0, 1000, 501, (3, 4))]
    first, second = run(ClusterSettings(prefill=2, decode=1, machine=tight), arrivals)
    assert first.first_s == pytest.approx(1.0)
    assert second.first_s == pytest.approx(first.done_s)


def test_a_request_that_fits_nowhere_runs_alone() -> None:
    tight = replace(PLAIN, room_tokens=100)
    arrivals = [Arrival(0.0, 1000, 11, (1, 2)), Arrival(0.0, 50, 11, (3,))]
    jobs = run(ClusterSettings(whole=1, machine=tight), arrivals)
    assert all(job.done_s < math.inf for job in jobs)


def test_a_whole_prompt_stops_those_that_decode_and_chunks_slow_them() -> None:
    arrivals = [Arrival(0.0, 100, 101, (1,)), Arrival(0.5, 1000, 1, (2, 3))]
    stopped = run(ClusterSettings(whole=1, machine=PLAIN, chunk_tokens=0), arrivals)
    chunked = run(ClusterSettings(whole=1, machine=PLAIN, chunk_tokens=101), arrivals)
    assert stopped[0].done_s == pytest.approx(0.1 + 1.0 + 1.0)
    assert stopped[1].ttft_s == pytest.approx(1.0)
    # Ten steps of 100 tokens and one token of the other; 110 ms is its longest tenth.
    assert chunked[1].ttft_s == pytest.approx(1.1)
    assert chunked[0].done_s == pytest.approx(stopped[0].done_s)
    assert chunked[0].gap_s == pytest.approx(0.11)
    assert stopped[0].gap_s == pytest.approx((1.01 + 9 * 0.01) / 10)


def test_a_step_takes_the_prompts_that_fit_and_pays_one_constant() -> None:
    """As vLLM's chunked prefill: tokens of those that decode come first, then prompts in their order."""
    costly = replace(PLAIN, prefill_s=0.05)
    arrivals = [
        Arrival(0.0, 100, 1000, (1,)),
        Arrival(0.5, 10, 1, (2,)),  # keeps a step under way when the others come
        Arrival(0.501, 300, 1, (3,)),
        Arrival(0.502, 300, 1, (4,)),
        Arrival(0.503, 300, 1, (5,)),
    ]
    _, _, first, second, third = run(ClusterSettings(whole=1, machine=costly, chunk_tokens=701), arrivals)
    begun_s = 0.5 + 0.01 + 0.05  # its own prompt, and one constant: prefill's is the larger
    assert first.begun_s == second.begun_s == third.begun_s == pytest.approx(begun_s)
    assert first.first_s == second.first_s == pytest.approx(begun_s + 0.05 + 0.7)
    assert third.first_s == pytest.approx(second.first_s + 0.05 + 0.2)


def test_a_prompt_in_a_step_finds_the_blocks_of_those_before_it_there() -> None:
    blocks = tuple(range(4))
    arrivals = [Arrival(0.0, 10, 1, (99,)), *(Arrival(0.001, 2000, 1, blocks) for _ in range(2))]
    _, first, second = run(ClusterSettings(whole=1, machine=PLAIN, chunk_tokens=8192), arrivals)
    assert second.own == 3 * BLOCK_TOKENS
    assert first.first_s == second.first_s == pytest.approx(0.01 + 4.0 - 3 * BLOCK_TOKENS / 1000)


def test_prompts_of_a_step_need_room_together() -> None:
    tight = replace(PLAIN, room_tokens=2500)
    arrivals = [Arrival(0.0, 10, 1, (9,)), *(Arrival(0.001, 1000, 501, (n, 10 + n)) for n in range(2))]
    _, first, second = run(ClusterSettings(whole=1, machine=tight, chunk_tokens=8192), arrivals)
    assert second.begun_s == pytest.approx(first.done_s)


def test_a_pipeline_overlaps_the_chunks_of_a_prompt() -> None:
    settings = ClusterSettings(prefill=1, machine=PLAIN, width=4, chunk_tokens=100)
    jobs = run(settings, [Arrival(0.0, 1000, 1, (1, 2)), Arrival(0.0, 1000, 1, (3, 4))])
    # 13 quarter-chunks of 25 ms; the next prompt follows after 10 of them.
    assert jobs[0].ttft_s == pytest.approx(0.325)
    assert jobs[1].ttft_s == pytest.approx(0.250 + 0.325)
    short = run(settings, [Arrival(0.0, 100, 1, (1,))])[0]
    assert short.ttft_s == pytest.approx(0.1)


def test_a_chunk_waits_in_each_stage_for_the_one_before_it() -> None:
    settings = ClusterSettings(prefill=1, machine=PLAIN, width=4, chunk_tokens=400)
    jobs = run(settings, [Arrival(0.0, 1000, 1, (1, 2)), Arrival(0.0, 100, 1, (3,))])
    # 100 ms in each stage, twice, and 50 ms, which finds the last stage busy until 500 ms.
    assert jobs[0].ttft_s == pytest.approx(0.55)
    assert jobs[1].begun_s == pytest.approx(0.25)
    assert jobs[1].ttft_s == pytest.approx(0.575)


def test_the_last_chunks_of_a_long_prompt_take_longest() -> None:
    steep = replace(PLAIN, prefill_token_s=0.0, prefill_token2_s=1e-6)
    settings = ClusterSettings(prefill=1, machine=steep, width=2, chunk_tokens=500)
    (job,) = run(settings, [Arrival(0.0, 1000, 1, (1, 2))])
    # 0.25 s and 0.75 s, half of that in each stage.
    assert job.ttft_s == pytest.approx(0.125 + 0.375 + 0.375)


def test_what_is_predicted_too_late_is_refused() -> None:
    # Enough of them that the models have learnt this machine.
    lonely = [Arrival(10.0 * number, 1000, 1, (2 * number, 2 * number + 1)) for number in range(200)]
    rush = [Arrival(3000.0, 1000, 1, (5000 + 2 * number, 5001 + 2 * number)) for number in range(10)]
    jobs = run(
        ClusterSettings(prefill=1, machine=PLAIN),
        lonely + rush,
        admission=Admission(Objective(ttft_s=3.5)),
    )
    assert not any(job.why_not for job in jobs[:200])
    assert [job.why_not for job in jobs[200:]] == [""] * 3 + ["ttft"] * 7
    assert all(job.ttft_s <= 3.5 for job in jobs if not job.why_not)


def test_admission_looks_at_decode_ahead_of_time() -> None:
    """Long answers fill decode until the gap breaks the objective."""
    crowded = replace(PLAIN, step_request_s=0.001, prefill_token_s=1e-5, room_tokens=10**7)
    arrivals = [Arrival(0.02 * number, 600, 200, (2 * number, 2 * number + 1)) for number in range(3000)]
    objective = Objective(gap_s=0.05)
    free = run(ClusterSettings(prefill=1, decode=1, machine=crowded), arrivals)
    careful = run(
        ClusterSettings(prefill=1, decode=1, machine=crowded), arrivals, admission=Admission(objective)
    )
    blind = run(
        ClusterSettings(prefill=1, decode=1, machine=crowded),
        arrivals,
        admission=Admission(objective, Lookahead.NEVER),
    )
    within = [sum(job.gap_s <= 0.05 for job in jobs if not job.why_not) for jobs in (free, careful, blind)]
    assert within[1] > 2 * max(within[0], within[2])
    assert {job.why_not for job in careful} == {"", "gap"}


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(
    "settings",
    [
        ClusterSettings(prefill=3, machine=PLAIN),
        ClusterSettings(prefill=2, decode=2, machine=PLAIN, pool=False),
        ClusterSettings(prefill=1, decode=1, whole=2, machine=replace(PLAIN, room_tokens=9000)),
        ClusterSettings(whole=3, machine=replace(PLAIN, cache_tokens=4 * BLOCK_TOKENS), chunk_tokens=700),
        ClusterSettings(prefill=1, decode=2, machine=replace(PLAIN, cache_tokens=0), width=3),
    ],
    ids=["prefill", "apart", "mixed", "whole", "pipeline"],
)
def test_every_request_ends_under_every_policy(
    policy: str, settings: ClusterSettings, rng: random.Random
) -> None:
    for job in run(settings, at_random(rng, 150, 1.0), policy):
        assert job.arrival.at_s <= job.begun_s <= job.computed_s <= job.first_s <= job.done_s < math.inf
        assert 0 <= job.own + job.fetched < job.arrival.tokens


@pytest.mark.parametrize(
    "wrong",
    [{}, {"decode": 2}, {"prefill": 1, "width": 0}, {"prefill": -1, "whole": 2}, {"whole": 1, "decode": 1}],
)
def test_a_cluster_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ClusterSettings(**wrong)


@pytest.mark.parametrize("field", ["kv_bytes", "link_bytes_s", "room_tokens"])
def test_a_machine_without_memory_or_network_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(PLAIN, **{field: 0})
    with pytest.raises(ConfigError, match=field):
        replace(PLAIN, **{field: math.nan})
