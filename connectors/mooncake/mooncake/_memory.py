"""Memory that callers name by address: what is registered, and what can be memory at all.

The core believes an (address, length). A caller of this API who gives an address that is none must get a code
and no crash; so what is not registered is asked for at the kernel, page by page at both ends.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import chain
from operator import add
from typing import Any

from moonpool.core.errors import InvalidArgument

_libc = ctypes.CDLL(None, use_errno=True)
_PAGE = mmap.PAGESIZE
_END = 1 << 47  # of what a process can address


def is_mapped(address: int, length: int) -> bool:
    """Whether both ends of the range are memory of this process. That it is writable is not looked at."""
    if not (address > 0 and 0 < length <= _END - address):
        return False
    state = (ctypes.c_ubyte * 1)()
    for end in (address, address + length - 1):
        page = ctypes.c_void_p(end & ~(_PAGE - 1))
        if _libc.mincore(page, ctypes.c_size_t(_PAGE), state) != 0:
            return False
    return True


class Buffers:
    """Registered ranges, which never overlap. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._length: dict[int, int] = {}
        self._last = 0, 0  # from and to of the buffer that was met last

    def add(self, address: int, length: int) -> None:
        """Raises InvalidArgument for what is no memory and for an overlap."""
        if not is_mapped(address, length):
            raise InvalidArgument(f"{length} bytes at {address:#x} are no memory of this process")
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

    def check(self, address: int, length: int) -> tuple[int, int]:
        """The range as the core takes it. Raises InvalidArgument for what is no memory."""
        with self._lock:
            place = bisect_right(self._starts, address)
            if place and length > 0:
                start = self._starts[place - 1]
                end = start + self._length[start]
                if address + length <= end:
                    self._last = start, end
                    return address, length
        if not is_mapped(address, length):
            raise InvalidArgument(f"{length} bytes at {address:#x} are no memory of this process")
        return address, length

    def check_all(self, addresses: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """The same for many. TypeError for what is no number."""
        if self._hold(addresses, lengths):
            return list(zip(addresses, lengths, strict=True))
        return [
            self.check(number(address), number(length))
            for address, length in zip(addresses, lengths, strict=True)
        ]

    def check_lists(
        self, addresses: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]]
    ) -> list[list[tuple[int, int]]]:
        """The same for a list of lists."""
        pairs = zip(addresses, lengths, strict=True)
        if self._hold(list(chain.from_iterable(addresses)), list(chain.from_iterable(lengths))):
            return [list(zip(these, those, strict=True)) for these, those in pairs]
        return [self.check_all(these, those) for these, those in pairs]

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
