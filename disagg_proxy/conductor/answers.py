"""How long answers take, learnt from those that ended: for asking how many of today's will still be there."""

from __future__ import annotations

import math

PRIOR_S = 10.0
FADES_AFTER = 500.0  # answers; older ones count less and less


class AnswerTimes:
    """The share of answers that are still being made after some more seconds.

    Somebody who looks at a moment that has nothing to do with an answer's start finds on average
    E[T^2] / (2 E[T]) of it ahead (the mean residual life of renewal theory); what is ahead is taken to be
    exponential with that mean. Both moments are learnt, and forgotten again.
    """

    def __init__(self) -> None:
        self._count = 1.0
        self._sum_s = PRIOR_S
        self._squares = 2 * PRIOR_S * PRIOR_S

    @property
    def mean_s(self) -> float:
        return self._sum_s / self._count

    @property
    def ahead_s(self) -> float:
        """The mean of what is ahead of an answer that is being made."""
        return max(self._squares / (2 * self._sum_s), 1e-3)

    def observe(self, seconds: float) -> None:
        """An answer took so long from its first to its last token. What is no such number is left out."""
        if not 0 <= seconds < math.inf:
            return
        keep = 1 - 1 / FADES_AFTER if self._count >= FADES_AFTER else 1.0
        self._count = self._count * keep + 1
        self._sum_s = self._sum_s * keep + seconds
        self._squares = self._squares * keep + seconds * seconds

    def left_after(self, seconds: float) -> float:
        """Of those that are being made now, the share that still is after so long."""
        return math.exp(-seconds / self.ahead_s)

    def left_of_begun(self, seconds: float) -> float:
        """Of those that begin one after the other within the next so many seconds, the share that still is
        being made at their end."""
        return (1 - math.exp(-seconds / self.mean_s)) * self.mean_s / seconds if seconds > 1e-6 else 1.0
