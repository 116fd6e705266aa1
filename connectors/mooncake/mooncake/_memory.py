"""Memory that callers name by address: what is registered, and what can be memory at all.

The core believes an (address, length). A caller of this API who gives an address that is none, or one of a
GPU, must get a code and no crash. So the kernel is asked about what is not registered: it reads a byte at
both ends, and where bytes are to be written its table of mappings must say that they may, which takes longer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import chain
from operator import add
from typing import Any

from moonpool.core.errors import InvalidArgument

_libc = ctypes.CDLL(None, use_errno=True)
_END = 1 << 47  # of what a process can address
_MAPPINGS = "/proc/self/maps"


class _Piece(ctypes.Structure):  # struct iovec
    _fields_ = (("base", ctypes.c_size_t), ("length", ctypes.c_size_t))


_Two = _Piece * 2
_BYTES = (ctypes.c_char * 2)()  # nobody reads them
_NOWHERE = ctypes.pointer(_Piece(ctypes.addressof(_BYTES), 2))
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.POINTER(_Piece),
    ctypes.c_ulong,
    ctypes.POINTER(_Piece),
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def check_memory(address: int, length: int, *, writable: bool = False) -> None:
    """Raises InvalidArgument unless the CPU can read both ends of the range, or write all of it."""
    inside = address > 0 and 0 < length <= _END - address
    if not (inside and is_readable(address, length) and (not writable or is_mapped(address, length, "w"))):
        verb = "write" if writable else "read"
        raise InvalidArgument(
            f"{length} bytes at {address:#x} are no memory of this process that its CPU may {verb}; copy "
            f"what a GPU has to the host first"
        )


def is_readable(address: int, length: int) -> bool:
    """Both ends, as far as the kernel lets us try: a mapping alone may be a place that is only reserved."""
    ends = _Two(_Piece(address, 1), _Piece(address + length - 1, 1))
    got = _libc.process_vm_readv(os.getpid(), _NOWHERE, 1, ends, 2, 0)
    if got < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS):  # a sandbox forbids the call
        return is_mapped(address, length, "r")
    return bool(got == 2)


def is_mapped(address: int, length: int, right: str) -> bool:
    """Whether this process has that right ("r" or "w") on all of the range."""
    end = address + length
    with open(_MAPPINGS) as mappings:
        for line in mappings:
            bounds, rights, _ = line.split(maxsplit=2)
            first, last = (int(text, 16) for text in bounds.split("-"))
            if last <= address:
                continue
            if first > address or right not in rights:
                return False
            if last >= end:
                return True
            address = last
    return False


class Buffers:
    """Registered ranges, which never overlap. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._length: dict[int, int] = {}
        self._last = 0, 0  # from and to of the buffer that was met last

    def add(self, address: int, length: int) -> None:
        """Raises InvalidArgument for what is no memory to read and to write, and for an overlap."""
        check_memory(address, length, writable=True)
        with self._lock:
            place = bisect_right(self._starts, address)
            before = self._starts[place - 1] if place else None
            after = self._starts[place] if place < len(self._starts) else None
            if (before is not None and before + self._length[before] > address) or (
                after is not None and address + length > after
            ):
                raise InvalidArgument(f"{length} bytes at {address:#x} overlap a registered buffer")
            self._length[address] = length
            insort(self._starts, address)

    def remove(self, address: int) -> None:
        with self._lock:
            if address not in self._length:
                raise InvalidArgument(f"no buffer is registered at {address:#x}")
            self._starts.remove(address)
            del self._length[address]
            self._last = 0, 0

    def clear(self) -> None:
        with self._lock:
            self._starts.clear()
            self._length.clear()
            self._last = 0, 0

    def check(self, address: int, length: int, *, writable: bool = False) -> tuple[int, int]:
        """The range as the core takes it. Raises InvalidArgument for what is no memory to read, or write."""
        with self._lock:
            place = bisect_right(self._starts, address)
            if place and length > 0:
                start = self._starts[place - 1]
                end = start + self._length[start]
                if address + length <= end:
                    self._last = start, end
                    return address, length
        check_memory(address, length, writable=writable)
        return address, length

    def check_all(
        self, addresses: Sequence[int], lengths: Sequence[int], *, writable: bool = False
    ) -> list[tuple[int, int]]:
        """The same for many. TypeError for what is no number."""
        if self._hold(addresses, lengths):
            return list(zip(addresses, lengths, strict=True))
        return [
            self.check(number(address), number(length), writable=writable)
            for address, length in zip(addresses, lengths, strict=True)
        ]

    def check_lists(
        self, addresses: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]], *, writable: bool = False
    ) -> list[list[tuple[int, int]]]:
        """The same for a list of lists."""
        pairs = zip(addresses, lengths, strict=True)
        if self._hold(list(chain.from_iterable(addresses)), list(chain.from_iterable(lengths))):
            return [list(zip(these, those, strict=True)) for these, those in pairs]
        return [self.check_all(these, those, writable=writable) for these, those in pairs]

    def _hold(self, addresses: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether all lie in the buffer that was met last, as they mostly do; no step of Python each."""
        start, end = self._last
        return (
            {*map(type, addresses), *map(type, lengths)} == {int}
            and min(lengths) > 0
            and min(addresses) >= start
            and max(map(add, addresses, lengths)) <= end
        )


def number(value: Any) -> int:
    """An address or a size: TypeError for what is no such number, as callers know it."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or (n := int(value)) < 0:
        raise TypeError(f"expected a number that is not negative, got {value!r:.80}")
    return n
