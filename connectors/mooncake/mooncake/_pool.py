"""``BufferPool``: memory that is registered with a store once and lent many times."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable
from operator import index
from types import TracebackType
from typing import Any

import numpy as np

from ._codes import Code

_UNIT = 1 << 62  # more than any machine has
WAIT_S = 60.0  # of an acquire() that may wait, without a time-out of its own


class _Exported(np.ndarray):
    """What the views of a lease are views of: it lives as long as one of them, and keeps the lease alive."""

    lease: BufferLease


class BufferLease:
    """Memory of a pool until release() or the end of its ``with``; afterwards ptr and buffer raise."""

    def __init__(self, pool: BufferPool, region: _Region, size: int) -> None:
        self._pool = pool
        self._region: _Region | None = region
        self._size = size
        self._exported: Callable[[], _Exported | None] = lambda: None
        self._releasing = threading.Lock()

    def _held(self) -> _Region:
        if self._region is None:
            raise RuntimeError("buffer lease is closed")
        return self._region

    @property
    def ptr(self) -> int:
        """The address of the memory."""
        return self._held().address

    @property
    def size(self) -> int:
        """Bytes that were asked for."""
        return self._size

    @property
    def buffer(self) -> memoryview:
        """Writable. As long as it, or a view of it, is alive, the lease cannot be released."""
        with self._releasing:
            exported = self._exported()
            if exported is None:
                exported = _Exported(self._size, np.uint8, self._held().memory)
                exported.lease = self
                self._exported = weakref.ref(exported)
            return exported.data

    def release(self) -> None:
        """Gives it back; harmless the second time. Raises RuntimeError while a view of it is alive: the next
        holder's bytes would be under it.
        """
        with self._releasing:
            if self._exported() is not None:
                raise RuntimeError("cannot release buffer while exported views exist")
            region, self._region = self._region, None
        if region is not None:
            self._pool._give_back(region)

    def __enter__(self) -> BufferLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "_releasing"):
            self.release()  # no view is alive: each keeps the lease


class BufferLeaseView:
    """What lends a memoryview of a lease."""

    def __init__(self, lease: BufferLease) -> None:
        self._lease = lease

    @property
    def buffer(self) -> memoryview:
        """The memory as a view."""
        return self._lease.buffer


class _Region:
    """One mapping; its start is a multiple of the pool's alignment."""

    def __init__(self, size: int, alignment: int) -> None:
        spare = max(alignment - mmap.PAGESIZE, 0)
        self.size = size
        self._mapping = mmap.mmap(-1, size + spare)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        offset = -start % alignment
        self.address = start + offset
        self.memory = memoryview(self._mapping)[offset : offset + size]


