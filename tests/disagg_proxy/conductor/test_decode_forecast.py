"""A decode instance as it will be, held against what then happened."""

from __future__ import annotations

import math
import random

import pytest

from moonpool.disagg_proxy.conductor.answer_lengths import PRIOR, AnswerLengthStats, Times
from moonpool.disagg_proxy.conductor.decode_forecast import DecodeForecast, Occupancy
from moonpool.disagg_proxy.conductor.quantile_margin import LEAST, MOST, QuantileMargin

ALL_KNOWN = Times(1e6)  # who begins soon was taken long ago


def taught(seconds: float) -> AnswerLengthStats:
    """All answers take so long."""
    answers = AnswerLengthStats()
    for _ in range(2_000):
        answers.observe(seconds, 100)
    return answers


def test_times_are_learnt_and_what_is_none_is_left_out() -> None:
    times = Times(10.0)
    for seconds in (math.nan, -1.0, math.inf):
        times.observe(seconds)
    assert times.mean_s == pytest.approx(10.0)
    chance = random.Random(1)
    for _ in range(4_000):
        times.observe(chance.expovariate(1 / 4.0))
    assert times.mean_s == pytest.approx(4.0, rel=0.15)
    assert times.left[0] == 1.0
    assert times.left[8] == pytest.approx(math.exp(-1.0), abs=0.05)  # longer than 4 s
    assert all(one >= other for one, other in zip(times.left, times.left[1:], strict=False))
    assert times.left[-1] > 0


def test_old_times_are_forgotten() -> None:
    times = Times(10.0)
    for seconds in (30.0, 2.0):
        for _ in range(5_000):
            times.observe(seconds)
    assert times.mean_s == pytest.approx(2.0, rel=0.1)
    assert times.left[10] < 0.05


def test_who_decodes_leaves_and_who_is_computed_comes() -> None:
    ahead = DecodeForecast(taught(10.0), ALL_KNOWN)
    for name in range(4):
        ahead.taken(name, 1_000, 100.0)
        ahead.began(name, 100.0)
    ahead.taken(9, 5_000, 108.0)
    assert ahead.now() == Occupancy(4, 4_000)
    soon = ahead.at(101.0, 4.0)
    assert (soon.requests, soon.context_tokens) == (pytest.approx(4, abs=0.2), pytest.approx(4_000, rel=0.1))
    then = ahead.at(101.0, 15.0)  # the four have ended at 110 s, the fifth has not
    assert (then.requests, then.context_tokens) == (pytest.approx(1, abs=0.3), pytest.approx(5_000, rel=0.1))
    ahead.check_integrity()


def test_whose_prefill_is_late_is_still_counted() -> None:
    ahead = DecodeForecast(taught(10.0), ALL_KNOWN)
    ahead.taken(1, 1_000, 100.0)
    assert ahead.at(130.0, 0.0).requests == pytest.approx(1, abs=0.05)
    ahead.began(1, 130.0)
    assert ahead.at(131.0, 0.0).requests == pytest.approx(1, abs=0.05)


def test_who_begins_in_silence_ends_in_silence() -> None:
    ahead = DecodeForecast(taught(10.0), ALL_KNOWN)
    ahead.taken(1, 1_000, 100.0, silent=True)
    assert ahead.at(99.0, 5.0).requests == pytest.approx(1, abs=0.05)
    assert ahead.at(105.0, 0.0).requests == pytest.approx(1, abs=0.05)
    assert ahead.at(105.0, 10.0).requests == pytest.approx(0, abs=0.1)
    ahead.over(1)
    assert ahead.at(105.0, 0.0).requests == pytest.approx(0, abs=0.05)


def test_reports_that_come_late_twice_or_never_leave_nothing_behind() -> None:
    chance = random.Random(7)
    ahead = DecodeForecast(AnswerLengthStats(), Times(2.0))
    now_s = 0.0
    for _ in range(20_000):
        now_s += chance.uniform(-0.2, 0.5)  # the clock goes back at times
        name = chance.randrange(60)
        act = chance.randrange(4)
        if act == 0:
            ahead.taken(name, chance.randrange(10_000), now_s + chance.uniform(0, 300))
        elif act == 1:
            ahead.began(name, now_s)
        elif act == 2:
            ahead.over(name)
        else:
            there = ahead.at(now_s, chance.uniform(-5, 1e6))
            assert 0 <= there.requests < 1e6
            assert ahead.longest_s(name, 0.1, chance.randrange(-1, 500), now_s) >= 0.1 - 1e-9
            ahead.note(chance.uniform(0, 1), now_s, stall_s=chance.uniform(0, 2))
        if chance.random() < 0.001:
            now_s += chance.choice((-1e5, 1e6))
    ahead.check_integrity()
    for name in range(60):
        ahead.over(name)
    assert (len(ahead), *ahead.now()) == (0, 0, 0)
    ahead.check_integrity()


