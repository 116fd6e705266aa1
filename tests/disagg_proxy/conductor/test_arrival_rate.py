"""What comes to instances, what it does to those who come later, and what is asked of senders."""

from __future__ import annotations

import math
import random

import pytest

from moonpool.disagg_proxy.conductor.arrival_rate import LOAD_MAX, YOUNG_S, ArrivalRate, marginal_delay
from moonpool.disagg_proxy.conductor.reuse_estimator import LAST, YOUNG_TOKENS, ReuseEstimator
from moonpool.disagg_proxy.conductor.sessions import SESSIONS_MAX, Sessions
from moonpool.disagg_proxy.conductor.transfer_backlog import TransferBacklog
from moonpool.disagg_proxy.conductor.worker import Worker

SEED = 20261121


def test_a_steady_flow_is_measured_from_its_beginning_on() -> None:
    flow = ArrivalRate()
    assert flow.at(0.0) == (0.0, 0.0)
    for number in range(2_000):
        flow.add(0.3, number * 0.5)
        if number in (60, 400, 1_999):  # after 30 s, minutes, many minutes
            rate, load = flow.at(number * 0.5)
            assert rate == pytest.approx(2.0, rel=0.05)
            assert load == pytest.approx(0.6, rel=0.05)
    rate, _ = flow.at(1_000.0 + 600.0)
    assert rate < 0.001


def test_the_first_requests_are_no_flood() -> None:
    flow = ArrivalRate()
    for _ in range(3):
        flow.add(1.0, 5.0)
    assert flow.at(5.0)[0] <= 3 / YOUNG_S * 1.1


def test_a_clock_that_jumps_breaks_no_flow() -> None:
    flow = ArrivalRate()
    for now_s in (100.0, 101.0, 5.0, 1e9, 2.0):
        flow.add(0.5, now_s)
        assert all(math.isfinite(value) and value >= 0 for value in flow.at(now_s))


def test_harm_grows_with_the_load_and_has_an_end() -> None:
    def at(load: float) -> float:
        flow = ArrivalRate()
        for number in range(1_000):
            flow.add(load, float(number))
        return marginal_delay([flow], 999.0)

    assert marginal_delay([ArrivalRate()], 0.0) == 0.0
    assert at(0.5) == pytest.approx(2.0, rel=0.05)  # one a second over the half that is idle
    assert at(0.8) == pytest.approx(5.0, rel=0.1)
    assert at(5.0) == pytest.approx(1 / (1 - LOAD_MAX), rel=0.05)


def test_harm_is_what_later_requests_lose_in_a_queue() -> None:
    """A simulated queue with random arrivals, once with u seconds more in it: the sum of what all that come
    later wait longer is marginal_delay u^2 / 2."""
    chance = random.Random(SEED)
    print("seed", SEED)
    rate, service_s, u_s, lost_s, runs = 0.5, 1.0, 4.0, 0.0, 3_000
    for _ in range(runs):
        now_s, with_s, without_s = 0.0, u_s, 0.0
        while with_s > without_s:
            now_s = chance.expovariate(rate)
            with_s, without_s = max(with_s - now_s, 0.0), max(without_s - now_s, 0.0)
            lost_s += with_s - without_s
            work_s = chance.uniform(0.5, 1.5) * service_s
            with_s, without_s = with_s + work_s, without_s + work_s
    flow = ArrivalRate()
    for number in range(2_000):
        flow.add(service_s, number / rate)
    assert lost_s / runs == pytest.approx(marginal_delay([flow], 1_999 / rate) * u_s * u_s / 2, rel=0.1)


def test_a_sender_is_free_when_what_was_asked_has_left() -> None:
    sender = TransferBacklog()
    assert sender.ahead_s(0.0) == 0.0
    sender.asked(2.0, 10.0)
    sender.asked(3.0, 11.0)
    assert sender.ahead_s(11.0) == pytest.approx(4.0)
    assert sender.ahead_s(14.0) == pytest.approx(1.0)
    assert sender.ahead_s(20.0) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_sender_takes_no_nonsense(bad: float) -> None:
    sender = TransferBacklog()
    sender.asked(1.0, 10.0)
    sender.asked(bad, 10.0)
    assert sender.ahead_s(10.0) == 1.0
    assert sender.ahead_s(5.0) == 1.0  # the clock has jumped back


def test_room_costs_nothing_before_caches_are_full_and_never_more_than_once() -> None:
    space = ReuseEstimator()
    space.observe(int(YOUNG_TOKENS / 100), 10_000)
    assert space.probability < 0.01
    for _ in range(1_000):
        space.observe(10_000, 2_000)
    assert space.probability == pytest.approx(LAST * 0.2, rel=0.15)
    for _ in range(10_000):
        space.observe(1_000, 9_000)
    assert space.probability == LAST


def test_sessions_are_remembered_where_they_were_last_and_not_for_ever() -> None:
    sessions, one, other = Sessions(), Worker(0, "a"), Worker(1, "b")
    assert sessions.find("") is None
    sessions.keep("s", one, 100)
    sessions.keep("s", other, 200)
    last = sessions.find("s")
    assert last is not None
    assert (last.worker, last.tokens) == (other, 200)
    for number in range(SESSIONS_MAX):
        sessions.keep(str(number), one, 1)
    assert sessions.find("s") is None
    assert len(sessions) == SESSIONS_MAX
