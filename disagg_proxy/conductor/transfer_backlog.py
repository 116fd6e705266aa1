"""How many seconds of fetches a holder of KV has been asked for and has not sent yet."""

from __future__ import annotations

import math


class TransferBacklog:
    """A holder of KV, or all nodes of the pool together.

    The proxy sees no link; it knows which fetches it has directed to which holder. They are assumed to be
    sent one after the other, at the rate that the fetching workers' models have learnt, and before any later
    fetch.
    """

    __slots__ = ("_at_s", "_left_s")

    def __init__(self) -> None:
        self._left_s = 0.0
        self._at_s = -math.inf

    def ahead_s(self, now_s: float) -> float:
        """Seconds until the last fetch will have been sent."""
        left_s = self._left_s
        if not left_s:
            return 0.0
        if now_s > self._at_s:
            left_s -= now_s - self._at_s
            return left_s if left_s > 0.0 else 0.0
        return left_s  # the clock has jumped back

    def asked(self, seconds: float, now_s: float) -> None:
        """A fetch is directed there, with the prediction of its seconds without those before it."""
        if not 0.0 <= seconds < math.inf:
            return
        self._left_s = self.ahead_s(now_s) + seconds
        self._at_s = now_s
