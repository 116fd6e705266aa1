"""The measuring process: one engine's caller, told by JSON lines which cell to run.

    python -m benchmarks.transfer.initiator FD DRIVER BYTES TARGET_PID TOLD

TOLD is the line that the target said. FD is a socket: {"ready": true} out; then {"cell": .., "budget_s": ..}
in, {name: {"p50_us": .., "gb_s": .., "cpu_s_gb": ..}} out, where a name is the driver's or its limit's;
{"error": ..} when a call failed or bytes differ.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.processes import serve
from benchmarks.transfer.cells import LARGE_SET, MIB, Cell
from benchmarks.transfer.drivers import Caller, Initiator, load
from benchmarks.transfer.memory import Blocks, Checker, let_others_look
from moonpool.core.bench.load import cpu_seconds

Figures = dict[str, float]
SWEEP = Cell(16 * MIB, LARGE_SET)
WARM_CALLS = 3
# Between two looks at the clock: long enough for the announcement of a plain run to be no part of it.
RUN_S = 0.005
RUN_CALLS = 256


class Wrong(Exception):
    """The engine did not do what it said; its figures would mean nothing."""


class Measurer:
    def __init__(self, driver: str, size: int, target_pid: int, told: dict[str, Any]) -> None:
        self.name, self.target_pid, self.remote = driver, target_pid, int(told["address"])
        self.initiator: Initiator = load(driver, "Initiator")(size, self.remote, told["about"])
        if self.initiator.op == "write":
            self.initiator.region.fill("initiator")
        else:
            self.initiator.region.spoil()
        self.checker = Checker()
        self.shares: dict[Cell, list[list[list[int]]]] = {}
        self.callers: dict[tuple[str, Cell], list[Caller]] = {}  # kept: some are slow to make
        self.names = [driver, *([self.initiator.limit] if self.initiator.limit else [])]
        for name in self.names:
            self._sweep(name)

    def run(self, cell: Cell, budget_s: float) -> dict[str, Figures]:
        return {name: self._pass(name, cell, budget_s) for name in self.names}

    def _sweep(self, name: str) -> None:
        """Every page once, so that no pass meets one that was never mapped."""
        cell = SWEEP
        [share] = shares = self._shares(cell)
        [caller] = self._callers(name, cell, shares)
        caller.run(0, len(share))
        self._check(name, cell, share)

    def _pass(self, name: str, cell: Cell, budget_s: float) -> Figures:
        """Calls for ``budget_s``, then every byte compared."""
        shares = self._shares(cell)
        callers = self._callers(name, cell, shares)
        for caller, share in zip(callers, shares, strict=True):
            warm_s = min(caller.run(0, min(WARM_CALLS, len(share))))
        count = max(1, min(RUN_CALLS, int(RUN_S / warm_s)))
        pids = [os.getpid(), self.target_pid]
        cpu_s = cpu_seconds(pids)
        spent_s = together(callers, shares, count, budget_s)
        cpu_s = cpu_seconds(pids) - cpu_s
        for share, times in zip(shares, spent_s, strict=True):
            self._check(name, cell, share[: max(len(times), WARM_CALLS)])
        gb = cell.block * cell.batch / 1e9
        return {
            "p50_us": statistics.median(time_s for times in spent_s for time_s in times) * 1e6,
            "gb_s": sum(gb * len(times) / sum(times) for times in spent_s),
            "cpu_s_gb": cpu_s / (gb * sum(len(times) for times in spent_s)),
        }

    def _shares(self, cell: Cell) -> list[list[list[int]]]:
        """Each thread's calls."""
        if cell not in self.shares:
            calls = cell.calls()
            self.shares[cell] = [calls[thread :: cell.threads] for thread in range(cell.threads)]
        return self.shares[cell]

    def _callers(self, name: str, cell: Cell, shares: list[list[list[int]]]) -> list[Caller]:
        key = (name, cell)
        if key not in self.callers:
            initiator = self.initiator
            self.callers[key] = [
                initiator.caller(thread, share, cell.block)
                if name == self.name
                else initiator.limit_caller(thread, share, cell.block)
                for thread, share in enumerate(shares)
            ]
        return self.callers[key]

    def _check(self, name: str, cell: Cell, calls: Sequence[Sequence[int]]) -> None:
        offsets = [offset for call in calls for offset in call]
        here = Blocks(os.getpid(), self.initiator.region.address, offsets, cell.block)
        there = Blocks(self.target_pid, self.remote, offsets, cell.block)
        source, sink = (here, there) if self.initiator.op == "write" else (there, here)
        if not self.checker.check(source, sink):
            raise Wrong(f"{name}: a {self.initiator.op} of {cell.name} moved other bytes than were there")


def together(
    callers: list[Caller], shares: list[list[list[int]]], count: int, budget_s: float
) -> list[list[float]]:
    """Each caller in a thread of its own, all from the same moment, ``count`` calls between two looks at the
    clock; the seconds of each one's calls. The first is this thread: a NIXL agent belongs to the thread that
    made it, so moonpool.core.bench.load.run(), which waits here, is nothing for it.
    """
    spent_s: list[list[float]] = [[] for _ in callers]
    failed: list[BaseException] = []
    start = threading.Barrier(len(callers))

    def work(thread: int) -> None:
        try:
            start.wait()
            at, calls, deadline_s = 0, len(shares[thread]), time.perf_counter() + budget_s
            while time.perf_counter() < deadline_s:
                part = min(count, calls - at)
                spent_s[thread].extend(callers[thread].run(at, part))
                at = (at + part) % calls
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(1, len(callers))]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return spent_s


def main() -> None:
    descriptor, driver, size, target_pid, told = sys.argv[1:]

    def start() -> tuple[object, Callable[[Any], object]]:
        let_others_look()
        measurer = Measurer(driver, int(size), int(target_pid), json.loads(told))
        gc.disable()
        return {"ready": True}, lambda request: measurer.run(Cell(**request["cell"]), request["budget_s"])

    serve(descriptor, start)
    os._exit(0)  # peers may hang or crash while they are torn down


if __name__ == "__main__":
    main()
