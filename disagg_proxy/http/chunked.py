"""Takes the chunked transfer coding off a body (RFC 9112 section 7.1), strictly: CRLF only, no signs, no
blanks.

Used for request bodies, where the exact end matters (a pipelined request may follow), and for the rare client
of HTTP/1.0 that cannot read a chunked answer. Chunked answers otherwise pass through as they are.

    size-line CRLF  data CRLF  size-line CRLF  data CRLF ... 0 CRLF  [trailer CRLF]... CRLF
    ^LINE           ^DATA ^END                                       ^TRAILER          ^done
"""

from __future__ import annotations

from enum import Enum, auto

_LINE_BYTES_MAX = 1024  # a size line with its extensions, or one trailer line
_TRAILER_BYTES_MAX = 8192
_HEX = frozenset(b"0123456789abcdefABCDEF")


class ChunkError(ValueError):
    """The bytes are no chunked body; str() says why."""


class _State(Enum):
    LINE = auto()
    DATA = auto()
    END = auto()
    TRAILER = auto()


class ChunkDecoder:
    """Appends the content of a chunked body to a bytearray that the caller owns.

    done: the last chunk and the trailers were read; bytes behind them are what ``feed`` returned.
    """

    __slots__ = ("_left", "_line", "_state", "_trailer_bytes", "done")

    def __init__(self) -> None:
        self._state = _State.LINE
        self._line = b""
        self._left = 0
        self._trailer_bytes = 0
        self.done = False

    def feed(self, data: bytes, into: bytearray) -> bytes:
        """Decode data into ``into``; returns what follows the body (b"" until done). Raises ChunkError."""
        at = 0
        while at < len(data) and not self.done:
            if self._state is _State.DATA:
                piece = data[at : at + self._left]
                into += piece
                at += len(piece)
                self._left -= len(piece)
                if self._left == 0:
                    self._state = _State.END
                continue
            end = data.find(b"\n", at)
            self._line += data[at:] if end < 0 else data[at : end + 1]
            if len(self._line) > _LINE_BYTES_MAX:
                raise ChunkError(f"a chunk's size line is longer than {_LINE_BYTES_MAX} bytes")
            if end < 0:
                return b""
            at = end + 1
            line, self._line = self._line, b""
            if not line.endswith(b"\r\n"):
                raise ChunkError("a line of the chunked body does not end in CRLF")
            self._take_line(line[:-2])
        return data[at:] if self.done else b""

    def _take_line(self, line: bytes) -> None:
        if self._state is _State.END:
            if line:
                raise ChunkError("a chunk is longer than its size line says")
            self._state = _State.LINE
        elif self._state is _State.LINE:
            digits = line.split(b";", 1)[0]
            if not digits or len(digits) > 15 or not _HEX.issuperset(digits):
                raise ChunkError("a chunk's size is no hexadecimal number")
            self._left = int(digits, 16)
            self._state = _State.DATA if self._left else _State.TRAILER
        else:
            self._trailer_bytes += len(line) + 2
            if self._trailer_bytes > _TRAILER_BYTES_MAX:
                raise ChunkError(
                    f"the trailers of the chunked body are longer than {_TRAILER_BYTES_MAX} bytes"
                )
            self.done = not line
