"""Host memory between the engine's KV cache and the pool, in slots of one block each, and the movers that
copy between a slot and the engine's pages.

Out of the engine, copies are queued on the stream of its forward pass: whatever the engine does with a page
later comes after them on that stream, so saving never keeps a page from being freed. Into the engine, copies
wait for what the stream had to do before, and are done when ``load`` returns.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moonpool.connectors.tensorrt_llm.layout import Memory, Region

Bytes = npt.NDArray[np.uint8]
Move = tuple[int, tuple[int, ...]]  # a slot, and the block's page in each layer group


class Mover(Protocol):
    """Copies whole blocks. A page below 0 is none."""

    staging: Bytes  # [slot, bytes of a block]

    def mark(self, stream: Any) -> Any:
        """A point of the engine's stream, to wait for."""

    def save(self, moves: Sequence[Move], stream: Any) -> Callable[[], None]:
        """Starts copying pages to slots. The returned callable waits until that is done."""

    def load(self, moves: Sequence[Move], mark: Any) -> None:
        """Copies slots to pages, after ``mark``. Returns when that is done."""


class Slots:
    """Which slots are free. ``take`` waits for one, or takes what there is."""

    def __init__(self, numbers: range) -> None:
        self._free = list(numbers)
        self._freed = threading.Condition()

    def take(self, count: int, *, wait: bool) -> list[int]:
        """Free slots, at most ``count``.

        wait: waits for at least one. A job gives its slots back, at the latest at a deadline of its own.
        """
        with self._freed:
            while wait and not self._free:
                self._freed.wait()
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def give(self, numbers: Sequence[int]) -> None:
        """Gives slots back, and wakes what waits for one."""
        with self._freed:
            self._free += numbers
            self._freed.notify_all()


def regions_of(memory: Memory) -> list[tuple[int, int, Region]]:
    """(layer group, offset in a slot, region), in the order of a slot."""
    found, at = [], 0
    for group, regions in enumerate(memory.groups):
        for region in regions:
            found.append((group, at, region))
            at += region.size
    return found


class HostMover:
    """For a KV cache in host memory."""

    def __init__(self, memory: Memory, slots: int) -> None:
        self.staging = np.zeros((slots, memory.bytes_per_block), np.uint8)
        self._regions = regions_of(memory)

    def mark(self, stream: Any) -> None:
        """None: copies run on the calling thread."""
        return None

    def save(self, moves: Sequence[Move], stream: Any) -> Callable[[], None]:
        """Copies pages to slots at once."""
        for slot, page, size in self._addresses(moves):
            ctypes.memmove(slot, page, size)
        return lambda: None

    def load(self, moves: Sequence[Move], mark: Any) -> None:
        """Copies slots to pages at once."""
        for slot, page, size in self._addresses(moves):
            ctypes.memmove(page, slot, size)

    def _addresses(self, moves: Sequence[Move]) -> Iterator[tuple[int, int, int]]:
        for slot, pages in moves:
            start = self.staging.ctypes.data + slot * self.staging.shape[1]
            for group, offset, region in self._regions:
                if pages[group] >= 0:
                    yield start + offset, region.base + region.stride * pages[group], region.size


class CudaMover:
    """For a KV cache on a GPU: torch's tensors and streams, and page-locked staging."""

    def __init__(self, memory: Memory, slots: int) -> None:
        import torch

        self._cuda: Any = torch.cuda
        size = memory.bytes_per_block
        self._slots: Any = torch.empty((slots, size), dtype=torch.uint8, pin_memory=True)
        self.staging = self._slots.numpy()
        self._regions = [(group, at, region, _rows(region)) for group, at, region in regions_of(memory)]
        self._loads = torch.cuda.Stream(device=self._regions[0][3].device)

    def mark(self, stream: Any) -> Any:
        """An event behind what the stream was given so far."""
        return stream.record_event()

    def save(self, moves: Sequence[Move], stream: Any) -> Callable[[], None]:
        """Queues copies of pages to slots on ``stream``. The returned callable waits for them."""
        with self._cuda.stream(stream):
            for slot, page in self._views(moves):
                slot.copy_(page, non_blocking=True)
            done = stream.record_event()
        return lambda: done.synchronize()

    def load(self, moves: Sequence[Move], mark: Any) -> None:
        """Copies slots to pages on a stream of its own, after ``mark``, and waits."""
        self._loads.wait_event(mark)
        with self._cuda.stream(self._loads):
            for slot, page in self._views(moves):
                page.copy_(slot, non_blocking=True)
        self._loads.synchronize()

    def _views(self, moves: Sequence[Move]) -> Iterator[tuple[Any, Any]]:
        for slot, pages in moves:
            for group, offset, region, rows in self._regions:
                if pages[group] >= 0:
                    yield self._slots[slot, offset : offset + region.size], rows[pages[group]]


def _rows(region: Region) -> Any:
    """A region as a tensor [page, bytes]."""
    if hasattr(region.memory, "as_tensor"):
        return region.memory.as_tensor()
    import torch

    return region.memory.view(region.pages, -1).view(torch.uint8)


def mover_for(memory: Memory, slots: int) -> Mover:
    """The mover for the device that ``memory`` lies on, with ``slots`` slots of one block each."""
    return HostMover(memory, slots) if memory.device == "cpu" else CudaMover(memory, slots)
