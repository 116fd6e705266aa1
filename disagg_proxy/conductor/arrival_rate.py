"""The arrival rate at one worker: requests a second and seconds of prefill a second, over about the last
minute."""

from __future__ import annotations

import math
from collections.abc import Sequence

OVER_S = 60.0  # long beside a prefill, short beside the hours of a day
YOUNG_S = 10.0  # a younger worker's arrivals are assumed to be spread over this time
LAG_REPORTS = 10  # of the mean lag, that the last report makes one part of
LOAD_MAX = 0.95  # a higher load counts as this one: beyond it the delay would outlast the load


class ArrivalRate:
    """An exponentially weighted average. A clock that jumps back counts as one that stands still."""

    __slots__ = ("_born_s", "_requests", "_to_s", "_work_s")

    def __init__(self) -> None:
        self._requests = 0.0
        self._work_s = 0.0
        self._born_s = math.nan
        self._to_s = -math.inf

    def add(self, work_s: float, now_s: float) -> None:
        """A request is sent to the worker, with this prediction of its prefill."""
        if not math.isfinite(self._born_s):
            self._born_s = self._to_s = now_s
        left = math.exp(-max(now_s - self._to_s, 0.0) / OVER_S)
        self._requests = self._requests * left + 1.0
        self._work_s = self._work_s * left + work_s
        self._to_s = max(now_s, self._to_s)

    def at(self, now_s: float) -> tuple[float, float]:
        """(requests a second, seconds of prefill a second)"""
        if not self._requests:
            return 0.0, 0.0
        age_s = max(now_s - self._born_s, YOUNG_S)
        left = math.exp(-max(now_s - self._to_s, 0.0) / OVER_S)
        over_s = OVER_S * -math.expm1(-age_s / OVER_S)
        return self._requests * left / over_s, self._work_s * left / over_s


class RemoteArrivals(ArrivalRate):
    """Of what other proxies send to one worker, as far as they have reported it.

    lag_s: how long ago they sent what they report now: a mean of the last reports.
    """

    __slots__ = ("_reports", "lag_s")

    def __init__(self) -> None:
        super().__init__()
        self.lag_s = 0.0
        self._reports = 0

    def reported(self, work_s: float, lag_s: float, now_s: float) -> None:
        """Another proxy reports a request that it sent ``lag_s`` seconds ago."""
        self.add(work_s, now_s)
        self._reports = min(self._reports + 1, LAG_REPORTS)
        self.lag_s += (lag_s - self.lag_s) / self._reports

    def unseen_s(self, now_s: float) -> float:
        """Seconds of prefill that they are expected to have sent, and have not reported yet."""
        return self.at(now_s)[1] * self.lag_s if self.lag_s else 0.0


def marginal_delay(flows: Sequence[ArrivalRate], now_s: float) -> float:
    """The seconds by which one more second of work delays later requests, for each second that it waits or is
    waited for: arrivals per second at one of these workers, divided by its idle share of the time.

    A worker with u seconds of work, at which work arrives at random, delays all later requests together by
    u^2 / (2 (1 - load)) seconds more than an idle one (the value function of M/G/1 with first come, first
    served). So x more seconds of work cost later requests d x (u + x / 2), d being this marginal delay.
    Adding that to a request's own time is one step of policy iteration from a random split: Hyytia,
    Penttinen, Aalto, "Size- and state-aware dispatching problem with queue-specific job sizes", European
    Journal of Operational Research 217 (2012).
    """
    requests = load = 0.0
    for flow in flows:
        rate, work = flow.at(now_s)
        requests += rate
        load += work
    count = len(flows)
    return requests / count / (1.0 - min(load / count, LOAD_MAX)) if count else 0.0
