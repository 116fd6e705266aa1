"""Load: threads that repeat one operation until told to stop, and how long each operation took.

Also what any measurement needs, the scripts in benchmarks/ included: how long each of some calls took, and
the CPU time of processes. This file needs the standard library alone: processes that have no moonpool, but
the package of another store, run it, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

SAMPLES_MAX = 1 << 20  # of each thread; the percentiles are those of its last so many operations
JOIN_TIMEOUT_S = 30.0
_PROCESS_CPU_CLOCK = 2  # CPUCLOCK_SCHED: what clock_getcpuclockid(3) puts below the negated process id


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of the processes, in seconds to the nanosecond: the 10 ms of /proc are too coarse
    for a short measurement. All their threads are in it, also those that ended. Raises OSError for a process
    that is gone.
    """
    return sum(time.clock_gettime((~pid << 3) | _PROCESS_CPU_CLOCK) for pid in pids)


def timed_calls(calls: Iterable[Callable[[], object]]) -> tuple[list[float], list[object]]:
    """Makes the calls one after another: how many seconds each took, and what each returned."""
    clock = time.perf_counter
    spent_s: list[float] = []
    results: list[object] = []
    for call in calls:
        start_s = clock()
        result = call()
        spent_s.append(clock() - start_s)
        results.append(result)
    return spent_s, results


class Gauge:
    """One thread's count and latencies: written by it alone, read by any thread."""

    def __init__(self) -> None:
        self.operations = 0
        self.stop = False
        self._samples: list[int] = []

    def add(self, nanoseconds: int) -> None:
        """Counts one operation that took this long. On the gauge's own thread only; beyond SAMPLES_MAX the
        oldest sample is overwritten.
        """
        if self.operations < SAMPLES_MAX:
            self._samples.append(nanoseconds)
        else:
            self._samples[self.operations % SAMPLES_MAX] = nanoseconds
        self.operations += 1

    @property
    def samples(self) -> list[int]:
        """Latencies in nanoseconds, at most SAMPLES_MAX, unordered once the oldest are overwritten. The list
        itself, not a copy: read it when the thread has ended.
        """
        return self._samples


class Worker(Protocol):
    """Repeats its operation, and tells the gauge of each, until ``gauge.stop``."""

    def __call__(self, gauge: Gauge) -> None:
        """Runs on a thread of its own until ``gauge.stop``. What it raises ends the load and is raised by
        ``run``.
        """


class Outcome(NamedTuple):
    """What all threads did together. Latencies in microseconds."""

    operations: int
    seconds: float
    p50_us: float
    p99_us: float
    interrupted: bool


def run(
    workers: Sequence[Worker],
    seconds: float,
    on_second: Callable[[float, int], None],
    interval_s: float = 1.0,
) -> Outcome:
    """Runs the workers, each on a thread, for ``seconds``.

    on_second: called each second with the seconds so far and the operations so far. A KeyboardInterrupt ends
    the load early, and counts what was done. What a worker raises ends it too, and is raised.
    """
    gauges = [Gauge() for _ in workers]
    failures: list[BaseException] = []
    over = threading.Event()

    def work(worker: Worker, gauge: Gauge) -> None:
        try:
            worker(gauge)
        except BaseException as error:
            failures.append(error)
            over.set()

    threads = [
        threading.Thread(target=work, args=pair, daemon=True) for pair in zip(workers, gauges, strict=True)
    ]
    interrupted = False
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    try:
        for pause_s in _pauses(began_s, seconds, interval_s):
            if over.wait(pause_s):
                break
            on_second(time.perf_counter() - began_s, sum(gauge.operations for gauge in gauges))
    except KeyboardInterrupt:
        interrupted = True
    spent_s = time.perf_counter() - began_s
    for gauge in gauges:
        gauge.stop = True
    operations = sum(gauge.operations for gauge in gauges)
    for thread in threads:
        thread.join(JOIN_TIMEOUT_S)
    if failures:
        raise failures[0]
    return Outcome(operations, spent_s, *percentiles_us(gauges), interrupted)


def _pauses(began_s: float, seconds: float, interval_s: float) -> Iterator[float]:
    """How long to wait for each next reading; the last one is at the end."""
    number = 0
    while (now_s := time.perf_counter() - began_s) < seconds:
        number += 1
        yield max(0.0, min(number * interval_s, seconds) - now_s)


def percentiles_us(gauges: Sequence[Gauge]) -> tuple[float, float]:
    """The median and the 99th percentile of all samples; 0 when there is none."""
    samples = sorted(sample for gauge in gauges for sample in gauge.samples)
    if not samples:
        return 0.0, 0.0
    last = len(samples) - 1
    return samples[round(last * 0.50)] / 1e3, samples[round(last * 0.99)] / 1e3
