"""How long an engine that lacks blocks waits for those that the connector frees soon, instead of preempting a
request. While it waits it computes nothing for that request, so the wait ends when blocks stay held for
longer than a moment (a decode engine with a long queue, a node that hangs), and when many are freed one after
another without making room."""

from __future__ import annotations

import math
from collections.abc import Callable

FREE_BLOCK_WAIT_S = 1.0
WAIT_MAX_S = 5.0


class FreeBlockWait:
    """Waiting begins with the first question, or the first one after FREE_BLOCK_WAIT_S without any. It lasts
    FREE_BLOCK_WAIT_S, each time that blocks became free again, and WAIT_MAX_S in all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = -math.inf
        self._freed_s = -math.inf
        self._asked_s = -math.inf

    def is_left(self) -> bool:
        """Whether to wait on. Asked each time that the engine lacks room."""
        now_s = self._clock()
        if now_s - self._asked_s > FREE_BLOCK_WAIT_S:
            self._began_s = now_s
        self._asked_s = now_s
        since_s = max(self._began_s, self._freed_s)
        return now_s - since_s < FREE_BLOCK_WAIT_S and now_s - self._began_s < WAIT_MAX_S

    def renew(self) -> None:
        """Blocks became free."""
        self._freed_s = self._clock()
