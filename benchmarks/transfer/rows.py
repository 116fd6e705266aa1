"""Medians against targets: the rows of the three tables.

The targets are ratios to peers and to the machine's limits in the same run; no test asserts them. CPU
seconds are of both processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.drop_in import CALL_MORE_US
from benchmarks.report import MORE_IS_BETTER, NOT_RUN, Row
from benchmarks.transfer.cells import BATCH, KIB, LARGE_SET, SINGLE, SMALL_SET, STREAM, Cell, human

UNITS = {"p50_us": "us", "gb_s": "GB/s", "cpu_s_gb": "s/GB"}


# driver or limit -> cell's name -> placement -> one entry for each pass
Passes = dict[str, dict[str, dict[str, list[dict[str, float]]]]]


@dataclass(frozen=True)
class Outcome:
    """missing: a driver that did not run -> why."""

    passes: Passes
    missing: Mapping[str, str]

    def median(self, name: str, cell: Cell, figure: str) -> float | None:
        """Of the placement that suits it best: for a p50 that of the least, else that of the most GB/s."""
        found = self.passes.get(name, {}).get(cell.name)
        if not found:
            return None
        if figure == "p50_us":
            return min(median(passes, figure) for passes in found.values())
        return median(max(found.values(), key=lambda passes: median(passes, "gb_s")), figure)


def median(passes: list[dict[str, float]], figure: str) -> float:
    return statistics.median(entry[figure] for entry in passes)


@dataclass(frozen=True)
class Bar:
    """A target against one column: at least ``factor`` times as much of what more of is better, otherwise at
    most so many times as much.
    """

    factor: float
    column: str

    def said(self, unit: str) -> str:
        return f"{'>=' if unit in MORE_IS_BETTER else '<='} {self.factor:.3g}x {self.column}"

    def met(self, ours: float, other: float | None, unit: str) -> bool | None:
        if other is None:
            return None
        return ours >= self.factor * other if unit in MORE_IS_BETTER else ours <= self.factor * other


@dataclass(frozen=True)
class Above:
    """A target in time: at most so many microseconds more than a column's."""

    more_us: float
    column: str

    def said(self, unit: str) -> str:
        return f"<= {self.column} + {self.more_us:g} {unit}"

    def met(self, ours: float, other: float | None, unit: str) -> bool | None:
        return None if other is None else ours <= other + self.more_us


@dataclass(frozen=True)
class Section:
    """One table: how its rows begin, which driver is ours in it, the peers' columns, and what the machine
    can do.
    """

    begin: str
    ours: str
    peers: tuple[str, ...]
    limit: str

    def row(
        self, outcome: Outcome, work: str, cell: Cell, figure: str, bars: tuple[Bar | Above, ...] = ()
    ) -> Row | None:
        """None where ours did not run."""
        ours, unit = outcome.median(self.ours, cell, figure), UNITS[figure]
        if ours is None:
            return None
        found = {name: outcome.median(name, cell, figure) for name in (*self.peers, self.limit)}
        peers = {name: value if (value := found[name]) is not None else NOT_RUN for name in self.peers}
        verdicts = [bar.met(ours, found[bar.column], unit) for bar in bars]
        met = None if not bars or (None in verdicts and False not in verdicts) else all(verdicts)
        if cell.threads > 1:
            work = f"{work}, {cell.threads} threads"
        return Row(
            work=f"{self.begin}, {work} [{human(cell.working_set)}]",
            ours=ours,
            unit=unit,
            peers=peers,
            limit=found[self.limit],
            target=", ".join(bar.said(unit) for bar in bars),
            met=met,
        )


BATCH_OF_NIXL_SHM = 0.67  # 87 us where NIXL takes 130

OWN = Section("own memory", "ours shm", ("mooncake", "nixl shm"), "memcpy")
FOREIGN = Section("foreign memory", "ours foreign", ("mooncake", "nixl shm"), "process_vm_readv")
DROP_IN = Section("drop-in", "drop-in", ("ours foreign",), "")
TCP = Section("TCP", "ours tcp", ("mooncake", "nixl tcp", "plain C++"), "plain")
TCP_READS = Section("TCP", "ours tcp reads", TCP.peers, "plain")  # beside writes of the others

SUBMITTED = Section("TCP, submitted", "ours submit", ("ours tcp", *TCP.peers), "plain")


