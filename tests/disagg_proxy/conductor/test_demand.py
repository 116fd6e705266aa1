"""Up to which length of prompt all that comes can be served, held against what decode can take."""

from __future__ import annotations

import math
import random
import time

import pytest

from moonpool.disagg_proxy.conductor.admission import Admission, Lookahead, Objective
from moonpool.disagg_proxy.conductor.answer_lengths import AnswerLengthStats
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.demand import EVERY_S, PER_OCTAVE, Capacity, Demand
from moonpool.disagg_proxy.conductor.worker import Role, Worker

WITHIN = 2.0 ** (1.5 / PER_OCTAVE)  # a class and a half


def taught(seconds: float) -> AnswerLengthStats:
    answers = AnswerLengthStats()
    for _ in range(2_000):
        answers.observe(seconds, 100)
    return answers


def decodes(count: int, room_tokens: int = 0) -> list[Worker]:
    """10 ms, 0.3 ms for each request, and 0.02 ms for a thousand tokens."""
    return [Worker(place, f"d{place}", Role.DECODE, room_tokens=room_tokens) for place in range(count)]


def come(demand: Demand, rate: float, tokens: list[int], seconds: float = 600.0) -> None:
    chance = random.Random(5)
    for number in range(int(seconds * rate)):
        demand.add(chance.choice(tokens), number / rate)


def test_what_can_all_be_served_fits() -> None:
    demand = Demand()
    assert demand.longest(decodes(1), 0.05, taught(10.0), 0.0) == math.inf  # nobody has come
    come(demand, 5.0, [100, 50_000, 100_000])  # 50 at once: 15 ms of requests and 50 ms of tokens
    assert demand.longest(decodes(1), 0.09, taught(10.0), 600.0) == math.inf
    assert 50_000 < demand.longest(decodes(1), 0.033, taught(10.0), 600.0 + EVERY_S) < 100_000


@pytest.mark.parametrize("count", [1, 4])
def test_the_longest_exceed_as_far_as_there_is_no_room(count: int) -> None:
    """100 at once, their prompts evenly 1,000 to 100,000: each instance's gap 0.01 + 0.0003 n + 2e-8 c."""
    demand = Demand()
    come(demand, 10.0 * count, list(range(1_000, 101_000, 1_000)))
    found = demand.longest(decodes(count), 0.07, taught(10.0), 600.0)
    # With those up to x thousand tokens: 0.01 + 0.0003 x + 2e-5 x (x + 1) / 2 = 0.07
    assert found / 1_000 == pytest.approx(63.9, rel=WITHIN - 1 + 0.05)


def test_prompts_that_are_computed_between_tokens_take_of_what_is_allowed() -> None:
    """As above, and 0.3 s of them for ten gaps of the last answer."""
    demand, (worker,) = Demand(), decodes(1)
    come(demand, 10.0, list(range(1_000, 101_000, 1_000)))
    worker.load.decode_began(1, 100, 597.0)
    worker.load.prefill_began(2, 100, 0, 0, 0.3, 598.0)
    worker.load.prefill_ended(2, 598.3)
    worker.load.decode_ended(1, 11, 600.0)
    found = demand.longest([worker], 0.07, taught(10.0), 600.0)
    assert found / 1_000 == pytest.approx(41.8, rel=WITHIN - 1 + 0.05)
    quiet_s = 600.0 + 20 * EVERY_S  # no answer has ended since
    assert demand.longest([worker], 0.07, taught(10.0), quiet_s) > found * WITHIN


def test_room_bounds_them_too_where_it_is_known() -> None:
    demand = Demand()
    come(demand, 10.0, list(range(1_000, 101_000, 1_000)))
    found = demand.longest(decodes(1, room_tokens=500_000), math.inf, taught(10.0), 600.0)
    assert found / 1_000 == pytest.approx(31, rel=WITHIN - 1 + 0.05)  # 31 x 32 / 2 = 496


def test_who_asks_as_much_as_all_others_fits() -> None:
    """Else nobody would be served."""
    demand = Demand()
    come(demand, 50.0, [8_000])
    found = demand.longest(decodes(1), 0.05, taught(10.0), 600.0)
    assert 8_000 < found < 8_000 * 2.0 ** (2 / PER_OCTAVE)


def test_what_came_long_ago_and_clocks_that_jump_are_nothing() -> None:
    demand = Demand()
    come(demand, 50.0, [8_000, 80_000])
    assert demand.longest(decodes(1), 0.05, taught(10.0), 600.0) < 80_000
    demand.add(8_000, 1_200.0)
    assert demand.longest(decodes(1), 0.05, taught(10.0), 1_200.0) == math.inf
    for now_s in (5.0, math.nan, 1e12, -3.0, 600.0):
        demand.add(100, now_s)
        assert demand.longest(decodes(1), 0.05, taught(10.0), now_s) > 0
    come(demand, 50.0, [8_000, 80_000])  # what a clock has done before does no harm
    assert 8_000 < demand.longest(decodes(1), 0.05, taught(10.0), 602.0) < 80_000


@pytest.mark.parametrize("back_to_s", [595.0, 300.0, 0.0, -1e9])
def test_a_clock_that_goes_back_makes_nobody_exceed(back_to_s: float) -> None:
    demand, answers, instances = Demand(), taught(10.0), decodes(1)
    come(demand, 1.0, [8_000, 80_000])
    for number in range(1_000):
        assert demand.longest(instances, 0.05, answers, back_to_s + number) == math.inf
        demand.add(80_000, back_to_s + number)