class BufferPool:
    """Lends registered memory in size classes, which are powers of two times ``min_size_class``.

    store:          what the memory is registered with.
    max_bytes:      of all regions; 0: no limit. max_regions: how many; None: no limit.
    max_size_class: the largest that is kept for the next; larger ones are freed at their release.
    block_on_exhaustion, default_timeout: whether acquire() waits for memory, and for how many seconds
    (None: WAIT_S).
    """

    def __init__(
        self,
        store: object,
        max_bytes: int = 0,
        min_size_class: int = 65536,
        max_size_class: int | None = None,
        alignment: int = 8388608,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        max_regions: int | None = None,
        prewarm_size: int | None = None,
        prewarm_count: int = 0,
    ) -> None:
        if not hasattr(store, "_get_pyclient_capsule"):
            raise RuntimeError("BufferPool store parameter must be a MooncakeDistributedStore")
        if store._get_pyclient_capsule() is None:
            raise RuntimeError("MooncakeDistributedStore is not initialized: call setup() before")
        if min_size_class <= 0 or alignment <= 0:
            raise RuntimeError("min_size_class and alignment must be positive")
        if alignment & (alignment - 1) or alignment < ctypes.sizeof(ctypes.c_void_p):
            raise RuntimeError("alignment must be a power of two and at least sizeof(void*)")
        self._store: Any = store
        self._max_bytes = max_bytes or _UNIT
        self._max_regions = _UNIT if max_regions is None else max_regions
        self._smallest = min_size_class
        self._largest_kept = _UNIT if max_size_class is None else max_size_class
        self._alignment = alignment
        self._block = block_on_exhaustion
        self._timeout = default_timeout
        self._changed = threading.Condition()
        self._free: dict[int, list[_Region]] = {}
        self._regions = 0
        self._bytes = 0
        self._lent = 0
        self._closed = False
        if prewarm_size is not None:
            self.prewarm(prewarm_size, prewarm_count)

    def acquire(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """``size`` bytes (0 is a lease as well), aligned. Raises RuntimeError when the pool is closed, or has
        no room: within ``timeout`` seconds, where it may wait, and at once for more than it can ever have.
        TypeError for what is no size.
        """
        wanted = self._class_of(size)
        waits = self._block if block is None else bool(block)
        limit = _seconds(self._timeout if timeout is None else timeout)
        with self._changed:
            if wanted > self._max_bytes and not self._closed:
                raise RuntimeError(
                    f"buffer pool is exhausted: {size} bytes are more than its {self._max_bytes}"
                )
            if not self._changed.wait_for(lambda: self._may_have(wanted), (limit if waits else 0)):
                why = f"timed out waiting for buffer, {limit} s" if waits else "buffer pool is exhausted"
                raise RuntimeError(f"{why}: {size} bytes wanted, {self._bytes} of {self._max_bytes} in use")
            region = self._take(wanted)
            self._lent += 1
        return BufferLease(self, region, size)

    def buffer(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """The same, for ``with``."""
        return self.acquire(size, block, timeout)

    def prewarm(self, size: int, count: int) -> None:
        """Registers that many buffers ahead."""
        leases = [self.acquire(size, block=False) for _ in range(count)]
        for lease in leases:
            lease.release()

    def close(self) -> None:
        """Frees all. Raises RuntimeError while something is lent."""
        with self._changed:
            if self._lent:
                raise RuntimeError("cannot close buffer pool with active leases")
            self._closed = True
            for regions in self._free.values():
                for region in regions:
                    self._drop(region)
            self._free.clear()
            self._changed.notify_all()

    def __del__(self) -> None:
        if hasattr(self, "_closed") and not self._lent:
            self.close()

    def _class_of(self, size: int) -> int:
        if index(size) < 0 or size >= _UNIT:
            raise TypeError(f"a buffer has a number of bytes, not {size!r:.80}")
        wanted = self._smallest
        while wanted < size:
            wanted *= 2
        return wanted

    def _may_have(self, wanted: int) -> bool:
        if self._closed:
            raise RuntimeError("buffer pool is closed")
        if self._free.get(wanted):
            return True
        while not self._fits(wanted) and self._drop_an_idle_one():
            pass
        return self._fits(wanted)

    def _fits(self, wanted: int) -> bool:
        return self._bytes + wanted <= self._max_bytes and self._regions < self._max_regions

    def _drop_an_idle_one(self) -> bool:
        """A free region of another class makes room."""
        for regions in self._free.values():
            if regions:
                self._drop(regions.pop())
                return True
        return False

    def _take(self, wanted: int) -> _Region:
        if idle := self._free.get(wanted):
            return idle.pop()
        region = _Region(wanted, self._alignment)
        code = self._store.register_buffer(region.address, region.size)
        if code != Code.OK:
            raise RuntimeError(f"the store did not register {wanted} bytes: {code}")
        self._bytes += wanted
        self._regions += 1
        return region

    def _give_back(self, region: _Region) -> None:
        with self._changed:
            self._lent -= 1
            if region.size > self._largest_kept or self._closed:
                self._drop(region)
            else:
                self._free.setdefault(region.size, []).append(region)
            self._changed.notify_all()  # each waits for a size of its own

    def _drop(self, region: _Region) -> None:
        self._store.unregister_buffer(region.address)
        self._bytes -= region.size
        self._regions -= 1


def _seconds(given: float | None) -> float:
    """RuntimeError for what is no time, as callers know it."""
    if given is None:
        return WAIT_S
    if not isinstance(given, (int, float)) or not given >= 0:
        raise RuntimeError(f"timeout must be non-negative, in seconds, not {given!r:.80}")
    return float(given)
