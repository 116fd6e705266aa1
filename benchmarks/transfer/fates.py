"""Peers that are stopped, killed, cut off or silenced amid transfers, and healthy ones beside them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.report import Row
from benchmarks.transfer.bed import Bench, p99, verify
from benchmarks.transfer.cells import KIB, MIB
from moonpool import Batch, Error, Segment, Transfer

FATES = ("healthy", "stopped", "killed", "cut", "silent")
FATE_TIMEOUT_S = 1.0
FATE_PEERS = 3  # of each fate
FATE_SIZES = (4 * KIB, 256 * KIB, 2 * MIB + 1, 4 * MIB)


def by_fate(bench: Bench) -> Iterator[Row]:
    """Peers that are stopped, killed, cut off or silenced amid transfers, and healthy ones beside them."""
    seeds = range(2 if bench.quick else bench.seeds)
    size = max(FATE_SIZES)
    children = {fate: bench.engines(FATE_PEERS, size) for fate in FATES}
    lines = {
        fate: [bench.line(address, 1 << 40) for address, _ in children[fate][1]] for fate in ("cut", "silent")
    }
    late_s, close_s, healthy_failed, alone, beside = [0.0], [0.0], 0, [0.0], [0.0]
    for seed in seeds:
        rng = random.Random(seed)
        with ExitStack() as stack:
            if not children["killed"][0].process.is_running:
                children["killed"] = bench.engines(FATE_PEERS, size)
            transports = rng.choice([("tcp",), ("shm", "tcp")])
            engine = bench.engine(*transports, timeout_s=FATE_TIMEOUT_S)
            stack.callback(engine.close)
            here = engine.allocate(size * FATE_PEERS * len(FATES))
            places = iter(range(0, len(here.view), size))
            peers: list[tuple[str, int, Segment, int, int]] = []
            for fate, (_, told) in children.items():
                for number, (address, at) in enumerate(told):
                    open_at = lines[fate][number][1] if fate in lines else address
                    peers.append((fate, number, engine.open(open_at), at, next(places)))

            def read(peer: tuple[str, int, Segment, int, int], length: int) -> Transfer:
                _, _, segment, at, place = peer
                return engine.submit(Batch("read", segment, [here.at(place)], [at], [length]))

            def healthy_reads(spent: list[float]) -> int:
                failed = 0
                for peer in peers[:FATE_PEERS]:
                    for length in FATE_SIZES:
                        began_s = time.perf_counter()
                        try:
                            read(peer, length).result(30)
                        except Error:
                            failed += 1
                            continue
                        spent.append((time.perf_counter() - began_s) * 1e3)
                        verify(here, peer[4], length, peer[1] % 251 + 1)
                return failed

            healthy_failed += healthy_reads(alone)
            doomed = [read(peer, rng.choice(FATE_SIZES)) for peer in peers[FATE_PEERS:]]
            time.sleep(rng.choice((0.0, 0.001, 0.01)))
            os.kill(children["stopped"][0].process.pid, signal.SIGSTOP)
            stack.callback(os.kill, children["stopped"][0].process.pid, signal.SIGCONT)
            children["killed"][0].process.kill()
            for fate, order in (("cut", "cut"), ("silent", "stall")):
                for line, _ in lines[fate]:
                    line.ask(order)
                    stack.callback(line.ask, "go on")
            doomed += [read(peer, rng.choice(FATE_SIZES)) for peer in peers[FATE_PEERS:]]
            begun_s = time.monotonic()
            healthy_failed += healthy_reads(beside)
            for transfer in doomed:
                transfer.wait(60)
            late_s.append(time.monotonic() - begun_s - FATE_TIMEOUT_S)
            began_s = time.monotonic()
            engine.close()
            close_s.append(time.monotonic() - began_s)
    ratio = p99(beside) / p99(alone)
    yield Row(
        f"{len(seeds)} seeds of {FATE_PEERS} healthy, stopped, killed, cut and silent peers each: the latest end of "
        f"a transfer after its deadline [60 MiB; {healthy_failed} reads of healthy peers failed, their p99 "
        f"{ratio:.2f}x alone; the longest close() {max(close_s):.1f} s]",
        max(late_s),
        "s",
        {},
        1.0,
        "<= 1 s; none fails, p99 <= 2x; close() <= 5 s",
        None if bench.quick else max(late_s) <= 1 and not healthy_failed and ratio <= 2 and max(close_s) <= 5,
    )
