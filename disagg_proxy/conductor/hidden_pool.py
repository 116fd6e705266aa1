"""Detects whether engines share a pool whose KV events the proxy does not receive.

An engine whose KV events the proxy follows holds what they report. When its answers repeatedly report more
cached tokens than that, they come from a pool whose nodes' events the proxy does not receive. Without those
events one engine seems to hold everything and the others nothing, and nearly every request goes to that one.
While such a pool is detected, every engine is assumed to reach the longest prefix that any engine has. Pure:
no clock, not thread safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW = 64  # last reports that are counted
SEEN_MIN = 8  # of them, from which on a pool is detected
LOST_MAX = 1  # of them, up to which the pool counts as gone
TOLERANCE_TOKENS = 160  # a block of vLLM on a CPU, and a few tokens


class HiddenPool:
    """hears_pool: whether nodes of a pool tell the proxy what they hold; nothing is hidden then. remedy: what
    to do where none does, as the rest of a sentence."""

    def __init__(
        self,
        hears_pool: Callable[[], bool] = lambda: False,
        remedy: Callable[[], str] = lambda: (
            "give it the events of each node with --pool-events NAME=ENDPOINT"
        ),
    ) -> None:
        self._hears_pool = hears_pool
        self._remedy = remedy
        self._shown = False  # by the last reports
        self._window: deque[bool] = deque(maxlen=WINDOW)
        self._recent = 0
        self._warned = False

    @property
    def seen(self) -> bool:
        """Whether the last reports show a pool that the proxy does not hear of."""
        return self._shown and not self._hears_pool()

    def report(self, tokens: int, own: int, cached: int) -> str | None:
        """The answer of an engine whose events are followed. tokens: of its prompt; own: cached tokens that
        the events explain; cached: cached tokens that the engine reports. Returns a sentence to log, once;
        else None."""
        if self._hears_pool():
            return None
        more = cached > own + max(TOLERANCE_TOKENS, tokens // 10)
        if len(self._window) == WINDOW:
            self._recent -= self._window[0]
        self._window.append(more)
        self._recent += more
        if self._recent >= SEEN_MIN:
            self._shown = True
        elif self._recent <= LOST_MAX:
            self._shown = False
        if not self._shown or self._warned:
            return None
        self._warned = True
        return (
            f"engines report more cached tokens than their KV events explain (the last: {cached} of "
            f"{tokens}, not {own}), so they share a pool that the proxy does not hear of; until it does, "
            f"what one engine holds is taken to be in reach of all: {self._remedy()}"
        )
