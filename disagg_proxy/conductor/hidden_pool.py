"""Whether engines share a pool that the proxy does not hear of.

An engine whose KV events are heard holds what they tell. When its answers report more cached tokens than
that, again and again, they come from somewhere else: a pool whose nodes' events the proxy is not given
(``--pool-events``). Without them one engine seems to have all and its equals nothing, and nearly every
request goes to the one. While such a pool is seen, the longest prefix that any engine has is taken to be in
reach of all. Pure: no clock, not thread safe.
"""

from __future__ import annotations

from collections import deque

WINDOW = 64  # last reports that are looked at
SEEN_MIN = 8  # of them, from which on there is such a pool
LOST_MAX = 1  # of them, up to which there is none any more
TOLERANCE_TOKENS = 160  # a block of vLLM on a CPU, and a few tokens


class HiddenPool:
    """seen: what the last reports say."""

    def __init__(self) -> None:
        self.seen = False
        self._window: deque[bool] = deque(maxlen=WINDOW)
        self._recent = 0
        self._warned = False

    def report(self, tokens: int, own: int, cached: int) -> str | None:
        """An answer of an engine whose events are heard. tokens: of its prompt; own: that the events explain;
        cached: as the engine says. Returns a sentence to log, once."""
        more = cached > own + max(TOLERANCE_TOKENS, tokens // 10)
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
            f"engines report more cached tokens than their KV events explain (the last: {cached} of "
            f"{tokens}, not {own}), so they share a pool that the proxy does not hear of: start its nodes "
            f"with --events, and the proxy with --pool-events NODE=ENDPOINT for each; until then what one "
            f"engine holds is taken to be in reach of all"
        )
