"""How much a cluster takes: the greatest speed at which enough requests are within the objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moonpool.disagg_proxy.simulator.results import Slo
from moonpool.disagg_proxy.simulator.runs import Plan, simulate
from moonpool.disagg_proxy.simulator.trace import read_trace

ENOUGH = 0.9
NEAR = 0.01  # the answer's relative accuracy
SPEED_MAX = 1024.0


def capacity(
    plan: Plan, slo: Slo, *, enough: float = ENOUGH, tried: Callable[[float, float], None] = lambda *_: None
) -> float:
    """By bisection, as if more speed were never better; plan.speed is where it begins. tried: hears of each
    speed and the share that was good there. 0: not even at a hundredth of that."""
    trace = read_trace(plan.trace)

    def good(speed: float) -> bool:
        share = simulate(replace(plan, speed=speed), trace).results.summary(slo).good
        tried(speed, share)
        return share >= enough

    low, high = 0.0, plan.speed
    while good(high):
        low, high = high, high * 2
        if high > SPEED_MAX:
            return low
    while high - low > NEAR * high:
        if low == 0.0 and high < plan.speed / 100:
            return 0.0
        middle = (low + high) / 2 if low else high / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low
