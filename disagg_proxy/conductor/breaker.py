"""Rests an engine that answers its health checks but fails its requests: a pure circuit breaker.

    CLOSED --N failures in a row--> OPEN --its time is over--> one trial --ok--> CLOSED
                                      ^-----------failed (rests twice as long)-----'

A failure is a request without an answer or a 5xx. A 4xx is an answer: the client was wrong, not the engine,
and a fleet must not go down because one user sends bad requests. A client that leaves is no verdict at all.
"""

from __future__ import annotations

from enum import Enum, auto


class Verdict(Enum):
    GOOD = auto()
    BAD = auto()
    NONE = auto()


def verdict_on_status(status: int) -> Verdict:
    """5xx is bad, all else is good."""
    return Verdict.BAD if status >= 500 else Verdict.GOOD


class Breaker:
    """Call ``allows`` before choosing, ``started`` for the chosen one, ``finished`` exactly once for each
    started.

    failures: bad verdicts in a row while closed.
    """

    __slots__ = ("_failures_max", "_open_s", "_open_s_max", "_rest_s", "_trial", "_until", "failures")

    def __init__(self, failures_max: int, open_s: float, open_s_max: float) -> None:
        self._failures_max = failures_max
        self._open_s = open_s
        self._open_s_max = open_s_max
        self._rest_s = open_s
        self._until: float | None = None  # None: closed
        self._trial = False
        self.failures = 0

    @property
    def closed(self) -> bool:
        return self._until is None

    def allows(self, now: float) -> bool:
        """Whether a request may go to this engine: closed, or its rest is over and no trial is running."""
        return self._until is None or (now >= self._until and not self._trial)

    def started(self, now: float) -> bool:
        """A request goes there. Returns whether it is the trial; hand that back to ``finished``."""
        if self._until is None or self._trial or now < self._until:
            return False
        self._trial = True
        return True

    def finished(self, verdict: Verdict, now: float, *, trial: bool) -> bool:
        """The request is over. Returns whether the breaker opened or closed by it."""
        if trial:
            return self._finish_trial(verdict, now)
        if verdict is Verdict.NONE or self._until is not None:
            return False
        if verdict is Verdict.GOOD:
            self.failures = 0
            return False
        self.failures += 1
        if self.failures < self._failures_max:
            return False
        self._until = now + self._rest_s
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        if self._trial and self._until is None:
            raise AssertionError("a trial runs while the breaker is closed")
        if self.closed and self.failures >= self._failures_max:
            raise AssertionError(f"{self.failures} failures and still closed")
        if not self._open_s <= self._rest_s <= max(self._open_s, self._open_s_max):
            raise AssertionError(f"rest of {self._rest_s} s is out of bounds")

    def _finish_trial(self, verdict: Verdict, now: float) -> bool:
        self._trial = False
        if verdict is Verdict.GOOD:
            self._until = None
            self._rest_s = self._open_s
            self.failures = 0
            return True
        if verdict is Verdict.BAD:
            self._rest_s = min(self._rest_s * 2, max(self._open_s, self._open_s_max))
            self._until = now + self._rest_s
        return False
