"""How late the messages of another proxy are, by its clock and this one's."""

from __future__ import annotations

import math

LAG_MAX_S = 0.5  # a longer delay than this is taken for clocks that differ
SHARE = 0.1  # of the mean lag, that the last message makes
LATE_MAX = 8  # messages in a row that are later: then the clocks differ


class PeerClock:
    """Clocks of hosts agree within some milliseconds (NTP). Where messages seem to arrive before they were
    sent, or again and again more than LAG_MAX_S late, the clocks differ, and the fastest message since counts
    as one without lag. Not thread safe.

    mean_lag_s: of the last messages.
    """

    def __init__(self) -> None:
        self.mean_lag_s = 0.0
        self._ahead_s = 0.0  # by how much this clock is ahead of the other
        self._late = 0  # messages in a row

    def lag_s(self, sent_at: float, now: float) -> float:
        """Seconds from ``sent_at`` by the other clock to ``now`` by this one, from 0 to LAG_MAX_S.
        0.0 for a proxy that does not say when it sends (``sent_at`` 0.0)."""
        passed_s = now - sent_at
        if not sent_at or not math.isfinite(passed_s):
            return 0.0
        lag_s = passed_s - self._ahead_s
        if lag_s > LAG_MAX_S and self._late < LATE_MAX and not 0.0 <= passed_s <= LAG_MAX_S:
            self._late += 1
            return LAG_MAX_S
        self._late = 0
        if not 0.0 <= lag_s <= LAG_MAX_S:
            self._ahead_s = 0.0 if 0.0 <= passed_s <= LAG_MAX_S else passed_s
            lag_s = passed_s - self._ahead_s
        self.mean_lag_s += SHARE * (lag_s - self.mean_lag_s)
        return lag_s
