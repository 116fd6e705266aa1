"""Pages of what the pool holds. A node keeps no order: all of it is read, once for the pages of a walk."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

WALK_S = 60.0  # what a walk sees is never older; one that was given up is forgotten by the next

Row = tuple[str, int]  # name, bytes


@dataclass(frozen=True, slots=True)
class _Walk:
    about: str
    rows: list[Row]
    read_s: float


class Listing:
    """Pages of a listing, in order of the names. It keeps the last walk only; a page of another walk is
    right, too, but reads all rows again. Any thread may call.

    read: returns all rows about something, in any order, each name once.
    """

    def __init__(self, read: Callable[[str], list[Row]], now_s: Callable[[], float] = time.monotonic) -> None:
        self._read, self._now_s = read, now_s
        self._guard = threading.Lock()
        self._walk: _Walk | None = None

    def page(self, about: str, size: int, after: str | None) -> tuple[list[Row], str | None]:
        """The next rows of a walk.

        size: maximum number of rows.
        after: name behind which the page begins; None: a new walk.

        Returns the rows in order of their names, and the last of these names when there are more. Raises what
        ``read`` raises.
        """
        with self._guard:
            walk = self._walk if after is not None else None
            self._walk = None
            if walk is None or walk.about != about or self._now_s() - walk.read_s > WALK_S:
                walk = _Walk(about, sorted(self._read(about)), self._now_s())
            first = 0 if after is None else bisect_right(walk.rows, after, key=lambda row: row[0])
            rows = walk.rows[first : first + size]
            if first + size >= len(walk.rows):
                return rows, None
            self._walk = walk
            return rows, rows[-1][0]
