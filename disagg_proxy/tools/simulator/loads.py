"""The load of prefill and decode over time: the means over their instances, sampled at regular times.

Early rejection by the current state of decode makes the two oscillate against each other (Mooncake, arXiv
2407.00079, section 7.3); ``correlation`` measures it.
"""

from __future__ import annotations

import math
from array import array

MOMENTS_MAX = 2_000
FIRST_EVERY_S = 0.5


class Loads:
    """wait_s: seconds of prefill in the queues. gap_s: between two tokens of an answer, 0 where no request
    decodes. every_s: between two samples; at MOMENTS_MAX samples it doubles, and every second one is dropped.
    """

    def __init__(self) -> None:
        self.at_s = array("d")
        self.wait_s = array("d")
        self.gap_s = array("d")
        self.every_s = FIRST_EVERY_S
        self.next_s = 0.0

    def add(self, at_s: float, wait_s: float, gap_s: float) -> None:
        """Call it at ``next_s`` or later."""
        for values, value in ((self.at_s, at_s), (self.wait_s, wait_s), (self.gap_s, gap_s)):
            values.append(value)
        if len(self.at_s) >= MOMENTS_MAX:
            for values in (self.at_s, self.wait_s, self.gap_s):
                del values[1::2]
            self.every_s *= 2
        self.next_s = (math.floor(at_s / self.every_s) + 1) * self.every_s

    def correlation(self) -> float:
        """Of the two over time, -1 to 1; below 0 they oscillate against each other. NaN where one never
        changes."""
        count = len(self.at_s)
        if not count:
            return math.nan
        wait_s, gap_s = math.fsum(self.wait_s) / count, math.fsum(self.gap_s) / count
        pairs = [(a - wait_s, b - gap_s) for a, b in zip(self.wait_s, self.gap_s, strict=True)]
        spread = math.fsum(a * a for a, _ in pairs) * math.fsum(b * b for _, b in pairs)
        return math.fsum(a * b for a, b in pairs) / math.sqrt(spread) if spread > 0 else math.nan
