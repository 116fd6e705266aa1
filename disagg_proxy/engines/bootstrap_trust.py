"""Decides from the latency of hand-overs whether a bootstrap page belongs to its engine.

A page at the default port may belong to another engine of the host, or be unreachable for a decode engine.
Then decode waits in vain, and the only symptom is answers that come late after their prefill: not all of
them, because decode may have a prompt in its own cache, and one of several ranks may be right. An overloaded
decode engine shows the same symptom. So the two-step form is used for a while; if it is as late, the page is
not the cause.

Pure.
"""

from __future__ import annotations

from collections import defaultdict, deque
from enum import Enum

from moonpool.disagg_proxy.data_plane.observations import Observation, Outcome

LATE_S = 2.5  # a hand-over that takes longer is late: no transfer of blocks is so slow
LATE_MAX = 4  # late ones among the last WINDOW hand-overs to one decode engine
WINDOW = 16
DISTRUST_S = 300.0
# Least seconds for one token: only the end of a non-streamed answer is observed. A slower engine may raise a
# needless doubt, which two-step hand-overs then clear.
TOKEN_S = 0.01


class Verdict(Enum):
    """DOUBT: use the two-step form. CLEAR: it is as late, so the page is not the cause."""

    NONE = 0
    DOUBT = 1
    CLEAR = 2


class BootstrapTrust:
    """Trust in one page. Not thread safe. A doubt lasts until it is cleared, or until ``believe``."""

    def __init__(self) -> None:
        self._waits: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._doubt: tuple[int, float] | None = None  # the decode engine, and how late it was
        self._quiet_until_s = 0.0

    def met(self, decode: int, wait_s: float, *, concurrent: bool, now_s: float) -> Verdict:
        """Records a hand-over. decode: place of the decode engine. wait_s: seconds from the end of the
        prefill."""
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
        """Resets the state: hand-overs are concurrent again."""
        self._doubt = None
        self._waits.clear()


def wait_of(seen: Observation) -> float | None:
    """Seconds from the end of the prefill to the first token. For a non-streamed answer: to its end, less
    TOKEN_S for each token. None: unknown."""
    if not seen.prefill_done_s or seen.status != 200:
        return None
    if seen.stream:
        return seen.first_byte_s - seen.prefill_done_s if seen.first_byte_s else None
    if seen.outcome != Outcome.ANSWERED:
        return None
    return seen.last_byte_s - seen.prefill_done_s - TOKEN_S * max(0, seen.completion_tokens)
