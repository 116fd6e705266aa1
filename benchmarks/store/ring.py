"""The measuring process of the rows over a cable: python -m benchmarks.store.ring FD DRIVER ADDRESS

A working set of 512 MiB would take seconds to put and get once, at every store and in every round. So the
store holds the whole working set all the time, as a ring: a pass puts the next few objects, gets as many of
those that were put longest ago, and removes them. All others have been touched since these were.

FD is a socket: {"cell": .., "pids": [..], "budget_s": ..} in, {"figures": {verb: [..]}, "put": bytes, "got":
bytes} out.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.processes import serve
from benchmarks.store.client import Call, Figures, Wrong, timed
from benchmarks.store.drivers import DRIVERS, Driver
from benchmarks.store.memory import Buffer
from benchmarks.store.workload import MIB, human

LARGE_SET = 512 * MIB


@dataclass(frozen=True)
class RingCell:
    object_bytes: int
    working_set: int
    objects: int  # of a pass; divides the objects of the working set

    @property
    def name(self) -> str:
        return f"{human(self.object_bytes)} of {human(self.working_set)}"

    @property
    def described(self) -> str:
        return f"{human(self.working_set)} over TCP"

    @property
    def passes(self) -> int:
        """After which every object has been replaced."""
        return self.working_set // (self.object_bytes * self.objects)


RING_CELLS = tuple(
    RingCell(size, working_set, min(working_set, pass_bytes) // size)
    for size, pass_bytes in ((64 << 10, 16 * MIB), (MIB, 64 * MIB))
    for working_set in (4 * MIB, LARGE_SET)
)


class Ring:
    def __init__(self, driver: str, address: str) -> None:
        self.source, self.target = Buffer(LARGE_SET, random=True), Buffer(LARGE_SET)
        self.driver: Driver = DRIVERS[driver](address, self.source, self.target)
        self.cell: RingCell | None = None
        self.held: deque[tuple[int, list[str]]] = deque()  # (pass, its keys), the oldest first
        self.mark = 0

    def run(self, cell: RingCell, pids: list[int], budget_s: float) -> dict[str, object]:
        """Passes until ``budget_s`` is spent, at least one. A cell that is new fills the ring first."""
        pids = [*pids, os.getpid()]
        moved = {"put": 0, "got": 0}
        if cell != self.cell:
            while self.held:
                self.driver.remove(self.held.popleft()[1])
            self.cell = cell
            for _ in range(cell.passes - 1):
                self._put(cell, pids)
                moved["put"] += cell.objects * cell.object_bytes
        figures: dict[str, list[Figures]] = {}
        deadline_s = time.monotonic() + budget_s
        while not figures or time.monotonic() < deadline_s:
            for verb, row in self._pass(cell, pids):
                figures.setdefault(verb, []).append(row)
            moved["put"] += cell.objects * cell.object_bytes
            moved["got"] += cell.objects * cell.object_bytes
        return {"figures": figures, **moved}

    def _pass(self, cell: RingCell, pids: list[int]) -> Iterator[tuple[str, Figures]]:
        yield "put", self._put(cell, pids)
        yield "get", self._get(cell, pids)

    def _put(self, cell: RingCell, pids: list[int]) -> Figures:
        self.mark += 1
        size, offsets = cell.object_bytes, self._offsets(cell, self.mark)
        keys = [f"ring-{size}-{self.mark}-{i}" for i in range(cell.objects)]
        for offset in offsets:
            self.source.stamp(offset, size, self.mark)
        calls: list[Call] = [
            partial(self.driver.put, key, offset, size) for key, offset in zip(keys, offsets, strict=True)
        ]
        figures = timed(calls, pids, size * len(keys), f"{self.driver.name}, put {cell.name}")
        self.held.append((self.mark, keys))
        return figures

    def _get(self, cell: RingCell, pids: list[int]) -> Figures:
        mark, keys = self.held.popleft()
        size, offsets = cell.object_bytes, self._offsets(cell, mark)
        calls: list[Call] = [
            partial(self.driver.get, key, offset, size) for key, offset in zip(keys, offsets, strict=True)
        ]
        self.target.poison(offsets[0], size * cell.objects)
        figures = timed(calls, pids, size * len(keys), f"{self.driver.name}, get {cell.name}")
        if not self.target.equals(self.source, offsets[0], size * cell.objects):
            raise Wrong(f"{self.driver.name}: get of {cell.name} gave other bytes than were put")
        self.driver.remove(keys)
        return figures

    def _offsets(self, cell: RingCell, mark: int) -> list[int]:
        first = mark % cell.passes * cell.objects
        return [(first + i) * cell.object_bytes for i in range(cell.objects)]


def main() -> None:
    descriptor, driver, address = sys.argv[1:]

    def start() -> tuple[object, Callable[[Any], object]]:
        ring = Ring(driver, address)
        return {"ready": True}, lambda request: ring.run(RingCell(**request.pop("cell")), **request)

    serve(descriptor, start)
    os._exit(0)  # clients of peers may hang or crash while they are torn down


if __name__ == "__main__":
    main()