def test_the_future_is_no_emptier_for_those_whose_prefill_takes_long() -> None:
    """In a steady state the same are expected at every time ahead, and as many as there are."""
    chance = random.Random(3)
    answers, leads = AnswerLengthStats(), Times(2.0)
    ahead = DecodeForecast(answers, leads)
    events: list[tuple[float, str, int]] = []
    seen: dict[float, list[float]] = {0.0: [], 5.0: [], 20.0: []}
    there = []
    now_s = 0.0
    for name in range(6_000):
        now_s += chance.expovariate(2.0)
        events.sort()
        while events and events[0][0] < now_s:
            at_s, what, who = events.pop(0)
            if what == "began":
                ahead.began(who, at_s)
            else:
                ahead.over(who)
        lead_s, answer_s = chance.choice((0.5, 1.0, 12.0)), chance.expovariate(1 / 8.0)
        ahead.taken(name, 1, now_s + lead_s)
        leads.observe(lead_s)
        answers.observe(answer_s, 1)
        events += [(now_s + lead_s, "began", name), (now_s + lead_s + answer_s, "ended", name)]
        if name > 2_000:
            there.append(ahead.now().requests)
            for after_s, found in seen.items():
                found.append(ahead.at(now_s, after_s).requests)
    mean = sum(there) / len(there)
    assert mean == pytest.approx(16.0, rel=0.1)
    for after_s, found in seen.items():
        assert sum(found) / len(found) == pytest.approx(mean, rel=0.12), after_s


def test_the_longest_tenth_of_the_gaps_is_what_the_load_and_others_prompts_make_of_it() -> None:
    ahead = DecodeForecast(AnswerLengthStats(), ALL_KNOWN)
    ahead.note(0.1, 90.0)
    ahead.taken(1, 100, 100.0)
    ahead.began(1, 100.0)
    ahead.note(0.1, 100.0, stall_s=7.0)  # its own prompt
    assert ahead.longest_s(1, 0.1, 100, 110.0) == pytest.approx(0.1)
    ahead.note(0.2, 109.0)  # twice as many decode in its last second
    assert ahead.longest_s(1, 0.11, 100, 110.0) == pytest.approx(0.2, rel=0.05)
    assert ahead.longest_s(2, 0.1, 100, 110.0) == 0.1  # nobody knows it
    ahead.note(0.1, 110.0)
    ahead.note(0.1, 112.0, stall_s=1.0)
    found_s = ahead.longest_s(1, 0.11, 100, 120.0)
    assert found_s == pytest.approx(0.1 * 2 / 1.05 + 1.0 / 10, rel=0.1)


def test_a_margin_finds_what_nine_of_ten_stay_below() -> None:
    margin, chance, now_s = QuantileMargin(), random.Random(5), 0.0
    for _ in range(40_000):
        now_s += 0.2
        margin.observe(10.0, 10.0 * chance.uniform(0.8, 1.6), 12.0, now_s)
    assert margin.factor == pytest.approx(1.52, abs=0.06)


def test_a_margin_believes_no_single_observation_and_no_nonsense() -> None:
    margin = QuantileMargin()
    for observed_s in (math.nan, -1.0, math.inf):
        margin.observe(10.0, observed_s, 12.0, 1.0)
    margin.observe(math.nan, 1.0, 12.0, 1.0)
    margin.observe(0.1, 0.5, 12.0, 2.0)  # far below the limit
    assert margin.factor == 1.0
    for number in range(100):  # all at once, and with a clock that stands or goes back
        margin.observe(10.0, 1e5, 12.0, 10.0 - number)
    assert 1.0 < margin.factor < 1.01
    for number in range(100_000):
        margin.observe(10.0, 1e5, 12.0, number * 1.0)
    assert margin.factor == MOST
    for number in range(100_000):
        margin.observe(10.0, 6.0, 12.0, 1e6 + number * 1.0)
    assert margin.factor >= LEAST
    assert PRIOR > 0


def test_a_margin_learns_from_what_was_near_the_limit_and_from_what_exceeded_it() -> None:
    """Not from a start with empty engines: what is predicted half of the limit and turns out to be two thirds
    harms nobody, and a margin that it had raised would keep others out for long."""
    margin, now_s = QuantileMargin(), 0.0
    for _ in range(2_000):
        now_s += 1.0
        margin.observe(6.0, 8.0, 12.0, now_s)
    assert margin.factor == 1.0
    for _ in range(50):
        now_s += 1.0
        margin.observe(6.0, 12.5, 12.0, now_s)
    assert margin.factor > 1.1
    for _ in range(300):
        now_s += 1.0
        margin.observe(11.0 / margin.factor, 9.0, 12.0, now_s)
    assert margin.factor < 1.06
