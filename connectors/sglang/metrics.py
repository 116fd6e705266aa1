"""The backend's counters: in the engine's own /metrics, through the registry that SGLang serves."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping

from prometheus_client import Counter

PREFIX = "moonpool_hicache_"

COUNTERS: Mapping[str, str] = {
    "lookups": "Longest-prefix queries.",
    "lookup_pages": "Pages that were asked for.",
    "hit_pages": "Of those, pages of the prefix that the pool has.",
    "loaded_pages": "Pages that were loaded.",
    "loaded_bytes": "Bytes that were loaded.",
    "lost_pages": "Pages that were to be loaded and were not; the engine computes them.",
    "saved_pages": "Pages that were offered to the pool and are there now, in all their objects.",
    "saved_bytes": "Bytes that were stored; what was there already is not counted.",
    "refused_pages": "Pages of calls in which the pool did not take everything.",
    "unanswered": "Calls that the pool did not answer, or for which there was none.",
    "partly_answered": "Lookups to which not every other host, or not the directory, gave an answer.",
    "survived_errors": "Unexpected exceptions in the backend that the engine was kept safe from.",
}


@functools.cache
def _counters() -> Mapping[str, Counter]:
    # Once a process: a backend that is attached again goes on with the same counters.
    return {name: Counter(PREFIX + name, text) for name, text in COUNTERS.items()}


class Tally:
    """What this backend counted, and, when SGLang exports metrics, the process's counters."""

    def __init__(self, *, exported: bool) -> None:
        self.values = dict.fromkeys(COUNTERS, 0)
        self._exported = exported
        self._lock = threading.Lock()

    def add(self, counter: str, amount: int = 1) -> None:
        """Adds to one of COUNTERS."""
        with self._lock:
            self.values[counter] += amount
        if self._exported and amount:
            _counters()[counter].inc(amount)
