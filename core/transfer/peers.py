"""``Peers``: the segments of an engine's peers by name, for callers that name a peer with each transfer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moonpool.core.errors import Error
from moonpool.core.transfer.segment import Segment


class Peers:
    """Opens each peer once, when it is first asked for. Any thread.

    opening: opens the peer of a name; raises Error.
    """

    def __init__(self, opening: Callable[[str], Segment]) -> None:
        self._opening = opening
        self._segments: dict[str, Segment] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Segment:
        """The peer. Raises what ``opening`` raises."""
        segment = self._segments.get(name)
        if segment is None:
            opened = self._opening(name)
            with self._lock:
                segment = self._segments.setdefault(name, opened)
            if segment is not opened:  # another thread was faster
                opened.close()
        return segment

    def forget(self, name: str) -> None:
        """Drops the peer; the next call opens it again, perhaps as another process."""
        with self._lock:
            segment = self._segments.pop(name, None)
        if segment is not None:
            segment.close()

    def forget_if_gone(self, name: str) -> None:
        """After a failed transfer: drops a peer that answers no more. Of another one, other threads'
        transfers go on."""
        segment = self._segments.get(name)
        if segment is not None:
            try:
                segment.refresh()
            except Error:
                self.forget(name)

    def clear(self) -> None:
        """Forgets all, after the engine's end."""
        with self._lock:
            self._segments.clear()
