"""The measuring process: one store's client and the caller's memory, told by JSON lines what to run.

    python -m benchmarks.store.client FD DRIVER ADDRESS [memcpy]

FD is a socket: {"cell": .., "pids": [..], "budget_s": .., "passes_max": ..} in, {verb: [{"p50_us": ..,
"gb_s": .., "cpu_s_gb": ..}, ..]} out, one entry for each pass; {"error": ..} when a call failed or bytes
differ. With "memcpy" each verb's pass is followed at once by the same pass of plain memory copies: the
machine's limit, measured in the same moment.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.processes import serve
from benchmarks.store.drivers import DRIVERS, Driver
from benchmarks.store.memory import Buffer
from benchmarks.store.workload import WORKING_SET, Cell
from moonpool.core.bench.load import cpu_seconds, timed_calls

Figures = dict[str, float]
Call = Callable[[], object]
EXISTS_REPEATS = 2


class Wrong(Exception):
    """The store did not do what it said; its figures would mean nothing."""


class Client:
    def __init__(self, driver: str, address: str, limit: bool) -> None:
        self.source = Buffer(WORKING_SET, random=True)
        self.target = Buffer(WORKING_SET)
        self.drivers: list[Driver] = [DRIVERS[driver](address, self.source, self.target)]
        if limit:
            self.drivers.append(DRIVERS["memcpy"](address, self.source, self.target))
        self.mark = 0

    def run(self, cell: Cell, pids: list[int], budget_s: float, passes_max: int) -> dict[str, list[Figures]]:
        """Passes until ``budget_s`` is spent, at least one, at most ``passes_max``."""
        figures: dict[str, list[Figures]] = {}
        deadline_s = time.monotonic() + budget_s
        one_pass = self._exists_pass if cell.kind == "exists" else self._bytes_pass
        for _ in range(passes_max):
            self.mark += 1
            for verb, row in one_pass(cell, [*pids, os.getpid()]):
                figures.setdefault(verb, []).append(row)
            if time.monotonic() > deadline_s:
                break
        return figures

    def _bytes_pass(self, cell: Cell, pids: list[int]) -> Iterator[tuple[str, Figures]]:
        size = cell.object_bytes
        offsets = [i * size for i in range(cell.objects)]
        keys = [f"{cell.name.replace(' ', '')}-{self.mark}-{i}" for i in range(cell.objects)]
        for offset in offsets:
            self.source.stamp(offset, size, self.mark)
        for driver in self.drivers:
            yield self._verb(driver, "put"), self._timed(puts(driver, cell, keys, offsets), pids, cell)
        for driver in self.drivers:
            self.target.poison()
            yield self._verb(driver, "get"), self._timed(gets(driver, cell, keys, offsets), pids, cell)
            if not self.target.equals(self.source):
                raise Wrong(f"{driver.name}: get of {cell.name} gave other bytes than were put")
        driver = self.drivers[0]
        kept: list[Any] = []
        yield "own", self._timed(owns(driver, cell, keys, kept), pids, cell)
        for offset, value in zip(offsets, kept, strict=True):
            if bytes(value) != self.source.view[offset : offset + size]:
                raise Wrong(f"{driver.name}: {driver.own_form} of {cell.name} has other bytes than were put")
        kept.clear()
        driver.remove(keys)

    def _exists_pass(self, cell: Cell, pids: list[int]) -> Iterator[tuple[str, Figures]]:
        driver = self.drivers[0]
        keys = [f"e-{self.mark}-{i}" for i in range(cell.objects)]
        for i, key in enumerate(keys):
            if not driver.put(key, i * cell.object_bytes, cell.object_bytes):
                raise Wrong(f"{driver.name}: put failed")
        absent = [f"absent-{key}" for key in keys]
        hits: list[Call] = [partial(driver.exists, key) for key in keys * EXISTS_REPEATS]
        yield "hit", self._timed(hits, pids, cell)
        misses = [expecting(False, driver.exists, key) for key in absent * EXISTS_REPEATS]
        yield "miss", self._timed(misses, pids, cell)
        lists = [expecting(len(keys), driver.exists_batch, keys) for _ in range(4)]
        yield "batch", self._timed(lists, pids, cell)
        driver.remove(keys)

    def _verb(self, driver: Driver, verb: str) -> str:
        return verb if driver is self.drivers[0] else f"{driver.name} {verb}"

    def _timed(self, calls: list[Call], pids: list[int], cell: Cell) -> Figures:
        return timed(calls, pids, cell.object_bytes * cell.objects, f"{self.drivers[0].name}, {cell.name}")


def timed(calls: list[Call], pids: list[int], size: int, what: str) -> Figures:
    """Makes the calls, which move ``size`` bytes together; each returns something true."""
    cpu_s = cpu_seconds(pids)
    spent_s, results = timed_calls(calls)
    cpu_s = cpu_seconds(pids) - cpu_s
    if not all(results):
        raise Wrong(f"{what}: a call failed")
    gb = size / 1e9
    return {
        "p50_us": statistics.median(spent_s) * 1e6,
        "gb_s": gb / sum(spent_s),
        "cpu_s_gb": cpu_s / gb,
    }


def puts(driver: Driver, cell: Cell, keys: list[str], offsets: list[int]) -> list[Call]:
    size = cell.object_bytes
    if cell.batch == 1:
        return [partial(driver.put, key, at, size) for key, at in zip(keys, offsets, strict=True)]
    return [
        partial(driver.put_batch, keys[group], driver.prepare(offsets[group], size, True))
        for group in batches(cell)
    ]


def gets(driver: Driver, cell: Cell, keys: list[str], offsets: list[int]) -> list[Call]:
    size = cell.object_bytes
    if cell.batch == 1:
        return [partial(driver.get, key, at, size) for key, at in zip(keys, offsets, strict=True)]
    return [
        partial(driver.get_batch, keys[group], driver.prepare(offsets[group], size, False))
        for group in batches(cell)
    ]


def owns(driver: Driver, cell: Cell, keys: list[str], kept: list[Any]) -> list[Call]:
    """What is read stays in ``kept``, so that it can be compared and nothing is freed in the timed part."""

    def one(key: str) -> object:
        kept.append(driver.own(key))
        return kept[-1] is not None

    def many(group: list[str]) -> object:
        kept.extend(driver.own_batch(group))
        return True

    if cell.batch == 1:
        return [partial(one, key) for key in keys]
    return [partial(many, keys[group]) for group in batches(cell)]


def batches(cell: Cell) -> list[slice]:
    return [slice(at, at + cell.batch) for at in range(0, cell.objects, cell.batch)]


def expecting(expected: object, function: Callable[..., object], *arguments: object) -> Call:
    return lambda: function(*arguments) == expected


def main() -> None:
    descriptor, driver, address, *limit = sys.argv[1:]

    def start() -> tuple[object, Callable[[Any], object]]:
        client = Client(driver, address, bool(limit))
        return {"ready": True}, lambda request: client.run(Cell(**request.pop("cell")), **request)

    serve(descriptor, start)
    os._exit(0)  # clients of peers may hang or crash while they are torn down


if __name__ == "__main__":
    main()
