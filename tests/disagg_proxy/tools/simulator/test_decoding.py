import math
import random
from dataclasses import replace

import pytest

from moonpool.disagg_proxy.tools.simulator.decoding import Decoding
from moonpool.disagg_proxy.tools.simulator.machine import MACHINES, Machine

EVEN = replace(MACHINES["paper"], step_s=0.01, step_request_s=0.0, step_token_s=0.0)
PAPER = MACHINES["paper"]


def drain(decoding: Decoding) -> dict[int, tuple[float, float]]:
    """name -> (when it ended, its gap)"""
    ends = {}
    while len(decoding):
        at_s = decoding.next_s()
        left = decoding.pop(at_s)
        ends[left.name] = (at_s, left.gap_s)
    return ends


def test_each_step_gives_everybody_a_token() -> None:
    decoding = Decoding(EVEN)
    decoding.join(1, 100, 50, 0.0)
    decoding.join(2, 100, 20, 0.1)
    ends = drain(decoding)
    assert ends[2] == pytest.approx((0.3, 0.01))
    assert ends[1] == pytest.approx((0.5, 0.01))
    assert decoding.context_tokens == pytest.approx(0)
    assert decoding.next_s() == math.inf


def by_steps(machine: Machine, joins: list[tuple[float, int, int]]) -> dict[int, float]:
    """The same, step by step: those that come are there from the next step on."""
    running: dict[int, list[int]] = {}  # name -> [context, left]
    waiting = sorted((at_s, name, context, tokens) for name, (at_s, context, tokens) in enumerate(joins))
    now_s, ends = 0.0, {}
    while running or waiting:
        if not running:
            now_s = max(now_s, waiting[0][0])
        while waiting and waiting[0][0] <= now_s + 1e-12:
            _, name, context, tokens = waiting.pop(0)
            running[name] = [context, tokens]
        context = sum(each[0] for each in running.values())
        now_s += machine.step_of_s(len(running), context)
        for name in list(running):
            running[name][0] += 1
            running[name][1] -= 1
            if not running[name][1]:
                ends[name] = now_s
                del running[name]
    return ends


def test_stretches_between_events_take_as_long_as_their_steps(rng: random.Random) -> None:
    chance = rng
    joins = [(chance.random() * 20, chance.randrange(1, 50_000), chance.randrange(1, 600)) for _ in range(30)]
    decoding = Decoding(PAPER)
    found: dict[int, tuple[float, float]] = {}
    for name, (at_s, context, tokens) in sorted(enumerate(joins), key=lambda item: item[1][0]):
        while decoding.next_s() <= at_s:
            ends_s = decoding.next_s()
            left = decoding.pop(ends_s)
            found[left.name] = (ends_s, left.gap_s)
        decoding.join(name, context, tokens, at_s)
    found |= drain(decoding)
    wanted = by_steps(PAPER, joins)
    for name, (ends_s, gap_s) in found.items():
        # Somebody who comes in the middle of a step waits for its end there, and not here.
        assert ends_s == pytest.approx(wanted[name], abs=30 * 0.06), name
        assert PAPER.step_s < gap_s < 0.2


def test_a_stall_is_one_long_gap_for_all() -> None:
    decoding = Decoding(EVEN)
    decoding.join(1, 100, 100, 0.0)
    assert decoding.stall(0.5, 0.1, step=False) == pytest.approx(0.6)
    (end_s, gap_s) = drain(decoding)[1]
    assert end_s == pytest.approx(1.5)
    # The longest tenth of 100 gaps: one of 510 ms and nine of 10 ms.
    assert gap_s == pytest.approx((0.51 + 9 * 0.01) / 10)


@pytest.mark.parametrize("later_s", [0.0, 0.014])
def test_who_comes_after_a_stall_does_not_pay_for_it(later_s: float) -> None:
    """As does a request whose own prompt was what the others waited for."""
    decoding = Decoding(EVEN)
    decoding.join(1, 100, 100, 0.0)
    now_s = decoding.stall(0.5, 0.1, step=False)
    decoding.advance(now_s + later_s)
    decoding.join(2, 100, 50, now_s + later_s)
    decoding.stall(0.2, now_s + later_s, step=False)
    ends = drain(decoding)
    assert ends[2][1] == pytest.approx((0.21 + 4 * 0.01) / 5)
    total_s = 0.51 + 0.2 + 9 * 0.01 if not later_s else 0.51 + 0.21 + 8 * 0.01
    assert ends[1][1] == pytest.approx(total_s / 10)


def test_a_stall_with_a_step_gives_a_token_at_its_end() -> None:
    decoding = Decoding(EVEN)
    decoding.join(1, 100, 10, 0.0)
    now_s = 0.0
    for _ in range(10):
        now_s = decoding.stall(0.2, now_s, step=True)
    assert now_s == pytest.approx(2.1)
    assert decoding.next_s() == pytest.approx(2.1)
    assert decoding.pop(now_s).gap_s == pytest.approx(0.21)


def test_steps_that_are_more_than_somebody_wanted_leave_nothing_behind() -> None:
    decoding = Decoding(PAPER)
    now_s = 0.0
    for name in range(200):
        decoding.advance(now_s + 0.01)  # a fraction of a step
        decoding.join(name, 100, 3, now_s + 0.01)
        now_s = decoding.stall(0.2, now_s + 0.01, step=True)
        while decoding.next_s() <= now_s:
            decoding.pop(now_s)
    drain(decoding)
    assert decoding.context_tokens == pytest.approx(0, abs=1e-6)


def test_what_is_remembered_of_the_past_stays_small() -> None:
    decoding = Decoding(PAPER)
    now_s = 0.0
    decoding.join(0, 10, 30, now_s)
    for name in range(1, 5_000):
        decoding.join(name, 10, 30, now_s)
        now_s = decoding.next_s()
        decoding.pop(now_s)
    assert len(decoding._stretches) < 200
