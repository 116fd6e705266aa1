"""Logs a repeated failure at once, and from then on once a minute with its count."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 60.0
KINDS_MAX = 64  # what is behind the last of them counts as one kind


class Repeats:
    """How many occurrences of each kind a log line stands for. Its owner keeps threads apart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> (when it was logged, occurrences since)

    def due(self, kind: str) -> int:
        """Counts one occurrence of ``kind``. How many are to be said now, this one included; 0: none."""
        now_s = self._clock()
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            kind = ""
        said_s, since = self._kinds.get(kind, (now_s - EVERY_S, 0))
        if now_s - said_s < EVERY_S:
            self._kinds[kind] = (said_s, since + 1)
            return 0
        self._kinds[kind] = (now_s, 0)
        return since + 1


def times(count: int) -> str:
    """Behind a sentence that stands for ``count`` occurrences."""
    return "" if count == 1 else f" ({count} times since this was last said)"