@pytest.mark.parametrize("gap_s", [0.011, 0.001, 0.0])
@pytest.mark.parametrize("now_s", [0.0, 1e9, math.inf, math.nan])
def test_one_request_alone_fits(now_s: float, gap_s: float) -> None:
    demand = Demand()
    demand.add(1_000_000, now_s)
    assert demand.longest(decodes(1), gap_s, taught(100.0), now_s) >= 1_000_000


def test_where_nobody_decodes_nobody_exceeds() -> None:
    demand = Demand()
    come(demand, 50.0, [8_000, 80_000])
    assert demand.longest([], 0.05, taught(10.0), 600.0) == math.inf
    alone = [Worker(0, "p", Role.PREFILL)]
    assert demand.longest(alone, 0.05, taught(10.0), 600.0 + EVERY_S) < math.inf  # all that there is


def test_what_is_not_known_makes_nobody_exceed() -> None:
    """A proxy that has just started has prior times only."""
    demand = Demand()
    come(demand, 50.0, [8_000, 80_000])
    answers = AnswerLengthStats()
    assert demand.longest(decodes(1), 0.05, answers, 600.0) == math.inf
    for _ in range(50):
        answers.observe(10.0, 100)
    assert demand.longest(decodes(1), 0.05, answers, 600.0 + EVERY_S) < 80_000


def test_it_costs_an_arrival_next_to_nothing_however_many_instances_there_are() -> None:
    gate, fleet = admission(), tuple(decodes(1_000))
    asked = [Request(1_000 * number) for number in range(1, 1_001)]
    gate.capacity_class("g", asked[0], fleet, 0.0)

    def took_s() -> float:
        began_s = time.process_time()
        for request in asked:
            gate.capacity_class("g", request, fleet, 0.5)
        return time.process_time() - began_s

    # 3 ms; with a look at each instance 70. The best of three: what is thrown away meanwhile may be others'.
    assert min(took_s() for _ in range(3)) < 0.04


def admission(look: Lookahead = Lookahead.AHEAD, gap_s: float = 0.05) -> Admission:
    made = Admission(Objective(gap_s=gap_s), look)
    made.answers = taught(10.0)
    return made


def test_only_under_overload_and_by_priority_and_by_group() -> None:
    fleet = [Worker(9, "p", Role.PREFILL), *decodes(1)]

    def class_of(gate: Admission, rate: float, request: Request, group: str = "g") -> Capacity:
        chance = random.Random(1)
        for number in range(int(300 * rate)):
            gate.capacity_class("g", Request(chance.randrange(100, 100_000)), fleet, number / rate)
        return gate.capacity_class(group, request, fleet, 300.0)

    long = Request(60_000)
    assert class_of(admission(), 10.0, long) is Capacity.EXCEEDS
    assert not class_of(admission(), 10.0, Request(500))
    assert not class_of(admission(), 10.0, long._replace(priority=2))
    assert not class_of(admission(), 10.0, long, group="another model")
    assert not class_of(admission(), 1.0, long)
    assert not class_of(admission(Lookahead.NOW), 10.0, long)
    assert not class_of(admission(gap_s=math.inf), 10.0, long)
    gate = admission()
    for group in range(1_000):
        gate.capacity_class(group, long, fleet, 0.0)
    assert len(gate._demand) <= 64


def test_where_decode_can_take_some_of_one_length_they_exceed_more_than_the_shorter_ones() -> None:
    fleet = decodes(1)
    gate = admission()
    chance = random.Random(1)
    for number in range(3_000):  # at once 50 of each: 0.01 + 0.0003 x 50 + 2e-5 x 50 of the short ones
        gate.capacity_class("g", Request(chance.choice([1_000, 40_000, 80_000])), fleet, number / 15)
    found = [gate.capacity_class("g", Request(tokens), fleet, 200.0) for tokens in (1_000, 40_000, 80_000)]
    assert found == [Capacity.FITS, Capacity.MARGINAL, Capacity.EXCEEDS]
    urgent = [Request(tokens, priority=1) for tokens in (40_000, 80_000)]
    assert [gate.capacity_class("g", each, fleet, 200.0) for each in urgent] == [
        Capacity.FITS,
        Capacity.MARGINAL,
    ]


def test_lengths_at_which_a_class_begins_are_of_that_class() -> None:
    """Powers of two, which measurements like."""
    fleet = decodes(1)
    for some, none in ((32_000, 32_768), (32_768, 80_000), (32_768, 65_536)):
        gate, chance = admission(), random.Random(1)
        for number in range(3_000):
            gate.capacity_class("g", Request(chance.choice([1_000, some, none])), fleet, number / 15)
        found = [gate.capacity_class("g", Request(tokens), fleet, 200.0) for tokens in (1_000, some, none)]
        assert found == [Capacity.FITS, Capacity.MARGINAL, Capacity.EXCEEDS], (some, none)


def test_an_exceeding_one_is_taken_where_nobody_needs_its_place() -> None:
    (decode,) = decodes(1)
    choice = Choice(decode, Worker(9, "p", Role.PREFILL), 1.0)
    asked = Request(10_000)
    gate = admission()
    assert gate.predict(asked, choice, 0.0, only_if_spare=True).refusal is None
    for name in range(115):  # 44.5 ms; by chance there are 21 more at a time
        gate.taken(name, Request(1), choice, gate.predict(Request(1), choice, 0.0), 0.0)
        gate.began(name, 0.0)
    assert gate.predict(asked, choice, 0.0).refusal is None
    refusal = gate.predict(asked, choice, 0.0, only_if_spare=True).refusal
    assert refusal is not None
    assert refusal.reason == "long"
    assert (
        gate.predict(asked, choice, 0.0, only_if_spare=True, objective=Objective(gap_s=0.06)).refusal is None
    )
