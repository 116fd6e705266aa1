"""What gives others what they lack of a prompt: how much it has been asked for, and has not sent yet."""

from __future__ import annotations

import math


class TransferBacklog:
    """A holder of KV, or all the nodes of the pool together.

    The proxy sees no link; it knows what it has directed to be fetched from where. That is taken to leave at
    the rate that the fetching workers' models have learnt, and to lie before whatever comes next.
    """

    __slots__ = ("_at_s", "_left_s")

    def __init__(self) -> None:
        self._left_s = 0.0
        self._at_s = -math.inf

    def ahead_s(self, now_s: float) -> float:
        """Seconds until the last of it will be sent."""
        left_s = self._left_s
        if not left_s:
            return 0.0
        if now_s > self._at_s:
            left_s -= now_s - self._at_s
            return left_s if left_s > 0.0 else 0.0
        return left_s  # the clock has jumped back

    def asked(self, seconds: float, now_s: float) -> None:
        """A fetch is directed there that takes so long, predicted without what lies before it."""
        if not 0.0 <= seconds < math.inf:
            return
        self._left_s = self.ahead_s(now_s) + seconds
        self._at_s = now_s
