"""The last worker of each conversation."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from moonpool.disagg_proxy.conductor.worker import Worker

SESSIONS_MAX = 65_536


class Last(NamedTuple):
    """tokens: of its prompt, 0 when not known."""

    worker: Worker
    tokens: int


class Sessions:
    """The SESSIONS_MAX conversations with the most recent requests."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, Last] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def find(self, session: str) -> Last | None:
        """The worker of the session's last request; None for "", and for a session that was never seen or has
        been dropped."""
        return self._last.get(session) if session else None

    def keep(self, session: str, worker: Worker, tokens: int) -> None:
        """Remembers it, and drops the session whose last request is longest ago where there are more than
        SESSIONS_MAX. "" is not remembered."""
        if not session:
            return
        self._last[session] = Last(worker, tokens)
        self._last.move_to_end(session)
        if len(self._last) > SESSIONS_MAX:
            self._last.popitem(last=False)
