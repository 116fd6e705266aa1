"""Medians against targets: the rows of the table.

The targets are times on one machine and ratios to peers in the same run; no test asserts them. CPU seconds
are of the client and of every process that stores.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.drop_in import CALL_MORE_US
from benchmarks.placement import APART, TOGETHER
from benchmarks.report import NOT_RUN, Row
from benchmarks.store.ring import RING_CELLS, RingCell
from benchmarks.store.workload import CELLS, Cell

CABLE_PLACEMENTS = (TOGETHER.name, APART.name)
Passes = Mapping[str, list[dict[str, float]]]  # verb -> passes


@dataclass(frozen=True)
class Outcome:
    """passes: backend -> cell -> verb -> passes. missing: a peer that did not run -> why."""

    passes: Mapping[str, Mapping[str, Passes]]
    missing: Mapping[str, str]

    def median(self, backend: str, cell: Cell | RingCell, verb: str, figure: str) -> float | None:
        cells = self.passes.get(backend, {})
        names = (
            [cell.name] if isinstance(cell, Cell) else [f"{cell.name} {where}" for where in CABLE_PLACEMENTS]
        )
        found = [rows for name in names if (rows := cells.get(name, {}).get(verb))]
        if not found:
            return None
        best = min(found, key=lambda rows: statistics.median(row["p50_us"] for row in rows))
        return statistics.median(row[figure] for row in best)


class _Builder:
    def __init__(self, outcome: Outcome, peers: list[str]) -> None:
        self.outcome, self.peers = outcome, peers

    def row(
        self,
        work: str,
        cell: Cell | RingCell,
        verb: str,
        figure: str,
        *,
        unit: str,
        peer_verb: str = "",
        limit: bool = False,
        at_most: float | None = None,
        of_mooncake: float | None = None,
        of_limit: float | None = None,
    ) -> Row:
        """of_mooncake: at most so many times Mooncake's. of_limit: at least so much of one memcpy thread."""

        def value(backend: str, what: str) -> float | None:
            found = self.outcome.median(backend, cell, what, figure)
            return None if found is None else found * (1e-3 if unit == "ms" else 1)

        ours = value("ours", verb)
        assert ours is not None
        peers: dict[str, float | str] = {}
        for name in self.peers:
            found = value(name, peer_verb or verb)
            peers[name] = NOT_RUN if found is None else found
        memcpy = value("ours", f"memcpy {verb}") if limit else None
        target, met = "", None
        if at_most is not None:
            target, met = f"<= {at_most:g} {unit}", ours <= at_most
        if of_mooncake is not None:
            target = f"<= {of_mooncake:.2g}x Mooncake"
            mooncake = peers.get("mooncake")
            met = ours <= of_mooncake * mooncake if isinstance(mooncake, float) else None
        if of_limit is not None and memcpy is not None:
            target, met = f">= {of_limit:.0%} of memcpy", ours >= of_limit * memcpy
        return Row(f"{work} [{cell.described}]", ours, unit, peers, memcpy, target, met)


