"""Decides when to start a process again after it died; the supervisor acts."""

from __future__ import annotations


class Backoff:
    """Pauses that double from ``initial_s`` up to ``max_s``, and start over after a life of at least
    ``reset_s``.

        life:   0.1 s   0.1 s   0.1 s   90 s    0.1 s
        pause:     0.5     1.0     2.0     0.5     1.0

    Times are seconds of any one steady clock.
    """

    def __init__(self, *, initial_s: float, max_s: float, reset_s: float) -> None:
        if not 0 < initial_s <= max_s:
            raise ValueError("a back-off needs 0 < initial_s <= max_s")
        self._initial_s = initial_s
        self._max_s = max_s
        self._reset_s = reset_s
        self._deaths = 0  # deaths in a row, each after a short life
        self._started_at = 0.0

    def started(self, now: float) -> None:
        """The process was started."""
        self._started_at = now

    def died(self, now: float) -> float:
        """The process died; returns the time at which it is to be started again."""
        if now - self._started_at >= self._reset_s:
            self._deaths = 0
        pause = min(self._max_s, self._initial_s * 2.0 ** min(self._deaths, 64))
        self._deaths += 1
        return now + pause
