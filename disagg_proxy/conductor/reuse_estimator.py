"""The cost of storing a block: in a full cache it evicts another one."""

from __future__ import annotations

OVER_TOKENS = 10_000_000.0  # tokens: beyond it all earlier observations count half
YOUNG_TOKENS = 1_000_000.0  # tokens: until about so many are stored no cache is full, and none evicts
LAST = 0.25  # of the average: the least recently used block is worth more than nothing, and far less


class ReuseEstimator:
    """``probability``: that an evicted token would have been used again, learnt from the share of what
    workers hold that is reused. An evicted token is computed again once, so that it is never worth more than
    that."""

    def __init__(self) -> None:
        self._stored = YOUNG_TOKENS
        self._reused = 0.0
        self.probability = 0.0

    def observe(self, stored: int, reused: int) -> None:
        """Tokens of a request: those that its worker did not have, and those that it or the pool had."""
        self._stored += stored
        self._reused += reused
        if self._stored > OVER_TOKENS:
            self._stored *= 0.5
            self._reused *= 0.5
        self.probability = LAST * min(self._reused / self._stored, 1.0)
