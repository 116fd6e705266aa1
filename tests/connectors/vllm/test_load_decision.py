"""Which loads are made: the decision by itself, on a clock that stands, and in both halves of a connector."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from moonpool.connectors.vllm.load_decision import (
    ALWAYS,
    BOTH,
    BOTH_GAIN,
    BOTH_TOKENS_MIN,
    FASTER,
    LOADS_MAX,
    LOADS_MIN,
    PARTLY,
    PROBE_EVERY,
    PROBE_LOAD,
    PROBE_PREFILL,
    PROBE_S,
    PROBE_SOON,
    REASONS,
    SLOWER,
    STEP_TOKENS_MIN,
    STEPS_MAX,
    STEPS_MIN,
    UNMEASURED,
    Choice,
    LoadDecision,
    Rate,
    Shares,
)
from moonpool.connectors.vllm.messages import Handshake, Load, LoadTime, Report, Step
from moonpool.connectors.vllm.scheduler import SchedulerHalf
from moonpool.connectors.vllm.settings import Settings
from moonpool.connectors.vllm.step_times import StepTimes
from moonpool.connectors.vllm.tiers import from_network, object_sizes
from moonpool.core.store.keys import BLOCK_NAME_BYTES
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    COLUMNS,
    FINGERPRINT,
    LIFE,
    Clock,
    FakeBlocks,
    FakeOutput,
    FakePool,
    FakeRequest,
    FakeStep,
    scheduler_half,
)
from tests.connectors.vllm.worker_bed import (
    lookup,
    memory,
    real_node,
    save,
    serving,
    wait_for,
    worker_half,
)

TOKENS = 100  # of a block
BLOCK_BYTES = 1000
HERE, THERE = 0.0, 1.0


def shares(here: int, there: int = 0) -> Shares:
    return by_network([HERE] * here + [THERE] * there)


def by_network(network: list[float]) -> Shares:
    return Shares(1 - np.array(network), np.array(network))


def decision(
    *, prefill: float = 1000.0, here: float | None = None, there: float | None = None, notice: float = 0.0
) -> tuple[LoadDecision, Clock]:
    """With rates in blocks per second; None: not measured."""
    clock = Clock()
    made = LoadDecision(TOKENS, clock)
    made.block_bytes = BLOCK_BYTES
    for _ in range(STEPS_MIN):
        assert made.step_took(TOKENS, 1 / prefill)
    for _ in range(LOADS_MIN):
        if here is not None:
            made.load_took(LoadTime(10 / here, memory_bytes=10 * BLOCK_BYTES, notice_s=notice))
        if there is not None:
            made.load_took(LoadTime(10 / there, network_bytes=10 * BLOCK_BYTES, from_network=True))
    return made, clock


def test_a_rate_is_the_median_by_amount() -> None:
    rate = Rate(3, 5)
    rate.add(100, 1)
    rate.add(10, 10)
    assert rate.per_second is None
    rate.add(10, 10)
    assert rate.per_second == 100  # most of the amount went that fast
    for _ in range(5):
        rate.add(10, 1)
    assert rate.per_second == 10
    rate.add(0, 1)
    rate.add(1, 0)
    assert rate.per_second == 10


def test_without_measurements_everything_is_loaded() -> None:
    nothing = LoadDecision(TOKENS, Clock())
    assert nothing.choose(shares(3, 2)).blocks == 5
    assert nothing.choose(shares(0)).blocks == 0
    unknown, _ = decision()
    assert unknown.choose(shares(3, 2)).blocks == 5
    few, _ = decision()
    for _ in range(LOADS_MIN - 1):
        few.load_took(LoadTime(100.0, memory_bytes=BLOCK_BYTES))
    assert few.choose(shares(3)).blocks == 3


def test_small_loads_do_not_tell_what_a_large_one_takes() -> None:
    made, _ = decision()
    for _ in range(LOADS_MAX):
        made.load_took(LoadTime(0.1, memory_bytes=BLOCK_BYTES))  # fixed costs: 10 blocks a second
    assert made.choose(shares(2)).blocks == 0
    assert made.choose(shares(100)).blocks == 100
    for _ in range(LOADS_MIN):
        made.load_took(LoadTime(10.0, memory_bytes=100 * BLOCK_BYTES))  # no faster for being large
    assert made.choose(shares(100)).blocks == 0
    assert made.choose(shares(400)).blocks == 0
    made, _ = decision()
    for _ in range(LOADS_MIN):
        made.load_took(LoadTime(0.01, memory_bytes=100 * BLOCK_BYTES))
    assert made.choose(shares(2)).blocks == 2


@pytest.mark.parametrize(("rate", "loaded"), [(10_000.0, 10), (900.0, 10), (700.0, 0), (10.0, 0)])
def test_a_slow_tier_is_computed_and_the_margin_is_the_loads(rate: float, loaded: int) -> None:
    made, _ = decision(here=rate)
    assert made.choose(shares(10)).blocks == loaded
    made, _ = decision(there=rate)
    assert made.choose(shares(0, 10)).blocks == loaded


def test_a_prefix_is_cut_where_the_slow_tier_begins() -> None:
    made, _ = decision(here=10_000, there=10)
    assert made.choose(shares(5, 5)).blocks == 5
    gap = [HERE] * 2 + [THERE] + [HERE] * 200  # worth one slow block
    assert made.choose(by_network(gap)).blocks == len(gap)


def test_a_prefix_that_is_useful_as_a_whole_only_is_not_cut() -> None:
    made, _ = decision(here=10_000, there=10)
    assert made.choose(shares(5, 5), whole=True).blocks == 0
    assert made.choose(shares(200, 1), whole=True).blocks == 201


def test_what_a_window_does_not_need_costs_nothing() -> None:
    made, _ = decision(here=500)
    assert made.choose(shares(10), whole=True).blocks == 0
    sparse = Shares(np.array([0.5] * 9 + [1.0]), np.zeros(10))
    assert made.choose(sparse, whole=True).blocks == 10


def test_a_short_prefix_is_not_worth_a_late_notice() -> None:
    made, _ = decision(here=10_000, notice=0.010)
    assert made.choose(shares(5)).blocks == 0  # 6.25 ms
    assert made.choose(shares(20)).blocks == 20


def test_loads_under_way_are_waited_for() -> None:
    made, clock = decision(here=2000)
    assert made.choose(shares(10)).blocks == 10
    for _ in range(10):
        made.load_begins(shares(10))  # 5 ms each
    assert made.choose(shares(10)).blocks == 0
    clock.now_s += 0.045
    assert made.choose(shares(10)).blocks == 10
    clock.now_s -= 0.045
    made.loads_ended()
    assert made.choose(shares(10)).blocks == 10


def test_one_of_many_declined_loads_measures_the_tier_again() -> None:
    made, clock = decision(here=10)
    probes = 0
    for _ in range(3 * PROBE_EVERY):
        probes += made.choose(shares(10)).blocks > 0
        clock.now_s += PROBE_S / PROBE_EVERY
    assert probes == 3
    for _ in range(3 * PROBE_EVERY):  # time stands
        probes += made.choose(shares(10)).blocks > 0
    assert probes <= 4
    for _ in range(LOADS_MAX // 2 + 1):
        made.load_took(LoadTime(0.001, memory_bytes=10 * BLOCK_BYTES))
    assert made.choose(shares(10)).blocks == 10


@pytest.mark.parametrize(
    ("loads", "prefill", "false_loads", "false_prefill", "best"),
    [
        (2000.0, 1000.0, 0.1, 1.0, 10),  # a load is worth its time, and seems 10 times as slow
        (2000.0, 1000.0, 1.0, 10.0, 10),  # or computing 10 times as fast
        (200.0, 1000.0, 10.0, 1.0, 0),  # computing is faster, and a load seems 10 times as fast
        (200.0, 1000.0, 1.0, 0.1, 0),  # or computing 10 times as slow
    ],
)
def test_rates_that_are_wrong_by_10_times_are_right_within_20_requests(
    loads: float, prefill: float, false_loads: float, false_prefill: float, best: int
) -> None:
    """In blocks a second; requests of 10 blocks that the pool has, and a token more, one after the other."""
    made, clock = decision(here=loads * false_loads, prefill=prefill * false_prefill)
    for _ in range(STEPS_MAX):  # as many as are kept
        made.step_took(10 * TOKENS, 10 / (prefill * false_prefill))
    for _ in range(LOADS_MAX):
        made.load_took(LoadTime(10 / (loads * false_loads), memory_bytes=10 * BLOCK_BYTES))
    chosen = []
    for _ in range(20):
        choice = made.choose(shares(10))
        chosen.append(choice.blocks)
        if choice.blocks:
            took = LoadTime(choice.blocks / loads, memory_bytes=choice.blocks * BLOCK_BYTES)
            made.load_took(took, probe=choice.reason == PROBE_LOAD)
        computed = 10 - choice.blocks
        made.step_took(computed * TOKENS + 1, computed / prefill)
        clock.now_s += choice.blocks / loads + computed / prefill
    assert chosen[0] != best
    assert [made.choose(shares(10)).blocks for _ in range(3)] == [best] * 3


def test_a_probe_that_contradicts_is_believed_and_followed_by_others_sooner() -> None:
    made, clock = decision(here=10)
    probes = []
    for number in range(PROBE_EVERY + 3 * PROBE_SOON):
        choice = made.choose(shares(10))
        if choice.reason == PROBE_LOAD:
            probes.append(number)
            # Faster by 10 times than was known, and than computing still 8 times as slow.
            made.load_took(
                LoadTime(10 / (10.0 * 12 ** len(probes)), memory_bytes=10 * BLOCK_BYTES), probe=True
            )
            if len(probes) == 1:
                clock.now_s += 0.001  # far from PROBE_S
    assert probes == [PROBE_EVERY - 1, PROBE_EVERY - 1 + PROBE_SOON]
    made, clock = decision(here=10)
    for _ in range(PROBE_EVERY):
        choice = made.choose(shares(10))
    assert choice.reason == PROBE_LOAD
    made.load_took(LoadTime(1.1, memory_bytes=10 * BLOCK_BYTES), probe=True)  # as was known
    assert all(made.choose(shares(10)).reason == SLOWER for _ in range(3 * PROBE_EVERY))


def test_one_slow_load_changes_nothing_and_several_do() -> None:
    made, _ = decision(here=10_000)
    made.load_took(LoadTime(10.0, memory_bytes=10 * BLOCK_BYTES))
    assert made.choose(shares(10)).reason == FASTER
    for _ in range(LOADS_MIN):
        made.load_took(LoadTime(10.0, memory_bytes=10 * BLOCK_BYTES))
    assert made.choose(shares(10)) == Choice(0, SLOWER, 10.0, 0.01)


def test_the_prefill_rate_is_probed_only_where_nothing_else_measures_it() -> None:
    made, clock = decision(here=900)  # loading is as good as computing
    reasons = []
    for number in range(3 * PROBE_EVERY):
        reasons.append(made.choose(shares(10)).reason)
        clock.now_s += PROBE_S
        if number < PROBE_EVERY + 5:
            made.step_took(TOKENS, 1 / 1000)
    assert reasons[: PROBE_EVERY + 5] == [FASTER] * (PROBE_EVERY + 5)
    assert reasons.count(PROBE_PREFILL) == 1
    far, clock = decision(here=1_000_000)  # computing would have to be faster by more than 10 times
    for _ in range(3 * PROBE_EVERY):
        assert far.choose(shares(10)).reason == FASTER


def test_every_reason_has_a_name() -> None:
    made, _ = decision(here=10_000, there=10)
    assert made.choose(shares(5, 5)).reason == PARTLY
    assert made.choose(shares(0)).reason == UNMEASURED
    assert LoadDecision(TOKENS, Clock()).choose(shares(3)).reason == UNMEASURED
    assert {PARTLY, UNMEASURED, FASTER, SLOWER, BOTH, PROBE_LOAD, PROBE_PREFILL, ALWAYS} == set(REASONS)


@pytest.mark.parametrize(
    ("rate", "reason", "loaded"),
    [(1000.0, BOTH, 10), (500.0, BOTH, 7), (2000.0, BOTH, 13), (100.0, SLOWER, 0), (10_000.0, FASTER, 20)],
)
def test_the_front_is_computed_while_the_back_is_loaded(rate: float, reason: str, loaded: int) -> None:
    """Computing takes a millisecond a block."""
    made, _ = decision(here=rate)
    choice, pace = made.meet(shares(20), made.choose(shares(20)))
    assert (choice.reason, choice.blocks) == (reason, loaded)
    assert (pace is not None) == (reason == BOTH)
    if pace is not None:
        assert pace.ratio == pytest.approx(rate / 1000)
        assert choice.both_s == pytest.approx(max((20 - loaded) / 1000, loaded / rate))
        assert choice.both_s * BOTH_GAIN <= min(choice.load_s, choice.compute_s)
        assert choice.plain()["both_s"] == pytest.approx(choice.both_s)
        pace.loaded(10, 10 / 100)  # loads are slower than predicted
        assert pace.ratio == pytest.approx(2 / (1000 / rate + 10))


def test_pieces_of_hits_are_measurements_and_need_no_probe() -> None:
    made, clock = decision(here=500)
    for _ in range(3 * PROBE_EVERY):
        choice = made.choose(shares(20))
        assert made.meet(shares(20), choice)[0].reason == BOTH
        made.load_took(LoadTime(10 / 500, memory_bytes=10 * BLOCK_BYTES), piece=True)
        clock.now_s += PROBE_S
    assert made.choose(shares(20)).reason == SLOWER


def test_both_is_left_where_it_gains_nothing() -> None:
    made, _ = decision(here=1000)
    short = BOTH_TOKENS_MIN // TOKENS
    assert made.meet(shares(short), made.choose(shares(short)))[1] is None
    assert made.meet(shares(short + 1), made.choose(shares(short + 1)))[1] is not None
    unknown = LoadDecision(TOKENS, Clock())
    assert unknown.meet(shares(20), unknown.choose(shares(20)))[1] is None
    made.load_begins(shares(100))  # the link is busy for longer than computing takes
    assert made.meet(shares(20), made.choose(shares(20)))[0].reason == SLOWER


def test_failures_count_when_they_took_long() -> None:
    made, _ = decision(here=10_000)
    for _ in range(LOADS_MAX):
        made.load_took(LoadTime(0.00001, failed_bytes=10 * BLOCK_BYTES))
    assert made.choose(shares(10)).blocks == 10
    for _ in range(LOADS_MAX):
        made.load_took(LoadTime(2.0, failed_bytes=10 * BLOCK_BYTES))
    assert made.choose(shares(10)).blocks == 0


def test_the_time_of_a_mixed_load_is_the_networks_beyond_what_memory_explains() -> None:
    made, _ = decision(here=1000)
    for _ in range(LOADS_MIN):
        made.load_took(LoadTime(0.11, 10 * BLOCK_BYTES, 10 * BLOCK_BYTES, from_network=True))
    assert made.choose(shares(0, 10)).blocks == 0  # 100 blocks a second
    assert made.choose(shares(10)).blocks == 10


def test_steps_of_few_tokens_are_no_measurement() -> None:
    made = LoadDecision(TOKENS, Clock())
    assert not made.step_took(STEP_TOKENS_MIN - 1, 1.0)
    assert not made.step_took(STEP_TOKENS_MIN, 0.0)
    assert made.step_took(STEP_TOKENS_MIN, 1.0)


def test_a_step_begins_when_the_one_before_has_ended() -> None:
    clock = Clock()
    times = StepTimes(clock)
    assert times.ends() == (0, 0.0)
    prompt = FakeStep(
        num_scheduled_tokens={"a": 101, "b": 1, "c": 4}, scheduled_spec_decode_tokens={"c": [7] * 3}
    )
    times.begins(prompt)
    clock.now_s += 1
    times.begins(FakeStep(num_scheduled_tokens={"a": 1}))  # planned ahead
    clock.now_s += 2
    assert times.ends() == (100, 3.0)
    clock.now_s += 0.5
    assert times.ends()[0] == 0
    clock.now_s += 100  # idle
    times.begins(prompt)
    clock.now_s += 1
    assert times.ends() == (100, 1.0)
    times.begins(FakeStep(num_scheduled_tokens={"a": 1}))
    times.begins(prompt)  # planned ahead
    clock.now_s += 2
    assert times.ends()[0] == 0
    clock.now_s += 3
    assert times.ends() == (100, 3.0)


def holders(*routes: str) -> bytes:
    """The own node, and others."""
    return LIFE + b"".join(LIFE + struct.pack("<H", len(route)) + route.encode() for route in routes)


def described(*places: int, size: int = 64) -> bytes:
    return b"".join(struct.pack("<QQQII", place << 48 | 4096, size, 1, 0, 0) for place in places)


def test_tiers() -> None:
    whole = holders("unix:/run/other.sock", "tcp:10.0.0.7:7720")
    assert from_network(whole, described(0, 1, 2, 9)).tolist() == [False, False, True, True]
    assert from_network(LIFE, described(0, 0)).tolist() == [False, False]
    assert from_network(b"", b"").tolist() == []
    assert from_network(whole[:-3], described(0, 1)).tolist() == [False, False]
    assert object_sizes(described(0, 1, size=7)).tolist() == [7, 7]


def test_reports_of_ranks_keep_the_slowest() -> None:
    fast, slow = LoadTime(1.0, memory_bytes=5), LoadTime(2.0, memory_bytes=4)
    whole = Report(load_times={"r": fast}).aggregate(Report(load_times={"r": slow, "s": fast}))
    assert whole.load_times == {"r": slow, "s": fast}


def ask(half: SchedulerHalf, pool: FakePool, name: str, blocks: int = 4) -> tuple[int | None, FakeRequest]:
    """A request that finds so many blocks: the tokens that are to be loaded."""
    one = FakeRequest(name, list(range(BLOCK_TOKENS * (blocks + 1))))
    half.arrived(one)
    pool.answer_prefix(blocks)
    tokens, _ = half.matched_tokens(one, 0)
    assert half.matched_tokens(one, 0)[0] == tokens  # asked again, it decides the same
    return tokens, one


def measured(half: SchedulerHalf, clock: Clock, load: LoadTime) -> None:
    """As vLLM calls for LOADS_MIN loads and the steps of prompts; prefill is 1000 tokens a second."""
    for number in range(STEPS_MIN):
        half.step_begins(FakeStep(num_scheduled_tokens={"x": 101}))
        clock.now_s += 0.1
        half.step_computed()
        half.step_ended(FakeOutput(kv_connector_worker_meta=Report(load_times={f"x{number}": load})))


@pytest.mark.parametrize("on", [True, False])
def test_a_declined_load_is_computed_and_its_pin_released(on: bool) -> None:
    pool, clock = FakePool(), Clock()
    half, _ = scheduler_half(pool, clock=clock, settings=Settings(compute_if_faster=on), meet=False)
    half.meet_workers([Handshake(FINGERPRINT, COLUMNS, bytes_per_block=BLOCK_BYTES)])
    assert ask(half, pool, "first")[0] == 4 * BLOCK_TOKENS
    measured(half, clock, LoadTime(1.0, memory_bytes=BLOCK_BYTES))  # a block takes a second, or 4 ms

    tokens, one = ask(half, pool, "second")
    one.kv_transfer_params = {"moonpool": {"explain": True}}

    if not on:
        assert tokens == 4 * BLOCK_TOKENS
        answer = half.finished(one)
        assert answer is not None
        assert answer["moonpool"]["decision"]["reason"] == ALWAYS
        return
    assert tokens == 0
    half.admitted(one, FakeBlocks((list(range(5)),)), 0)
    assert pool.released == [7]
    stats = half.tally.take()
    assert stats is not None
    assert stats.data["declined_tokens"] == 4 * BLOCK_TOKENS
    assert stats.data["load_decisions_unmeasured"] == 1
    assert stats.data["load_decisions_load_slower"] == 1
    assert stats.data["timed_prefill_tokens"] == 100 * STEPS_MIN
    assert stats.data["timed_prefill_seconds"] == pytest.approx(0.1 * STEPS_MIN)
    answer = half.finished(one)
    assert answer is not None
    assert answer["moonpool"]["pool_tokens"] == 0
    assert answer["moonpool"]["decision"] == {
        "reason": SLOWER,
        "blocks": 0,
        "load_s": pytest.approx(4.0),
        "compute_s": pytest.approx(4 * BLOCK_TOKENS / 1000),
    }
    silent = FakeRequest("silent", one.prompt_token_ids)
    half.arrived(silent)
    assert "decision" not in (half.finished(silent) or {})["moonpool"]


def test_real_loads_are_measured_and_a_faster_engine_computes(tmp_path: Path) -> None:
    """A real node and its native threads measure; prefill is so fast that no load can keep up."""
    source, target = memory(), memory()
    with serving(tmp_path):
        writer, reader = (worker_half(kv, real_node(tmp_path)) for kv in (source, target))
        job = save(writer, 1, 2, 3)
        writer.start_saves(Step((), (job,)))
        wait_for(writer)
        keeper, found = lookup(tmp_path, job.names, job.width)
        pool, clock = FakePool(), Clock()
        half, _ = scheduler_half(pool, clock=clock, meet=False)
        half.meet_workers([reader.handshake()])
        for number in range(LOADS_MIN):
            assert ask(half, pool, f"before{number}")[0] == 4 * BLOCK_TOKENS
            load = Load(
                f"l{number}",
                job.width,
                job.names[: job.width * BLOCK_NAME_BYTES],
                found.holders,
                found.descriptors,
                ((1, 2, 3),),
            )
            reader.start_loads(Step((load,)))
            report = wait_for(reader)
            assert report.loaded == {load.request_id: 3}
            took = report.load_times[load.request_id]
            assert took.seconds > 0
            assert took.memory_bytes == 3 * reader.handshake().bytes_per_block
            assert (took.network_bytes, took.failed_bytes, took.from_network) == (0, 0, False)
            assert took.notice_s is not None
            half.step_begins(FakeStep(num_scheduled_tokens={"x": 100_001}))
            clock.now_s += 1e-6
            half.step_computed()
            half.step_ended(FakeOutput(kv_connector_worker_meta=report))
        assert ask(half, pool, "after")[0] == 0
        stats = reader.tally.take()
        assert stats is not None
        assert stats.data["memory_loaded_bytes"] == LOADS_MIN * 3 * reader.handshake().bytes_per_block
        assert float(stats.data["memory_load_seconds"]) > 0  # type: ignore[arg-type]
        keeper.close()
        writer.close()
        reader.close()
