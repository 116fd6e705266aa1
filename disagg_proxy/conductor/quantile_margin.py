"""By how much observations exceed predictions, learnt online: a quantile of observed over predicted."""

from __future__ import annotations

import math

SHARE = 0.9
PACE_S = 300.0  # in which the factor would change by e if every prediction were exceeded
PAUSE_S_MAX = 1.0  # a longer pause between two observations counts as this one
LEAST, MOST = 0.5, 4.0
NEAR = 0.9  # of the limit: predictions this close to it decide


class QuantileMargin:
    """``factor``: this share of the observations is at most so many times their prediction.

    A quantile found by small steps (stochastic approximation): up after an observation beyond it, down by
    less after another, so that it settles where both balance. The effect of a change is observed only an
    answer later, so the factor moves slowly by the clock, however many observations there are: a fast one
    would oscillate. Predictions well below the limit decide nothing, and teach nothing unless the limit is
    exceeded.
    """

    def __init__(self, share: float = SHARE) -> None:
        self.factor = 1.0
        self._share = share
        self._last_s = -math.inf

    def observe(self, predicted_s: float, observed_s: float, limit_s: float, now_s: float) -> None:
        """A negative, infinite or NaN time is ignored."""
        if not (0 < predicted_s < math.inf and 0 <= observed_s < math.inf):
            return
        expected_s = predicted_s * self.factor
        if expected_s < NEAR * limit_s and observed_s <= limit_s:
            return
        passed_s = min(max(now_s - self._last_s, 0.0), PAUSE_S_MAX)
        self._last_s = now_s
        push = self._share if observed_s > expected_s else self._share - 1
        self.factor = min(max(self.factor * math.exp(push * passed_s / PACE_S), LEAST), MOST)
