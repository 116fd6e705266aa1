"""How long an engine that lacks room waits for blocks that the connector says are free soon, instead of
preempting a request. While it waits it computes nothing for that request, so what keeps a block for longer
than a moment (a decode engine whose own queue is long, a node that hangs) must not be waited for.
"""

from __future__ import annotations

from collections.abc import Callable

PATIENCE_S = 1.0


class Patience:
    """Waiting begins with the first time that it is asked for, and anew whenever blocks were freed, or nobody
    asked for PATIENCE_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._asked_s = 0.0

    def is_left(self) -> bool:
        """Whether to wait on. Asked each time that the engine lacks room."""
        now_s = self._clock()
        if self._since_s is None or now_s - self._asked_s > PATIENCE_S:
            self._since_s = now_s
        self._asked_s = now_s
        return now_s - self._since_s < PATIENCE_S

    def renew(self) -> None:
        """Blocks were freed."""
        self._since_s = None
