"""Batches of many bytes cut into one piece a thread: one core cannot copy as fast as memory can."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

CHUNK_BYTES_MIN = 4 << 20  # below it a second thread costs more than it brings

Told = TypeVar("Told")


class ParallelChunks:
    """Threads for native calls, which release the GIL."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "moonpool-copy")

    def run(self, sizes: Sequence[int], piece: Callable[[int, int], Told]) -> list[Told]:
        """``piece(first, end)`` for consecutive parts of the items; their answers in order. All have ended
        when this returns, and when it raises what the first one that failed raised."""
        count = max(min(sum(sizes) // CHUNK_BYTES_MIN, self._threads, len(sizes)), 1)
        cuts = [len(sizes) * i // count for i in range(count + 1)]
        first, *rest = itertools.pairwise(cuts)
        others = [self._pool.submit(piece, *each) for each in rest]
        try:
            told = [piece(*first)]
        finally:
            for other in others:
                other.exception()  # waits
        return told + [other.result() for other in others]

    def close(self) -> None:
        """Ends the threads after what they do now."""
        self._pool.shutdown()
