"""What benchmarks of shared transfers use: processes with engines, slow lines to them, times of calls."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.processes import START_TIMEOUT_S, Talker
from benchmarks.transfer.drivers.moonpool import TOKEN
from moonpool import Error, Region, TransferEngine

TIMEOUT_S = 5.0


class Bench:
    def __init__(self, folder: Path, stack: ExitStack, quick: bool, seeds: int) -> None:
        self.folder, self.stack, self.quick, self.seeds = folder, stack, quick, seeds
        self._children = 0

    def talker(self, module: str, *arguments: object) -> tuple[Talker, object]:
        self._children += 1
        log = self.folder / f"{module.rpartition('.')[2]}-{self._children}.log"
        child = Talker(sys.executable, module, [str(argument) for argument in arguments], log)
        self.stack.callback(child.close)
        return child, child.receive(START_TIMEOUT_S)

    def engines(self, count: int, size: int) -> tuple[Talker, list[tuple[str, int]]]:
        child, told = self.talker("benchmarks.transfer.engines", count, size)
        assert isinstance(told, list)
        return child, [(str(address), int(at)) for address, at in told]

    def line(self, address: str, rate: int) -> tuple[Talker, str]:
        child, told = self.talker("benchmarks.transfer.slow_line", address, rate)
        return child, str(told)

    def engine(self, *transports: str, connections: int = 2) -> TransferEngine:
        """For as long as the bench lasts."""
        return self.stack.enter_context(made_engine(transports, connections))


def made_engine(
    transports: Sequence[str], connections: int = 2, timeout_s: float = TIMEOUT_S
) -> TransferEngine:
    return TransferEngine(
        token=TOKEN,
        listen=None,
        transports=transports or None,
        connections_per_peer=connections,
        timeout_s=timeout_s,
    )


def verify(region: Region, at: int, length: int, value: int) -> None:
    """Raises RuntimeError where another byte lies, and spoils the range."""
    if region.view[at : at + length] != bytes([value]) * length:
        raise RuntimeError(f"{length} bytes were read that are not the peer's")
    region.view[at : at + length] = bytes(length)


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98]


def timed(calls: int, call: Callable[[], object]) -> tuple[list[float], int]:
    """Milliseconds of each call that did not fail, and how many failed."""
    spent, failed = [], 0
    for _ in range(calls):
        began_s = time.perf_counter()
        try:
            call()
            spent.append((time.perf_counter() - began_s) * 1e3)
        except Error:
            failed += 1
    return spent or [float("inf")], failed


@contextmanager
def in_background(count: int, work: Callable[[int], object]) -> Iterator[None]:
    """``work(number)`` again and again on so many threads, each at least once before this goes on."""
    over = threading.Event()
    begun = threading.Barrier(count + 1)

    def again(number: int) -> None:
        begun.wait()
        while not over.is_set():
            work(number)

    threads = [threading.Thread(target=again, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