def rows(outcome: Outcome, peers: list[str]) -> Iterator[Row]:
    """Every row of the table, in order."""
    small, medium, large, batch, exists = CELLS
    make = _Builder(outcome, peers).row

    def cpu(work: str, cell: Cell, verb: str) -> Row:
        return make(f"{work}, CPU", cell, verb, "cpu_s_gb", unit="s/GB", limit=True, of_mooncake=0.35)

    yield make("put 64 KiB", small, "put", "p50_us", unit="us", limit=True, at_most=40)
    yield make("get 64 KiB into a buffer", small, "get", "p50_us", unit="us", limit=True, at_most=25)
    yield make("get 64 KiB in own form", small, "own", "p50_us", unit="us")
    yield cpu("put 64 KiB", small, "put")
    yield cpu("get 64 KiB into a buffer", small, "get")
    for cell, share in ((medium, 0.85), (large, 0.80)):
        put, get = f"put {cell.name}", f"get {cell.name} into a buffer"
        yield make(put, cell, "put", "gb_s", unit="GB/s", limit=True, of_limit=share)
        yield make(get, cell, "get", "gb_s", unit="GB/s", limit=True, of_limit=share)
        yield make(f"{put}, p50", cell, "put", "p50_us", unit="us", limit=True)
        yield make(f"{get}, p50", cell, "get", "p50_us", unit="us", limit=True)
        yield make(f"get {cell.name} in own form", cell, "own", "p50_us", unit="us")
        yield cpu(put, cell, "put")
        yield cpu(get, cell, "get")
    put, get, own = (f"batch {batch.name}: {verb}" for verb in ("put", "get into buffers", "get in own form"))
    yield make(put, batch, "put", "p50_us", unit="ms", limit=True, of_mooncake=1 / 4)
    yield make(get, batch, "get", "p50_us", unit="ms", limit=True, of_mooncake=1 / 3)
    yield make(own, batch, "own", "p50_us", unit="ms")
    views = f"batch {batch.name}: views (peers: get into buffers)"
    yield make(views, batch, "own", "p50_us", unit="ms", peer_verb="get", of_mooncake=1 / 20)
    yield cpu(put, batch, "put")
    yield cpu(get, batch, "get")
    yield make("exists, hit", exists, "hit", "p50_us", unit="us", of_mooncake=0.5)
    yield make("exists, miss", exists, "miss", "p50_us", unit="us", of_mooncake=0.5)
    yield make("exists of 1,000 keys", exists, "batch", "p50_us", unit="us")


def drop_in_rows(outcome: Outcome) -> Iterator[Row]:
    """What the drop-in's Python costs: its calls, in the column ours, beside those of moonpool's own API."""
    small, _, _, batch, exists = CELLS
    for work, cell, verb in (
        ("put 64 KiB", small, "put"),
        ("get 64 KiB into a buffer", small, "get"),
        ("get 64 KiB in own form", small, "own"),
        (f"batch {batch.name}: put", batch, "put"),
        (f"batch {batch.name}: get into buffers", batch, "get"),
        (f"batch {batch.name}: get in own form", batch, "own"),
        ("exists, hit", exists, "hit"),
        ("exists, miss", exists, "miss"),
        ("exists of 1,000 keys", exists, "batch"),
    ):
        judged = not work.startswith("batch")  # those move MiB: their spread is wider than the target
        there, ours = (outcome.median(name, cell, verb, "p50_us") for name in ("drop-in", "ours"))
        if there is not None and ours is not None:
            target = f"<= moonpool + {CALL_MORE_US} us" if judged else ""
            met = there <= ours + CALL_MORE_US if judged else None
            yield Row(
                f"drop-in: {work} [{cell.described}]", there, "us", {"moonpool": ours}, None, target, met
            )


def cable_rows(outcome: Outcome, peers: list[str]) -> Iterator[Row]:
    """The rows over TCP to another network namespace, in order."""
    make = _Builder(outcome, peers).row
    small, large = RING_CELLS[:2], RING_CELLS[2:]
    for cell in small:
        yield make("put 64 KiB", cell, "put", "p50_us", unit="us", of_mooncake=0.5)
        yield make("get 64 KiB into a buffer", cell, "get", "p50_us", unit="us", of_mooncake=0.5)
    for cell in large:
        yield make("put 1 MiB", cell, "put", "gb_s", unit="GB/s")
        yield make("get 1 MiB into a buffer", cell, "get", "gb_s", unit="GB/s")
        yield make("put 1 MiB, CPU", cell, "put", "cpu_s_gb", unit="s/GB", of_mooncake=0.6)
        yield make("get 1 MiB into a buffer, CPU", cell, "get", "cpu_s_gb", unit="s/GB", of_mooncake=0.6)
