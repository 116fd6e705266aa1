"""What the two sides of `moonpool bench transfer` say to each other, all of it by the engine itself.

The serving side registers two regions, known by their location: CONTROL and DATA. DATA holds the words of
``pattern(0)``. When a message ``mark`` with a number arrives, the server writes its CPU time into CONTROL and
then the number; the client reads CONTROL until the number is there.

CONTROL, little-endian: 8 bytes magic, u32 version, u32 zero, u64 mark, u64 CPU time in ns.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CONTROL = "bench:control"
DATA = "bench:data"
CONTROL_BYTES = 4096
MAGIC = b"MPBENCH1"
VERSION = 1
_HEAD = struct.Struct("<8sII")
_MARK = struct.Struct("<Q")
_MARK_AT, _CPU_AT = 16, 24
_ODD = 0x9E3779B97F4A7C15  # an odd factor: no two words of a pattern are equal


def start(block: memoryview) -> None:
    """An empty control block."""
    _HEAD.pack_into(block, 0, MAGIC, VERSION, 0)


def answer(block: memoryview, message: bytes, cpu_ns: int) -> None:
    """Does what a client asked for. What is no mark is not for us."""
    verb, _, number = message.partition(b" ")
    if verb == b"mark" and number.isdigit() and int(number) < 1 << 64:
        _MARK.pack_into(block, _CPU_AT, cpu_ns)
        _MARK.pack_into(block, _MARK_AT, int(number))


def mark_message(number: int) -> bytes:
    """The notification upon which the server publishes its CPU time. number: below 2^64; ``read`` returns it
    when the answer is there.
    """
    return b"mark %d" % number


def read(block: memoryview) -> tuple[int, int] | None:
    """(the last mark, CPU time in ns); None when this is no control block of our version."""
    magic, version, _ = _HEAD.unpack_from(block, 0)
    if (magic, version) != (MAGIC, VERSION):
        return None
    return _MARK.unpack_from(block, _MARK_AT)[0], _MARK.unpack_from(block, _CPU_AT)[0]


def pattern(seed: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """``nbytes`` bytes whose every word of 8 names its place and the seed."""
    import numpy as np

    words: Any = np.arange(seed, seed + (nbytes + 7) // 8, dtype=np.uint64)
    words *= np.uint64(_ODD)
    found: npt.NDArray[np.uint8] = words.view(np.uint8)[:nbytes]
    return found
