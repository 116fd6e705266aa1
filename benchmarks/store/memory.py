"""The caller's memory: one buffer that objects are put from, and one that they are got into."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

STAMP = struct.Struct("<QQ")
TILE = (1 << 20) + 4099  # bytes after which random memory repeats: no two objects are alike


class Buffer:
    """Private anonymous memory, all its pages present. ``address`` is valid as long as the buffer lives."""

    def __init__(self, size: int, *, random: bool = False) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size)
        tile = os.urandom(TILE) if random else bytes(TILE)
        for at in range(0, size, TILE):
            self._map[at : at + TILE] = tile[: size - at]
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def stamp(self, offset: int, size: int, mark: int) -> None:
        """Makes the object at ``offset`` another one than in the pass before: at its start and at its end."""
        STAMP.pack_into(self._map, offset, mark, offset)
        STAMP.pack_into(self._map, offset + size - STAMP.size, offset, mark)

    def poison(self, offset: int = 0, size: int | None = None) -> None:
        """So that a get that writes nothing is seen."""
        ctypes.memset(self.address + offset, 0xA5, self.size if size is None else size)

    def equals(self, other: Buffer, offset: int = 0, size: int | None = None) -> bool:
        length = self.size if size is None else size
        return bool(_memcmp(self.address + offset, other.address + offset, length) == 0)


def _libc_memcmp() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None).memcmp
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_int
    return function


_memcmp = _libc_memcmp()
