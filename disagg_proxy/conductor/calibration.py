"""How well the time to the first token is predicted: predicted against observed, of each worker."""

from __future__ import annotations

import math
from collections import deque

RATIOS_MAX = 256  # of a worker: the errors of its last requests
FEWEST = 16  # fewer say nothing
LEAST_S = 0.001  # times below it are one
LONGEST_S = 900.0  # of a time that can be meant; what takes longer is a clock that jumped


class Ratios:
    """Of one worker: observed over predicted. refused: what was no time."""

    __slots__ = ("_ordered", "_ratios", "observed", "refused")

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=RATIOS_MAX)
        self._ordered: list[float] = []
        self.observed = 0
        self.refused = 0

    def observe(self, predicted_s: float, observed_s: float) -> bool:
        """False: it is left out, because these are no times."""
        if not (0.0 <= predicted_s <= LONGEST_S and 0.0 <= observed_s <= LONGEST_S):
            self.refused += 1
            return False
        self._ratios.append(max(observed_s, LEAST_S) / max(predicted_s, LEAST_S))
        self._ordered = []
        self.observed += 1
        return True

    @property
    def known(self) -> bool:
        """Enough were observed for quantiles."""
        return len(self._ratios) >= FEWEST

    def quantile(self, share: float) -> float:
        """This share of what was observed lately was at most so many times what had been predicted; 1 as long
        as too little is known."""
        if not self.known:
            return 1.0
        ordered = self._ordered = self._ordered or sorted(self._ratios)
        return ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1]

    @property
    def noise(self) -> float:
        """Half of the predictions are wrong by less than this share of the prediction."""
        return min(max(self.quantile(0.75) - 1.0, 1.0 - self.quantile(0.25), 0.0), 1.0)
