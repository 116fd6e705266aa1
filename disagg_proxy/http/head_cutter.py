"""Finds where a head ends in a stream that arrives in arbitrary pieces."""

from __future__ import annotations

_END = b"\r\n\r\n"


class HeadCutter:
    """Looks for the blank line across pieces; keeps three bytes, never the head itself.

    size: bytes seen so far that belong to the head (bounded by the caller, who refuses a head that is too
    large).
    """

    __slots__ = ("_tail", "size")

    def __init__(self) -> None:
        self._tail = b""
        self.size = 0

    def cut(self, data: bytes) -> int:
        """The offset in data just behind the blank line, or -1 when the head goes on behind data."""
        tail = self._tail
        window = tail + data if tail else data
        found = window.find(_END)
        if found < 0:
            self._tail = window[-3:]
            self.size += len(data)
            return -1
        offset = found + 4 - len(tail)
        self._tail = b""
        self.size += offset
        return offset
