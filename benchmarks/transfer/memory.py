"""Memory of the two processes: filled before a run; compared and spoilt after every pass, untimed.

The initiator does all of it, the other process's memory through process_vm_readv and process_vm_writev: no
engine vouches for its own bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.transfer.cells import MIB

TILE = MIB + 4099  # bytes after which the pattern repeats: no two blocks of a cell are alike
POISON = 0xA5
IOV_MAX = 1024
CHUNK = 16 * MIB  # compared at a time
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    _call.restype = ctypes.c_ssize_t
process_vm_readv = _libc.process_vm_readv


class Region:
    """``size`` bytes at ``address``; ``owner`` keeps them mapped. Without one: private anonymous memory."""

    def __init__(self, size: int, owner: object = None, address: int = 0) -> None:
        if owner is None:
            owner = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size, self.owner = size, owner
        self.address = address or address_of(owner)

    def fill(self, seed: str) -> None:
        """Random bytes, other ones for another seed; every page present."""
        tile = random.Random(seed).randbytes(TILE)
        for at in range(0, self.size, TILE):
            ctypes.memmove(self.address + at, tile, min(TILE, self.size - at))

    def spoil(self) -> None:
        ctypes.memset(self.address, POISON, self.size)

    def view(self) -> memoryview:
        return memoryview((ctypes.c_char * self.size).from_address(self.address)).cast("B")


def address_of(buffer: object) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # type: ignore[arg-type]


def let_others_look() -> None:
    """Where the kernel allows only parents (yama), any process of this user may read and write our memory."""
    _libc.prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)


@dataclass(frozen=True)
class Blocks:
    """``block`` bytes at each of ``offsets`` from ``base``, in the process ``pid``."""

    pid: int
    base: int
    offsets: Sequence[int]
    block: int

    def groups(self) -> Iterator[tuple[array[int], int, int]]:
        """(iovecs, their count, their bytes), each no more than one system call takes."""
        step = max(1, min(IOV_MAX, CHUNK // self.block))
        for at in range(0, len(self.offsets), step):
            part = self.offsets[at : at + step]
            words = array("Q", bytes(16 * len(part)))
            words[::2] = array("Q", [self.base + offset for offset in part])
            words[1::2] = array("Q", [self.block]) * len(part)
            yield words, len(part), self.block * len(part)

    def read(self, into: Region) -> Iterator[int]:
        """Each group's bytes, one after another, lie in ``into`` until the next is asked for."""
        for words, count, size in self.groups():
            self._move(_libc.process_vm_readv, into, words, count, size)
            yield size

    def spoil(self, poison: Region) -> None:
        for words, count, size in self.groups():
            self._move(_libc.process_vm_writev, poison, words, count, size)

    def _move(
        self, call: ctypes._NamedFuncPointer, local: Region, words: array[int], count: int, size: int
    ) -> None:
        ours = array("Q", [local.address, size])
        moved = call(self.pid, ours.buffer_info()[0], 1, words.buffer_info()[0], count, 0)
        if moved != size:
            raise OSError(
                ctypes.get_errno(), f"process_vm_readv or _writev of {size} bytes of process {self.pid}"
            )


class Checker:
    """Compares what was moved with where it came from, and spoils it for the next pass."""

    def __init__(self) -> None:
        self._one, self._other, self._poison = (Region(CHUNK) for _ in range(3))
        self._poison.spoil()

    def check(self, source: Blocks, sink: Blocks) -> bool:
        same = all(
            _libc.memcmp(self._one.address, self._other.address, size) == 0
            for size, _ in zip(source.read(self._one), sink.read(self._other), strict=True)
        )
        sink.spoil(self._poison)
        return same


def mapped(pid: int, address: int, size: int) -> mmap.mmap | None:
    """Shared memory that another process has mapped at ``address``, mapped here as well; None where it is not
    a file that /proc shows. Its pages are present.
    """
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, offset, device, inode, *_ = line.split()
        start, end = (int(word, 16) for word in span.split("-"))
        if not (start <= address and address + size <= end) or inode == "0":
            continue
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            found = os.stat(path)
            if (
                found.st_ino != int(inode)
                or f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}" != device
            ):
                continue
            fd = os.open(path, os.O_RDWR)
            try:
                at = int(offset, 16) + address - start
                shared = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=at)
            finally:
                os.close(fd)
            return shared
    return None
