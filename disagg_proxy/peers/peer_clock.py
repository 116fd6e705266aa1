"""How late the messages of another proxy are, by its clock and this one's."""

from __future__ import annotations

LAG_MAX_S = 2.0  # a longer delay than this is taken for clocks that differ
SHARE = 0.1  # of the mean lag, that the last message makes


class PeerClock:
    """Clocks of hosts agree within some milliseconds (NTP). Where messages seem to arrive before they were
    sent, or more than LAG_MAX_S late, the clocks differ, and the fastest message so far counts as one without
    lag. Not thread safe.

    mean_lag_s: of the last messages.
    """

    def __init__(self) -> None:
        self.mean_lag_s = 0.0
        self._ahead_s = 0.0  # by how much this clock is ahead of the other

    def lag_s(self, sent_at: float, now: float) -> float:
        """Seconds from ``sent_at`` by the other clock to ``now`` by this one, from 0 to LAG_MAX_S.
        0.0 for a proxy that does not say when it sends (``sent_at`` 0.0)."""
        if not sent_at:
            return 0.0
        lag_s = now - sent_at - self._ahead_s
        if not 0.0 <= lag_s <= LAG_MAX_S:
            self._ahead_s, lag_s = now - sent_at, 0.0
        self.mean_lag_s += SHARE * (lag_s - self.mean_lag_s)
        return lag_s
