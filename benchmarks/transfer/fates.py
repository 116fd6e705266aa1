"""Peers that are stopped, killed, cut off or silenced amid transfers, and healthy ones beside them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

from benchmarks.processes import Talker
from benchmarks.report import Row
from benchmarks.transfer.bed import Bench, made_engine, p99, verify
from benchmarks.transfer.cells import KIB, MIB
from moonpool import Batch, Error, Region, Segment, Transfer, TransferEngine

FATES = ("healthy", "stopped", "killed", "cut", "silent")
TIMEOUT_S = 1.0
PEERS = 3  # of each fate
SIZES = (4 * KIB, 256 * KIB, 2 * MIB + 1, 4 * MIB)
SIZE = max(SIZES)


class Peer(NamedTuple):
    """value: of each of its bytes. place: where what is read of it goes."""

    segment: Segment
    remote: int
    value: int
    place: int


class Caller:
    """One engine and its peers by fate, in the order of FATES."""

    def __init__(self, engine: TransferEngine, told: dict[str, list[tuple[str, int]]]) -> None:
        self._engine = engine
        self._here: Region = engine.allocate(SIZE * PEERS * len(FATES))
        places = iter(range(0, len(self._here.view), SIZE))
        self.peers = {
            fate: [
                Peer(engine.open(address), at, number % 251 + 1, next(places))
                for number, (address, at) in enumerate(engines)
            ]
            for fate, engines in told.items()
        }

    def read(self, peer: Peer, length: int) -> Transfer:
        batch = Batch("read", peer.segment, [self._here.at(peer.place)], [peer.remote], [length])
        return self._engine.submit(batch)

    def read_of_doomed(self, rng: random.Random) -> list[Transfer]:
        doomed = [peer for fate in FATES[1:] for peer in self.peers[fate]]
        return [self.read(peer, rng.choice(SIZES)) for peer in doomed]

    def read_of_healthy(self, spent_ms: list[float]) -> int:
        """Each size of each; how many failed."""
        failed = 0
        for peer in self.peers["healthy"]:
            for length in SIZES:
                began_s = time.perf_counter()
                try:
                    self.read(peer, length).result(30)
                except Error:
                    failed += 1
                    continue
                spent_ms.append((time.perf_counter() - began_s) * 1e3)
                verify(self._here, peer.place, length, peer.value)
        return failed


class Neighbours:
    """The processes of the peers, and the lines to those that are cut off and silenced."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._engines = {fate: bench.engines(PEERS, SIZE) for fate in FATES}
        self._lines: dict[str, list[tuple[Talker, str]]] = {
            fate: [bench.line(address, 1 << 40) for address, _ in self._engines[fate][1]]
            for fate in ("cut", "silent")
        }

    def told(self) -> dict[str, list[tuple[str, int]]]:
        """Where each is opened, and its memory. Those that were killed are started anew."""
        if not self._engines["killed"][0].process.is_running:
            self._engines["killed"] = self._bench.engines(PEERS, SIZE)
        told = {fate: list(engines) for fate, (_, engines) in self._engines.items()}
        for fate, lines in self._lines.items():
            told[fate] = [(line, at) for (_, line), (_, at) in zip(lines, told[fate], strict=True)]
        return told

    def strike(self, stack: ExitStack) -> None:
        """Until ``stack`` ends, but for those that are killed."""
        stopped = self._engines["stopped"][0].process
        os.kill(stopped.pid, signal.SIGSTOP)
        stack.callback(os.kill, stopped.pid, signal.SIGCONT)
        self._engines["killed"][0].process.kill()
        for fate, order in (("cut", "cut"), ("silent", "stall")):
            for line, _ in self._lines[fate]:
                line.ask(order)
                stack.callback(line.ask, "go on")


def _let_go(engine: TransferEngine) -> None:
    """While a peer is stopped in the middle of a copy, the engine's memory stays: it goes once the peer goes
    on, or is closed for good."""
    until_s = time.monotonic() + 30
    while not engine.close():
        if time.monotonic() > until_s:
            raise RuntimeError("an engine keeps its memory though all its peers go on")


def by_fate(bench: Bench) -> Iterator[Row]:
    seeds = range(2 if bench.quick else bench.seeds)
    neighbours = Neighbours(bench)
    failed = 0
    late_s, close_s, alone_ms, beside_ms = [0.0], [0.0], [0.0], [0.0]
    for seed in seeds:
        rng = random.Random(seed)
        engine = made_engine(rng.choice([("tcp",), ("shm", "tcp")]), timeout_s=TIMEOUT_S)
        with ExitStack() as stack:
            caller = Caller(engine, neighbours.told())
            failed += caller.read_of_healthy(alone_ms)
            doomed = caller.read_of_doomed(rng)
            time.sleep(rng.choice((0.0, 0.001, 0.01)))
            neighbours.strike(stack)
            doomed += caller.read_of_doomed(rng)
            begun_s = time.monotonic()
            failed += caller.read_of_healthy(beside_ms)
            for transfer in doomed:
                transfer.wait(60)
            late_s.append(time.monotonic() - begun_s - TIMEOUT_S)
            began_s = time.monotonic()
            engine.close()
            close_s.append(time.monotonic() - began_s)
        _let_go(engine)
    ratio = p99(beside_ms) / p99(alone_ms)
    yield Row(
        f"{len(seeds)} seeds of {PEERS} healthy, stopped, killed, cut and silent peers each: the latest end "
        f"of a transfer after its deadline [60 MiB; {failed} reads of healthy peers failed, their p99 "
        f"{ratio:.2f}x alone; the longest close() {max(close_s):.1f} s]",
        max(late_s),
        "s",
        {},
        1.0,
        "<= 1 s; none fails, p99 <= 2x; close() <= 5 s",
        None if bench.quick else max(late_s) <= 1 and not failed and ratio <= 2 and max(close_s) <= 5,
    )
