"""The capacity of a cluster: the greatest speed at which enough requests are within the objective."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from moonpool.disagg_proxy.tools.simulator.results import Slo
from moonpool.disagg_proxy.tools.simulator.runs import Plan, simulate
from moonpool.disagg_proxy.tools.simulator.trace import Trace, read_trace

ENOUGH = 0.9
NEAR = 0.01  # the answer's relative accuracy
SPEED_MAX = 1024.0
SPEED_MIN = 0.01  # times the speed to begin with


def capacity(
    plan: Plan,
    slo: Slo,
    trace: Trace | None = None,
    *,
    enough: float = ENOUGH,
    near: float = NEAR,
    step: float = 2.0,
    tried: Callable[[float, float], None] = lambda *_: None,
) -> float:
    """By bisection, as if more speed were never better. plan.speed is the first one tried; from there it goes
    up or down by ``step``, which is small where the capacity is nearly known. near: the answer's relative
    accuracy. tried: called with each speed and its share of good requests. trace: the plan's, if it was read
    before. Returns 0 if even SPEED_MIN times the first speed is too fast, infinity if even SPEED_MAX is not,
    where the search ends.
    """
    trace = trace or read_trace(plan.trace)

    def good(speed: float) -> bool:
        share = simulate(replace(plan, speed=speed), trace).results.summary(slo).good
        tried(speed, share)
        return share >= enough

    low = high = plan.speed
    if good(low):
        end = max(SPEED_MAX, low)
        while good(high := min(high * step, end)):
            if high == end:
                return math.inf
            low, step = high, step * step
    else:
        while not good(low := low / step):
            high, step = low, step * step
            if low < SPEED_MIN * plan.speed:
                return 0.0
    while high - low > near * high:
        middle = (low + high) / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low
