"""Memory by address: the allocator, its C functions for callers in C, and NUMA binding."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

from ._codes import Code, logger

_ALLOCATED: dict[int, tuple[mmap.mmap, Any]] = {}


class MooncakeHostMemAllocator:
    """Page-aligned memory by address, zeros."""

    def alloc(self, size: int, /) -> int:
        """0 when the system has no such memory."""
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"alloc takes a number of bytes, not {size!r:.80}")
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError) as error:
            logger.warning("MooncakeHostMemAllocator.alloc(%d): %s", size, error)
            return 0
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        _ALLOCATED[address] = memory, view
        return address

    def free(self, address: int, /) -> int:
        """0, or INVALID_PARAMS for what alloc() did not give."""
        if (found := _ALLOCATED.pop(address, None)) is None:
            return int(Code.INVALID_PARAMS)
        memory, view = found
        del view, found
        memory.close()
        return int(Code.OK)


# As an allocator that is plugged into torch has them: void* (size, device, stream) and void (address, size,
# device, stream). The memory is the host's, whatever the device.
_ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
    lambda size, _device, _stream: MooncakeHostMemAllocator().alloc(size)
)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
    lambda address, _size, _device, _stream: MooncakeHostMemAllocator().free(address or 0)
)


def get_alloc_func_addr() -> int:
    """The address of a C function that gives page-aligned host memory, NULL when there is none."""
    return ctypes.cast(_ALLOC, ctypes.c_void_p).value or 0


def get_free_func_addr() -> int:
    """The address of the C function that takes it back; other addresses change nothing."""
    return ctypes.cast(_FREE, ctypes.c_void_p).value or 0


def bind_to_numa_node(node: int) -> None:
    """This thread, and those it starts, run on the CPUs of that NUMA node; a warning where there is none."""
    try:
        text = Path(f"/sys/devices/system/node/node{int(node)}/cpulist").read_text()
        os.sched_setaffinity(0, cpus_of(text))
    except (OSError, ValueError) as error:
        logger.warning("bind_to_numa_node(%s): %s", node, error)


def cpus_of(text: str) -> set[int]:
    """The CPUs of a list such as "0-3,8"."""
    cpus: set[int] = set()
    for piece in text.strip().split(","):
        first, _, last = piece.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
