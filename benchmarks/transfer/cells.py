"""What is moved: a cell is one size of block, so many blocks a call, so many threads, over a working set.

A working set is memory of that size on both sides. A call moves its blocks from where they lie in one to the
same offsets of the other. Neither the blocks of a call nor those of two calls in a row are neighbours: what
merges neighbours would otherwise do other work than it says, and the cache would guess the next block.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.store.workload import KIB, MIB, human

SMALL_SET, LARGE_SET = 4 * MIB, 512 * MIB
GOLDEN = 0.618
CALLS_MAX = 4096  # different calls of a cell; a pass that has time for more starts again with the first


@dataclass(frozen=True)
class Cell:
    """block: bytes. batch: blocks a call. threads: callers at once, each with calls of its own."""

    block: int
    working_set: int
    batch: int = 1
    threads: int = 1

    @property
    def name(self) -> str:
        return f"{human(self.block)} x{self.batch}, {self.threads} thr, {human(self.working_set)}"

    def calls(self) -> list[list[int]]:
        """The offsets of each call's blocks."""
        slots = self.working_set // self.block
        # A slot's neighbour has its turn so many slots later; odd, so that every slot of a power of two has.
        apart = int(slots * GOLDEN) | 1
        step = pow(apart, -1, slots)
        order = [i * step % slots * self.block for i in range(min(slots, CALLS_MAX * self.batch))]
        return [order[at : at + self.batch] for at in range(0, len(order), self.batch)]


SINGLE = {
    (block, size): Cell(block, size) for block in (4 * KIB, 64 * KIB) for size in (SMALL_SET, LARGE_SET)
}
BATCH = {size: Cell(4 * KIB, size, batch=128) for size in (SMALL_SET, LARGE_SET)}
# A block of 16 MiB has no working set of 4 MiB.
STREAM = [
    Cell(block, size, threads=threads)
    for block, size in ((MIB, SMALL_SET), (MIB, LARGE_SET), (16 * MIB, LARGE_SET))
    for threads in ((1, 2, 4) if block == MIB else (1, 2))
]
CELLS = [*SINGLE.values(), *BATCH.values(), *STREAM]
