"""A CUDA card through its driver alone: memory, streams, copies. No torch, so that nothing else is on it."""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.processes import Failed

LIBRARY = "libcuda.so.1"
WAIT_S = 60.0
PIECE = 64 << 20  # what the limit copies at a time
_NON_BLOCKING = 1
_SUCCESS, _NOT_READY = 0, 600

Bytes = npt.NDArray[np.uint8]


class Card:
    """Device 0, its primary context current on the thread that made this."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Raises Failed without a driver or a card."""
        try:
            self._lib = ctypes.CDLL(library)
        except OSError as error:
            raise Failed(f"this needs a CUDA card: {error}") from None
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, 0)
        name, version = ctypes.create_string_buffer(100), ctypes.c_int()
        self._call("cuDeviceGetName", name, 100, device)
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self.name, self.driver = name.value.decode(), version.value
        self._stream = stream
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), 0)
        self._event = event
        self._pinned: dict[tuple[int, int], Bytes] = {}

    def allocate(self, size: int) -> int:
        """The address of new memory of the card."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return int(address.value)

    def pinned(self, size: int, number: int = 0) -> Bytes:
        """Pinned memory of the host, all its pages present; the same for the same size and number."""
        if (size, number) not in self._pinned:
            memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
            memory[::4096] = 1
            begin = ctypes.c_void_p(memory.ctypes.data)
            self._call("cuMemHostRegister_v2", begin, ctypes.c_size_t(size), 1)
            self._pinned[size, number] = memory
        return self._pinned[size, number]

    def queue(self, to: int, source: int, size: int) -> None:
        """Queues a copy between any two memories that the card reaches."""
        self._call(
            "cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size), self._stream
        )

    def finish(self) -> None:
        """Returns when all that was queued has ended. Raises Failed after WAIT_S."""
        self._call("cuEventRecord", self._event, self._stream)
        deadline_s = time.monotonic() + WAIT_S
        while (code := self._lib.cuEventQuery(self._event)) == _NOT_READY:
            if time.monotonic() > deadline_s:
                raise Failed(f"the card did not end its copies in {WAIT_S:g} s")
        if code != _SUCCESS:
            raise Failed(f"cuEventQuery: CUDA error {code}")

    def copy_s(self, to: int, source: int, size: int) -> float:
        """Seconds of a copy in pieces of PIECE, one behind the other."""
        start_s = time.perf_counter()
        for at in range(0, size, PIECE):
            self.queue(to + at, source + at, min(PIECE, size - at))
        self.finish()
        return time.perf_counter() - start_s

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code != _SUCCESS:
            raise Failed(f"{name}: CUDA error {code}")
