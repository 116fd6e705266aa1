"""``_native.Regression`` in plain Python."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Sequence

ERROR_SHARE = 0.1  # a sample is expected to lie within this share of its prediction
OUTLIER_ERRORS = 3.0  # an error counts as no more than so many expected ones
ABSURD = 5.0  # times the prediction, or as small a part of it, and times the bound
CHANGED = 2.0  # times the prediction, or as small a part of it, is the median of the last samples
RECENT = 15  # of them
MEMORY = 250  # a sample that is so many samples old counts for a third (1/e) of the last one
FADES = 1 / (1 - 1 / MEMORY)


class Regression:
    """y = sum of coefficient * feature, each coefficient at least 0.

    prior:  the coefficients before any sample. spread: how far off each may be (standard deviation).
    floor:  the smallest scale of y that matters, in y's unit: errors below a share of it are noise.
    coefficients: as they are now. samples, odd, refused: how many were learnt from, were absurd, and were no
    numbers.

    Lists of floats, no arrays: with two to four coefficients a call of numpy costs more than all the sums.
    """

    def __init__(self, prior: Sequence[float], spread: Sequence[float], *, floor: float) -> None:
        self.coefficients = tuple(float(value) for value in prior)
        self._most = [float(value) ** 2 for value in spread]
        self._open()
        self._floor = floor
        self._recent: deque[float] = deque(maxlen=RECENT)  # observed over predicted
        self.samples = 0
        self.odd = 0
        self.refused = 0

    def predict(self, features: Sequence[float]) -> float:
        return _dot(self.coefficients, features)

    def start(self, coefficients: Sequence[float]) -> bool:
        """Begins with these in the place of the prior's, and as little known."""
        if self.samples or not all(0.0 <= value < math.inf for value in coefficients):
            return False
        self.coefficients = tuple(coefficients)
        return True

    def observe(self, features: Sequence[float], y: float) -> float | None:
        """Learns from one sample. Returns the error of the prediction before, y - predicted; None for a
        sample that changes nothing: no set of finite, non-negative numbers, or absurd."""
        # NaN is in no range.
        if not all(0.0 <= value < math.inf for value in (*features, y)) or not any(features):
            self.refused += 1
            return None
        predicted = self.predict(features)
        error = y - predicted
        believed = self._is_believed(predicted, y)
        covariance = self._covariance
        reach = [_dot(row, features) for row in covariance]
        variance = _dot(features, reach) + (ERROR_SHARE * max(predicted, self._floor)) ** 2
        # The bound is wide while little is known, and narrow later.
        bound = OUTLIER_ERRORS * math.sqrt(variance)
        if not believed and abs(error) > ABSURD * bound:
            self.odd += 1
            return None
        if abs(error) > bound:  # it moves as far as the bound does, and leaves as much to be learnt
            variance *= abs(error) / bound
        step = error / variance
        moved = tuple(value + by * step for value, by in zip(self.coefficients, reach, strict=True))
        self.coefficients = moved if min(moved) >= 0.0 else self._within(moved)
        for place, by in enumerate(reach):
            gain = by / variance
            row = covariance[place]
            for other in range(place + 1):
                row[other] = covariance[other][place] = (row[other] - gain * reach[other]) * FADES
        self._bound()
        self.samples += 1
        return error

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        if not all(0.0 <= value < math.inf for value in self.coefficients):
            raise AssertionError(f"coefficients {self.coefficients} are out of bounds")
        for place, (row, most) in enumerate(zip(self._covariance, self._most, strict=True)):
            if not 0.0 <= row[place] <= most * 1.001:
                raise AssertionError(f"the variance {row[place]} is out of bounds")
            if row != [other[place] for other in self._covariance]:
                raise AssertionError("the covariance is not symmetric")

    def _within(self, moved: Sequence[float]) -> tuple[float, ...]:
        """These coefficients with none below 0: one after the other is held there, and what goes with it
        moves as far as it is known to."""
        values = list(moved)
        covariance = [list(row) for row in self._covariance]
        held: set[int] = set()
        while (least := min(values)) < 0.0:
            place = values.index(least)
            row, variance = covariance[place], covariance[place][place]
            gains = [
                0.0 if other in held or not variance else row[other] / variance for other in range(len(row))
            ]
            values = [value - least * gain for value, gain in zip(values, gains, strict=True)]
            values[place] = 0.0
            held.add(place)
            for other, gain in enumerate(gains):
                covariance[other] = [
                    value - gain * by for value, by in zip(covariance[other], row, strict=True)
                ]
            for other in held:
                values[other] = max(values[other], 0.0)
        return tuple(values)

    def _is_believed(self, predicted: float, y: float) -> bool:
        """Whether it is not absurd; opens again what was learnt where too many are like it."""
        ratio = max(y, self._floor) / max(predicted, self._floor)
        recent = self._recent
        recent.append(ratio)
        if len(recent) == RECENT and not 1 / CHANGED <= sorted(recent)[RECENT // 2] <= CHANGED:
            recent.clear()
            self._open()
        return 1 / ABSURD <= ratio <= ABSURD or len(recent) < RECENT

    def _open(self) -> None:
        """As little is known as the prior says."""
        self._covariance = [
            [most if row == column else 0.0 for column in range(len(self._most))]
            for row, most in enumerate(self._most)
        ]

    def _bound(self) -> None:
        """Without samples along a direction its variance grows; no further than the prior's."""
        for place, most in enumerate(self._most):
            row = self._covariance[place]
            if row[place] <= most:
                continue
            scale = math.sqrt(most / row[place])
            for other, each in enumerate(self._covariance):
                row[other] *= scale
                each[place] = row[other]
            row[place] *= scale


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    product: float = sum(map(operator.mul, one, other))
    return product