def own(outcome: Outcome) -> Iterator[Row | None]:
    for cell in STREAM:
        yield OWN.row(outcome, f"write {human(cell.block)}", cell, "gb_s", (Bar(0.9, "memcpy"),))
    for cell in STREAM:
        yield OWN.row(outcome, f"write {human(cell.block)}, CPU", cell, "cpu_s_gb", (Bar(0.3, "mooncake"),))
    for size in (SMALL_SET, LARGE_SET):
        judged = size == SMALL_SET
        single = (Bar(1, "nixl shm"),) if judged else ()
        batch = (Bar(BATCH_OF_NIXL_SHM, "nixl shm"),) if judged else ()
        yield OWN.row(outcome, "write 4 KiB", SINGLE[4 * KIB, size], "p50_us", single)
        yield OWN.row(outcome, "write 128 x 4 KiB", BATCH[size], "p50_us", batch)


def foreign(outcome: Outcome) -> Iterator[Row | None]:
    bar = (Bar(1.2, "process_vm_readv"),)
    for cell in [*SINGLE.values(), *BATCH.values(), *(cell for cell in STREAM if cell.threads == 1)]:
        many = f"{cell.batch} x " if cell.batch > 1 else ""
        yield FOREIGN.row(outcome, f"read {many}{human(cell.block)}", cell, "p50_us", bar)


def drop_in(outcome: Outcome) -> Iterator[Row | None]:
    bar = (Above(CALL_MORE_US, "ours foreign"),)
    for cell in [*SINGLE.values(), *BATCH.values()]:
        many = f"{cell.batch} x " if cell.batch > 1 else ""
        yield DROP_IN.row(outcome, f"read {many}{human(cell.block)}", cell, "p50_us", bar)


def tcp(outcome: Outcome) -> Iterator[Row | None]:
    yield from _tcp(outcome, TCP, "write")


def tcp_reads(outcome: Outcome) -> Iterator[Row | None]:
    yield from _tcp(outcome, TCP_READS, "read")


def _tcp(outcome: Outcome, section: Section, op: str) -> Iterator[Row | None]:
    single = (Bar(1.15, "plain"), Bar(0.6, "mooncake"), Bar(1, "nixl tcp"))
    batch = (Bar(1 / 7, "mooncake"), Bar(1 / 1.5, "nixl tcp"), Bar(1.3, "plain C++"))
    one, two = (Bar(0.95, "plain"), Bar(1.35, "mooncake")), (Bar(1, "plain"),)
    for cell in SINGLE.values():
        yield section.row(outcome, f"{op} {human(cell.block)}", cell, "p50_us", single)
    for cell in BATCH.values():
        yield section.row(outcome, f"{op} 128 x 4 KiB", cell, "p50_us", batch)
    for cell in STREAM:
        bars = two if cell.threads > 1 else one
        yield section.row(outcome, f"{op} {human(cell.block)}", cell, "gb_s", bars)
    for cell in STREAM:
        work = f"{op} {human(cell.block)}, CPU"
        yield section.row(outcome, work, cell, "cpu_s_gb", (Bar(0.65, "mooncake"),))


def submitted(outcome: Outcome) -> Iterator[Row | None]:
    """What submit() adds to a call is a hand-over to the engine's thread, which a caller that waits at once
    pays in full."""
    single = (Bar(1, "mooncake"),)
    batch = (Bar(1 / 7, "mooncake"), Bar(1 / 1.5, "nixl tcp"), Bar(1.3, "plain C++"))
    for cell in SINGLE.values():
        yield SUBMITTED.row(outcome, f"write {human(cell.block)}", cell, "p50_us", single)
    for cell in BATCH.values():
        yield SUBMITTED.row(outcome, "write 128 x 4 KiB", cell, "p50_us", batch)
    for cell in STREAM:
        if cell.threads == 1:
            bars = (Bar(1.35, "mooncake"),)
            yield SUBMITTED.row(outcome, f"write {human(cell.block)}", cell, "gb_s", bars)


TABLES: dict[str, tuple[Section, Callable[[Outcome], Iterator[Row | None]]]] = {
    "Same host, the engine's own memory": (OWN, own),
    "Same host, foreign memory": (FOREIGN, foreign),
    "The drop-in `mooncake`, in the column ours": (DROP_IN, drop_in),
    "TCP over the loopback": (TCP, tcp),
    "TCP over the loopback: our reads beside the others' writes": (TCP_READS, tcp_reads),
    "TCP over the loopback: our writes by submit() and result()": (SUBMITTED, submitted),
}
