"""Rows of numbers in bounded memory."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence


class Sample:
    """All rows up to ``kept_max``; of more, so many of them, each with the same chance (Vitter's algorithm R,
    1985). columns: one array of doubles for each number of a row. count: of all rows.
    """

    def __init__(self, width: int, kept_max: int) -> None:
        self.columns = tuple(array("d") for _ in range(width))
        self.count = 0
        self._kept_max = kept_max
        self._random = random.Random(kept_max)

    def __len__(self) -> int:
        return len(self.columns[0])

    def add(self, row: Sequence[float]) -> None:
        """row: as many numbers as ``columns``. Once ``kept_max`` are there, it replaces one of them or is
        dropped."""
        self.count += 1
        if self.count <= self._kept_max:
            for column, value in zip(self.columns, row, strict=True):
                column.append(value)
            return
        place = self._random.randrange(self.count)
        if place < self._kept_max:
            for column, value in zip(self.columns, row, strict=True):
                column[place] = value
