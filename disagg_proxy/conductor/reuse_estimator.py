"""What a block costs for its room: whatever is stored in a full cache drives something else out."""

from __future__ import annotations

OVER_TOKENS = 10_000_000.0  # what was stored longer ago counts less and less
YOUNG_TOKENS = 1_000_000.0  # until about so many are stored caches are not full, and nothing is driven out
LAST = 0.25  # what goes was used longest ago: worth more than nothing, and far less than the average


class ReuseEstimator:
    """``probability``: that a token which is evicted would have been used again, learnt from how much of what
    workers hold is reused. An evicted token has to be computed again, so that a token cannot be worth more
    than that once."""

    def __init__(self) -> None:
        self._stored = YOUNG_TOKENS
        self._reused = 0.0
        self.probability = 0.0

    def observe(self, stored: int, reused: int) -> None:
        """Tokens of a request: that its worker did not have, and that it or the pool had."""
        self._stored += stored
        self._reused += reused
        if self._stored > OVER_TOKENS:
            self._stored *= 0.5
            self._reused *= 0.5
        self.probability = LAST * min(self._reused / self._stored, 1.0)
