"""The caller's memory: one buffer that objects are put from, and one that they are got into."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

STAMP = struct.Struct("<QQ")


class Buffer:
    """Private anonymous memory, all its pages present. ``address`` is valid as long as the buffer lives."""

    def __init__(self, size: int, *, random: bool = False) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size)
        self._map[:] = os.urandom(size) if random else bytes(size)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def stamp(self, offset: int, size: int, mark: int) -> None:
        """Makes the object at ``offset`` another one than in the pass before: at its start and at its end."""
        STAMP.pack_into(self._map, offset, mark, offset)
        STAMP.pack_into(self._map, offset + size - STAMP.size, offset, mark)

    def poison(self) -> None:
        """So that a get that writes nothing is seen."""
        ctypes.memset(self.address, 0xA5, self.size)

    def equals(self, other: Buffer) -> bool:
        return bool(_memcmp(self.address, other.address, self.size) == 0)


def _libc_memcmp() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None).memcmp
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_int
    return function


_memcmp = _libc_memcmp()
