"""Least squares that learns while it is used: a linear model with non-negative coefficients, a prior that
fades with evidence, slow forgetting, and a bound on what one odd sample may do.

The recursion is the Kalman filter of a constant state that drifts a little (Plackett 1950, "Some theorems in
least squares"; Ljung, "System Identification", ch. 11). Samples far from the prediction count as if they were
at a bound, as in Huber's loss (Huber 1964). Pure: no clock.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np

ERROR_SHARE = 0.1  # a sample is expected to lie within this share of its prediction
OUTLIER_ERRORS = 3.0  # an error counts as no more than so many expected ones
MEMORY = 2_000  # after about so many samples the prior spread would be back, were there no new ones


class Regression:
    """y = sum of coefficient * feature, each coefficient at least 0.

    prior:  the coefficients before any sample. spread: how far off each may be (standard deviation).
    floor:  the smallest scale of y that matters, in y's unit: errors below a share of it are noise.
    coefficients: as they are now. samples, refused: how many were learnt from, and how many were no numbers.
    """

    def __init__(self, prior: Sequence[float], spread: Sequence[float], *, floor: float) -> None:
        self.coefficients = tuple(float(value) for value in prior)
        self._theta = np.array(prior, np.float64)
        self._most = np.square(np.array(spread, np.float64))
        self._covariance = np.diag(self._most)
        self._drift = np.diag(self._most / MEMORY)
        self._floor = floor
        self.samples = 0
        self.refused = 0

    def predict(self, features: Sequence[float]) -> float:
        # Dozens of times for each request: no array is worth its making.
        y: float = sum(map(operator.mul, self.coefficients, features))
        return y

    def observe(self, features: Sequence[float], y: float) -> float | None:
        """Learns from one sample. Returns the error of the prediction before, y - predicted; None for a
        sample that is no set of finite, non-negative numbers, which changes nothing."""
        if not all(math.isfinite(value) and value >= 0 for value in (*features, y)) or not any(features):
            self.refused += 1
            return None
        x = np.array(features, np.float64)
        predicted = float(self._theta @ x)
        error = y - predicted
        covariance = self._covariance + self._drift
        reach = covariance @ x
        variance = float(x @ reach) + (ERROR_SHARE * max(predicted, self._floor)) ** 2
        # The bound is wide while little is known, and narrow later.
        bound = OUTLIER_ERRORS * math.sqrt(variance)
        gain = reach / variance
        self._theta = np.maximum(self._theta + gain * min(max(error, -bound), bound), 0.0)
        self.coefficients = tuple(self._theta.tolist())
        self._covariance = self._bounded(covariance - np.outer(gain, reach))
        self.samples += 1
        return error

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        if self.coefficients != tuple(self._theta.tolist()):
            raise AssertionError(f"coefficients {self.coefficients} are not {self._theta}")
        if not np.all(np.isfinite(self._theta)) or np.any(self._theta < 0):
            raise AssertionError(f"coefficients {self._theta} are out of bounds")
        variances = np.diagonal(self._covariance)
        if np.any(variances < 0) or np.any(variances > self._most * 1.001):
            raise AssertionError(f"variances {variances} are out of bounds")

    def _bounded(self, covariance: np.ndarray) -> np.ndarray:
        """Without samples along a direction its variance grows; no further than the prior's."""
        variances = np.maximum(np.diagonal(covariance), 1e-300)
        scale = np.sqrt(np.minimum(1.0, self._most / variances))
        bounded: np.ndarray = (covariance + covariance.T) / 2 * np.outer(scale, scale)
        return bounded
