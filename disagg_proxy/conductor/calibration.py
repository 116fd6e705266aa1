"""How well the TTFT of each worker is predicted: predicted and observed."""

from __future__ import annotations

import math
from collections import deque

RATIOS_MAX = 256  # of a worker: the errors of its last requests
FEWEST = 16  # with fewer no quantile is given
LEAST_S = 0.001  # shorter times count as this one: they differ by noise
LONGEST_S = 900.0  # the longest plausible time; a longer one is a clock that jumped


class Ratios:
    """Observed over predicted TTFT of one worker. refused: how many pairs were implausible."""

    __slots__ = ("_ordered", "_ratios", "observed", "refused")

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=RATIOS_MAX)
        self._ordered: list[float] = []
        self.observed = 0
        self.refused = 0

    def observe(self, predicted_s: float, observed_s: float) -> bool:
        """False: the pair is ignored, because a time is negative or too long to be plausible."""
        if not (0.0 <= predicted_s <= LONGEST_S and 0.0 <= observed_s <= LONGEST_S):
            self.refused += 1
            return False
        self._ratios.append(max(observed_s, LEAST_S) / max(predicted_s, LEAST_S))
        self._ordered = []
        self.observed += 1
        return True

    @property
    def known(self) -> bool:
        """Whether there are enough observations for quantiles."""
        return len(self._ratios) >= FEWEST

    def quantile(self, share: float) -> float:
        """The ratio of observed to predicted that this share of the last observations did not exceed; 1 while
        ``known`` is False."""
        if not self.known:
            return 1.0
        ordered = self._ordered = self._ordered or sorted(self._ratios)
        return ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1]

    @property
    def noise(self) -> float:
        """The relative error that half of the predictions stay below."""
        return min(max(self.quantile(0.75) - 1.0, 1.0 - self.quantile(0.25), 0.0), 1.0)
