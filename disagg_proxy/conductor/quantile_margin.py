"""By how much predictions are missed, learnt online: a quantile of observed over predicted."""

from __future__ import annotations

import math

SHARE = 0.9
PACE_S = 300.0  # in which it would change by a factor of e if every prediction were exceeded
PAUSE_S_MAX = 1.0  # a longer one between two observations counts as so much
LEAST, MOST = 0.5, 4.0
NEAR = 0.9  # of the limit: predictions that come so close to it decide


class QuantileMargin:
    """``factor``: this share of what is observed is at most so many times what was predicted.

    A quantile found by small steps (stochastic approximation): up when it was exceeded, down by less when
    not, so that it stands where both balance. What it lets in is observed only an answer later, so it moves
    slowly against the clock, however many observations there are: a quick one would swing. Predictions
    well below the limit decide nothing, and teach nothing unless it is exceeded.
    """

    def __init__(self, share: float = SHARE) -> None:
        self.factor = 1.0
        self._share = share
        self._last_s = -math.inf

    def observe(self, predicted_s: float, observed_s: float, limit_s: float, now_s: float) -> None:
        """What is no time is left out."""
        if not (0 < predicted_s < math.inf and 0 <= observed_s < math.inf):
            return
        expected_s = predicted_s * self.factor
        if expected_s < NEAR * limit_s and observed_s <= limit_s:
            return
        passed_s = min(max(now_s - self._last_s, 0.0), PAUSE_S_MAX)
        self._last_s = now_s
        push = self._share if observed_s > expected_s else self._share - 1
        self.factor = min(max(self.factor * math.exp(push * passed_s / PACE_S), LEAST), MOST)
