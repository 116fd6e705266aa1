"""Whether an engine is there: a pure state machine over the outcomes of its health checks.

UNKNOWN --ok--> HEALTHY --refused, 5xx, or N timeouts in a row--> DEAD --ok--> HEALTHY
   '------------------------refused, 5xx or N timeouts---------------^
"""

from __future__ import annotations

from enum import Enum


class Health(Enum):
    """The states of ``Liveness``. /engines and the status page show the values."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    DEAD = "dead"


class Liveness:
    """Only a HEALTHY engine gets requests.

    state:      see above.
    why:        the last failure in one sentence, "" while healthy.
    timeouts:   in a row.
    changed_at: when state last changed (None: never).
    """

    __slots__ = ("_answered_at", "_timeouts_max", "changed_at", "state", "timeouts", "why")

    def __init__(self, timeouts_max: int) -> None:
        self._timeouts_max = timeouts_max
        self.state = Health.UNKNOWN
        self.why = "not checked yet"
        self.timeouts = 0
        self.changed_at: float | None = None
        self._answered_at: float | None = None

    @property
    def healthy(self) -> bool:
        """Whether requests may be sent there: UNKNOWN counts as not."""
        return self.state is Health.HEALTHY

    def succeeded(self, now: float) -> bool:
        """A check was answered well. Returns whether the state changed."""
        self._answered_at = now
        self.timeouts = 0
        self.why = ""
        return self._become(Health.HEALTHY, now)

    def timed_out(self, now: float, why: str) -> bool:
        """A check was not answered in time, which a busy engine may do now and then. Returns: state
        changed."""
        self.timeouts += 1
        self.why = why
        return self.timeouts >= self._timeouts_max and self._become(Health.DEAD, now)

    def refused(self, now: float, why: str) -> bool:
        """The engine is certainly not serving (no process listens, or it says so). Returns whether the state
        changed."""
        self.why = why
        return self._become(Health.DEAD, now)

    def silent_s(self, now: float) -> float:
        """Seconds since the last good answer; 0 before the first one (the engine has no requests then)."""
        return 0.0 if self._answered_at is None else now - self._answered_at

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        if self.healthy and (self._answered_at is None or self.timeouts >= self._timeouts_max):
            raise AssertionError(f"healthy without a good answer: {self.timeouts} timeouts")
        if self.state is Health.DEAD and not self.why:
            raise AssertionError("dead without a reason")

    def _become(self, state: Health, now: float) -> bool:
        changed = state is not self.state
        if changed:
            self.state = state
            self.changed_at = now
        return changed
