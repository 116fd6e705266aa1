"""The event queue: callbacks in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Events:
    """now_s: of the event that is running. Of equal times the one that was planned first runs first."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, at_s: float, do: Callable[[], None]) -> None:
        """Plans ``do`` for this moment, in seconds; a moment that is past is taken for now."""
        self._number += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._number, do))

    def run_before(self, until_s: float) -> None:
        """Runs all events before this time, including those they plan; then this time is now."""
        heap = self._heap
        while heap and heap[0][0] < until_s:
            self.now_s, _, do = heapq.heappop(heap)
            do()
        if until_s > self.now_s and until_s != float("inf"):
            self.now_s = until_s
