"""Memory that callers name by address: registered ranges, and checks of other ranges.

The core trusts an (address, length). A caller of this API that passes an invalid address must get a code and
no crash. So this module asks about ranges that are not registered: the CUDA driver, where this process has
one, whether it is memory of a card, whose bytes the core moves by themselves; else the kernel, which reads a
byte at both ends, and whose table of mappings, which is slower, must allow writes where bytes are written.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from typing import Any

from moonpool import _native
from moonpool.core.errors import InvalidArgument

_libc = ctypes.CDLL(None, use_errno=True)
ADDRESSES = 1 << 47  # addresses of a process
COPY_TIMEOUT_S = 5.0  # of a card's copies that no call to the pool is made for
_MAPPINGS = "/proc/self/maps"


class _Piece(ctypes.Structure):  # struct iovec
    _fields_ = (("base", ctypes.c_size_t), ("length", ctypes.c_size_t))


_Two = _Piece * 2
_BYTES = (ctypes.c_char * 2)()  # never read
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


def is_range(address: int, length: int) -> bool:
    """Whether a process can have such memory at all."""
    return address > 0 and 0 < length <= ADDRESSES - address


def lies_on_card(address: int, length: int) -> bool:
    """Whether all of it is memory of a CUDA card. Raises InvalidArgument for a range over two allocations."""
    return is_range(address, length) and _native.card_of(address, length) is not None


def check_no_card(address: int, length: int) -> None:
    """Raises InvalidArgument for memory of a card, where a tensor was to be made of what was checked."""
    if lies_on_card(address, length):
        raise InvalidArgument(f"{length} bytes at {address:#x} are a GPU's, and tensors lie on the host here")


def check_memory(address: int, length: int, *, writable: bool = False) -> None:
    """Raises InvalidArgument unless the CPU can read both ends of the range, or write all of it."""
    inside = is_range(address, length)
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
    """Registered ranges, which never overlap, on cards or on the host. Any thread: the GIL guards them."""

    def __init__(self) -> None:
        self._ranges = _native.Ranges()
        self._copies = _native.CardCopies()

    def add(self, address: int, length: int) -> None:
        """Raises InvalidArgument for what is no memory to read and to write, and for an overlap."""
        if not lies_on_card(address, length):
            check_memory(address, length, writable=True)
        if not self._ranges.add(address, length):
            raise InvalidArgument(f"{length} bytes at {address:#x} overlap a registered buffer")

    def remove(self, address: int) -> None:
        """Forgets the buffer at ``address``. Raises InvalidArgument when none is registered there."""
        if not self._ranges.remove(address):
            raise InvalidArgument(f"no buffer is registered at {address:#x}")

    def clear(self) -> None:
        """Forgets all buffers."""
        self._ranges.clear()

    def check(self, address: int, length: int, *, writable: bool = False) -> tuple[int, int]:
        """The range as the core takes it. Raises InvalidArgument for what is no memory to read, or write."""
        if not self._ranges.hold([address], [length]) and not lies_on_card(address, length):
            check_memory(address, length, writable=writable)
        return address, length

    def check_part(self, start: int, offset: int, length: int) -> tuple[int, int]:
        """Bytes to write in the buffer at ``start``, whose length the caller did not give: where it is
        registered they must lie in it.
        """
        if self._ranges.hold([start], [1]) and not self._ranges.hold([start], [offset + length]):
            raise InvalidArgument(f"{length} bytes from {offset} leave the registered buffer of {start:#x}")
        return self.check(start + offset, length, writable=True)

    def copy(self, targets: Sequence[tuple[int, int]], sources: Sequence[tuple[int, int]]) -> None:
        """Each source to the target at the same place, which is as long and was checked. Raises Error."""
        self._copies.copy(targets, sources, COPY_TIMEOUT_S)

    def check_all(
        self, addresses: Sequence[int], lengths: Sequence[int], *, writable: bool = False
    ) -> list[tuple[int, int]]:
        """The same for many; one native call where all are registered. TypeError for what is no number.

        What was checked is what is given back: another thread may change the caller's lists.
        """
        pairs: list[tuple[int, int]] | None = self._ranges.hold(addresses, lengths)
        if pairs is not None:
            return pairs
        addresses, lengths = list(addresses), list(lengths)
        same_length(addresses, lengths)
        return [
            self.check(number(address), number(length), writable=writable)
            for address, length in zip(addresses, lengths, strict=True)
        ]

    def check_lists(
        self, addresses: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]], *, writable: bool = False
    ) -> list[Any]:
        """The same for a list of lists."""
        pairs: list[Any] | None = self._ranges.hold_lists(addresses, lengths)
        if pairs is not None:
            return pairs  # a pair of lists is one object's parts
        addresses, lengths = list(addresses), list(lengths)
        same_length(addresses, lengths)
        return [
            self.check_all(these, those, writable=writable)
            for these, those in zip(addresses, lengths, strict=True)
        ]


def same_length(*columns: Sequence[Any]) -> None:
    """Raises InvalidArgument for columns of different lengths."""
    first = len(columns[0])
    for column in columns:
        if len(column) != first:
            raise InvalidArgument(f"lists of different lengths: {[len(column) for column in columns]}")


def number(value: Any) -> int:
    """An address or a size: TypeError for what is no such number, as callers know it."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or (n := int(value)) < 0:
        raise TypeError(f"expected a number that is not negative, got {value!r:.80}")
    return n
