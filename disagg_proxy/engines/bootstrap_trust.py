"""Whether a bootstrap page is the one of its engine, by what comes of hand-overs.

A page at the usual port may be of another engine of its host, or not to be reached by a decode engine. Then
decode waits for what never comes, and all that can be seen of it is that answers come late after their
prefill: not all, because decode may have had a prompt in its own cache, and one of several ranks may be
right. An overloaded decode engine looks the same; so two steps are taken for a while, and if those are as
late, it was not the page.

Pure.
"""

from __future__ import annotations

from collections import defaultdict, deque
from enum import Enum

from moonpool.disagg_proxy.data_plane.observations import Observation, Outcome

LATE_S = 2.5  # of a hand-over: no take of blocks is so slow
LATE_MAX = 4  # of the last WINDOW hand-overs to one decode engine
WINDOW = 16
DISTRUST_S = 300.0
# An engine's seconds for a token, at least: of an answer that comes whole only the end is seen. A slower one
# may raise a doubt without need, which two steps then clear.
TOKEN_S = 0.01


class Verdict(Enum):
    """DOUBT: take two steps. CLEAR: two steps are as late; it was not the page."""

    NONE = 0
    DOUBT = 1
    CLEAR = 2


class BootstrapTrust:
    """Of one page. Not thread safe. A doubt stands until it is cleared, or ``believe`` is called."""

    def __init__(self) -> None:
        self._waits: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._doubt: tuple[int, float] | None = None  # the decode engine, and how late it was
        self._quiet_until_s = 0.0

    def met(self, decode: int, wait_s: float, *, concurrent: bool, now_s: float) -> Verdict:
        """A hand-over to a decode engine (its place) that ended so long after its prefill."""
        if now_s < self._quiet_until_s or concurrent == (self._doubt is not None):
            return Verdict.NONE
        bar_s = LATE_S
        if self._doubt is not None:
            suspect, level_s = self._doubt
            if decode != suspect:
                return Verdict.NONE
            bar_s = max(LATE_S, level_s - LATE_S / 2)
        waits = self._waits[decode]
        waits.append(wait_s)
        level_s = sorted(waits)[-LATE_MAX] if len(waits) >= LATE_MAX else 0.0
        if level_s <= bar_s:
            return Verdict.NONE
        self._waits.clear()
        if self._doubt is None:
            self._doubt = (decode, level_s)
            return Verdict.DOUBT
        self._doubt, self._quiet_until_s = None, now_s + DISTRUST_S
        return Verdict.CLEAR

    def believe(self) -> None:
        """Hand-overs are concurrent again."""
        self._doubt = None
        self._waits.clear()


def wait_of(seen: Observation) -> float | None:
    """Seconds from the end of a prefill to the first token, or, of an answer that came whole, to its end,
    less what its tokens must have taken. None: it is not known."""
    if not seen.prefill_done_s or seen.status != 200:
        return None
    if seen.stream:
        return seen.first_byte_s - seen.prefill_done_s if seen.first_byte_s else None
    if seen.outcome != Outcome.ANSWERED:
        return None
    return seen.last_byte_s - seen.prefill_done_s - TOKEN_S * max(0, seen.completion_tokens)
