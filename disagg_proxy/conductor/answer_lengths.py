"""How long answers take, learnt from those that have ended, to predict how many of the running ones will
still run."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

STEP_S = 0.5
STEPS = 512  # longer times count as this time
PRIOR = 20.0  # observations that the prior counts as
FADES_AFTER = 1000.0  # observations; older ones count less and less
LEARN_EVERY = 16

Floats = NDArray[np.float64]


class Times:
    """``left[i]``: the share of times longer than i steps of STEP_S, i from 0 to 2 STEPS; never 0.

    prior_s: the mean before any observation, in seconds. Not thread safe.
    """

    def __init__(self, prior_s: float) -> None:
        ages = np.arange(STEPS) * STEP_S
        took = np.exp(-ages / prior_s)
        self._took: Floats = took * (PRIOR / took.sum())  # weighted observations that took so many steps
        self._weight = 1.0  # weight of the next observation
        self._new = 0
        self._count = PRIOR
        self._sum_s = PRIOR * prior_s
        self.left = self._look()

    @property
    def mean_s(self) -> float:
        """The mean of what was observed, older observations weighing less. The prior counts as PRIOR
        observations at first."""
        return self._sum_s / self._count

    @property
    def learnt(self) -> bool:
        """Whether observations weigh more than the prior."""
        return self._count > 2 * PRIOR

    def observe(self, seconds: float) -> None:
        """A negative, infinite or NaN time is ignored."""
        if not 0.0 <= seconds < math.inf:
            return
        seconds = min(seconds, STEPS * STEP_S)
        self._took[min(int(seconds / STEP_S), STEPS - 1)] += self._weight
        self._weight *= 1 + 1 / FADES_AFTER  # the same as if all earlier observations faded
        keep = 1 - 1 / FADES_AFTER
        self._sum_s = self._sum_s * keep + seconds
        self._count = self._count * keep + 1
        self._new += 1
        if self._new >= LEARN_EVERY:
            self._new = 0
            self._took /= self._weight
            self._weight = 1.0
            self.left = self._look()

    def _look(self) -> Floats:
        longer = np.cumsum(self._took[::-1])[::-1]
        left = np.empty(2 * STEPS + 1)
        left[:STEPS] = longer / longer[0]
        # Beyond the longest observed time the share goes on falling, at the rate of the mean.
        falls = math.exp(-STEP_S / max(self.mean_s, STEP_S))
        left[STEPS:] = left[STEPS - 1] * falls ** np.arange(1, STEPS + 2)
        found: Floats = np.maximum(left, 1e-9)
        return found


class AnswerLengthStats:
    """Of answers: ``times`` from the first to the last token, and how many tokens they have on average."""

    PRIOR_S = 10.0
    PRIOR_TOKENS = 256.0

    def __init__(self) -> None:
        self.times = Times(self.PRIOR_S)
        self.tokens = self.PRIOR_TOKENS

    def observe(self, seconds: float, tokens: int) -> None:
        """tokens: 0 for not known."""
        self.times.observe(seconds)
        if tokens > 0:
            self.tokens += (tokens - self.tokens) / (FADES_AFTER / 4)
