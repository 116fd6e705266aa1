"""Detects whether engines share a pool, or a part of one, whose KV events the proxy does not receive.

An engine whose KV events the proxy follows holds what they report, and reaches what the followed nodes of the
pool report. When its answers repeatedly report more cached tokens than both, those come from nodes whose
events the proxy does not receive. Without them one engine seems to hold everything and the others nothing,
and nearly every request goes to that one. While such nodes are detected, every engine is assumed to reach the
longest prefix that any engine has. Each answer is compared with what the nodes report of its own prompt: that
some node is heard says nothing about the others. Pure: no clock, not thread safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW = 64  # last reports that are counted
SEEN_MIN = 8  # of them, from which on a pool is detected
LOST_MAX = 1  # of them, up to which the pool counts as gone
TOLERANCE_TOKENS = 160  # a block of vLLM on a CPU, and a few tokens


class HiddenPool:
    """seen: whether the last reports show such a pool. remedy: what to do then, as the rest of a sentence."""

    def __init__(
        self,
        remedy: Callable[[], str] = lambda: (
            "give it the events of each node with --pool-events NAME=ENDPOINT"
        ),
    ) -> None:
        self.seen = False
        self._remedy = remedy
        self._window: deque[bool] = deque(maxlen=WINDOW)
        self._recent = 0
        self._warned = False

    def report(self, tokens: int, explained: int, cached: int) -> str | None:
        """The answer of an engine whose events are followed. tokens: of its prompt; explained: leading tokens
        that the events of this engine, or those of the pool's nodes, report; cached: cached tokens that the
        engine reports. Returns a sentence to log, once; else None."""
        more = cached > explained + max(TOLERANCE_TOKENS, tokens // 10)
        if len(self._window) == WINDOW:
            self._recent -= self._window[0]
        self._window.append(more)
        self._recent += more
        if self._recent >= SEEN_MIN:
            self.seen = True
        elif self._recent <= LOST_MAX:
            self.seen = False
        if not self.seen or self._warned:
            return None
        self._warned = True
        return (
            f"engines report more cached tokens than all KV events explain (the last: {cached} of {tokens}, "
            f"not {explained}), so they share a pool of which the proxy does not hear, or not of all of it; "
            f"until it does, what one engine holds is taken to be in reach of all: {self._remedy()}"
        )
