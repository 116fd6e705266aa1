"""What transfers of one engine do to each other: beside long ones, beside peers that stand still, on several
connections, with much memory.

    python -m benchmarks.transfer_shared [--quick] [--json FILE]

Each row compares an engine with itself: alone, or with one connection. The peers are processes of this host;
a slow line is a relay that lets each connection carry so many bytes a second. Every byte read is compared.
"""

from __future__ import annotations

import mmap
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.options import make_parser
from benchmarks.processes import end_on_sigterm
from benchmarks.report import Row, print_table, write_json
from benchmarks.transfer.bed import TIMEOUT_S, Bench, in_background, p99, timed, verify
from benchmarks.transfer.cells import KIB, MIB
from benchmarks.transfer.fates import by_fate
from benchmarks.transfer.memory import Region as Memory
from moonpool import Batch, Priority, Region, Segment, TransferEngine

GIB = 1 << 30
FRAME = 2 * MIB  # of a transfer over TCP
STOPPED = 48
REGIONS = 16_000
REGION_US = 5.0
FIRST_TOUCH_MS = 10.0
TAKEN_MS = 1000.0


def beside_long_ones(bench: Bench) -> Iterator[Row]:
    rate, long = 32 * MIB, 16 * MIB
    _, [(address, at)] = bench.engines(1, 3 * long)
    engine = bench.engine("tcp")
    here = engine.allocate(3 * long)
    peer = engine.open(bench.line(address, rate)[1])

    def short() -> None:
        engine.read(peer, here.at(2 * long), at + 2 * long, 4 * KIB)
        verify(here, 2 * long, 4 * KIB, 1)

    def endless(number: int) -> None:
        batch = Batch("read", peer, [here.at(number * long)], [at + number * long], [long])
        engine.transfer(batch, priority=Priority.BACKGROUND)
        verify(here, number * long, long, 1)

    calls = 20 if bench.quick else 200
    alone, _ = timed(calls, short)
    with in_background(2, endless):
        short_or_failed, failed = timed(calls, short)
    later_ms = 2 * FRAME / rate * 1e3
    found, base = p99(short_or_failed), p99(alone)
    yield Row(
        f"read 4 KiB over TCP beside 2 endless background reads, p99 "
        f"[32 MiB/s a connection, 2 connections, 48 MiB; {failed} of {calls} failed]",
        found,
        "ms",
        {"alone": base},
        base + later_ms,
        "none fails, at most a frame of each later",
        None if bench.quick else failed == 0 and found <= base + later_ms,
    )


def on_several_connections(bench: Bench) -> Iterator[Row]:
    size, rate = (16 if bench.quick else 64) * MIB, 16 * MIB
    _, [(address, at)] = bench.engines(1, size)
    _, line = bench.line(address, rate)
    took_s = {}
    for connections in (1, 4):
        engine = bench.engine("tcp", connections=connections)
        here = engine.allocate(size)
        peer = engine.open(line)
        engine.read(peer, here.at(0), at, 4 * KIB)
        times = []
        for _ in range(1 if bench.quick else 3):
            began_s = time.perf_counter()
            engine.read(peer, here.at(0), at, size)
            times.append(time.perf_counter() - began_s)
            verify(here, 0, size, 1)
        took_s[connections] = statistics.median(times)
    speed = {connections: size / MIB / seconds for connections, seconds in took_s.items()}
    yield Row(
        f"read {size // MIB} MiB in one slice over TCP, 4 connections "
        f"[16 MiB/s a connection, {size // MIB} MiB], over 1 connection",
        speed[4] / speed[1],
        "x",
        {},
        4.0,
        ">= 3x",
        None if bench.quick else speed[4] >= 3 * speed[1],
    )


def beside_stopped_peers(bench: Bench) -> Iterator[Row]:
    size = MIB
    stopped, dead = bench.engines(STOPPED, size)
    _, [(address, at)] = bench.engines(1, size)
    for transports in (("tcp",), ("shm", "tcp")):
        engine = bench.engine(*transports)
        here = engine.allocate(2 * size)
        peer = engine.open(address)
        # Memory that their engine has not allocated is read by TCP where a process is stopped, too.
        segments = [(engine.open(other), there) for other, there in dead]

        def read(engine: TransferEngine = engine, here: Region = here, peer: Segment = peer) -> None:
            engine.submit(Batch("read", peer, [here.at(0)], [at], [size])).result(60)
            verify(here, 0, size, 1)

        calls = 20 if bench.quick else 300
        alone, _ = timed(calls, read)
        os.kill(stopped.process.pid, signal.SIGSTOP)
        try:
            waiting = [
                engine.submit(Batch("read", segment, [here.at(size)], [there], [size]))
                for segment, there in segments
            ]
            beside, failed = timed(calls, read)
            began_s = time.monotonic()
            for transfer in waiting:
                transfer.wait(60)
            late_s = max(0.0, time.monotonic() - began_s - TIMEOUT_S)
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)
        yield Row(
            f"submitted read of 1 MiB by {transports[0]} beside {STOPPED} reads of stopped peers, p99 "
            f"[2 MiB; {failed} of {calls} failed; those ended {late_s:.1f} s after their deadline]",
            p99(beside),
            "ms",
            {"alone": p99(alone)},
            None,
            "none fails, <= 2x alone, ended <= 1 s after it",
            None if bench.quick else failed == 0 and p99(beside) <= 2 * p99(alone) and late_s <= 1,
        )


def taken_at_once(bench: Bench, gib: int, address: str, at: int) -> Row:
    """Memory that no process has touched. ``register`` leaves it so. ``allocate``, which is not judged, has
    the kernel fill all of its pages."""

    def took_ms(size: int, take: str) -> float:
        engine = bench.engine("shm", "tcp")
        peer = engine.open(address)
        memory = Memory(size)
        began_s = time.perf_counter()
        taken = engine.allocate(size) if take == "allocate" else engine.register((memory.address, size))
        engine.read(peer, taken.at(size - 64), at, 64)
        took_s = time.perf_counter() - began_s
        engine.close()
        return took_s * 1e3

    found_ms = statistics.median(took_ms(gib * GIB, "register") for _ in range(3))
    return Row(
        f"register {gib} GiB, and read 64 B into its end",
        found_ms,
        "ms",
        {"allocate 1 GiB": took_ms(GIB, "allocate")},
        None,
        f"<= {TAKEN_MS:,.0f} ms",
        None if bench.quick else found_ms <= TAKEN_MS,
    )


def register_all(engine: TransferEngine, memory: Memory) -> list[float]:
    """Page by page -> us for each."""
    regions, times = [], []
    for number in range(REGIONS):
        began_s = time.perf_counter()
        regions.append(engine.register((memory.address + number * mmap.PAGESIZE, mmap.PAGESIZE)))
        times.append((time.perf_counter() - began_s) * 1e6)
    for region in regions:
        region.close()
    return times


def much_memory(bench: Bench) -> Iterator[Row]:
    engine = bench.engine("shm", "tcp")
    memory = Memory(REGIONS * mmap.PAGESIZE)
    untouched = register_all(engine, memory)
    memory.spoil()
    in_use = register_all(engine, memory)
    mean_us = statistics.fmean(in_use)
    yield Row(
        f"register a region of memory in use, mean of {REGIONS:,} [4 KiB each]",
        mean_us,
        "us",
        {
            "the last 1,000": statistics.fmean(in_use[-1000:]),
            "the kernel makes its page": statistics.fmean(untouched),
        },
        None,
        f"<= {REGION_US:g} us",
        None if bench.quick else mean_us <= REGION_US,
    )
    gib = 1 if bench.quick else 8
    child, [(address, at)] = bench.engines(1, MIB)
    yield taken_at_once(bench, gib, address, at)
    child.ask(gib * GIB)
    times = []
    for _ in range(3):
        engine = bench.engine("shm")
        here = engine.allocate(MIB)
        peer = engine.open(address)
        began_s = time.perf_counter()
        engine.read(peer, here.at(0), at, 64)
        times.append((time.perf_counter() - began_s) * 1e3)
        verify(here, 0, 64, 1)
    first_ms = statistics.median(times)
    yield Row(
        f"first read of 64 B by shm from a peer with {gib} GiB",
        first_ms,
        "ms",
        {},
        None,
        f"<= {FIRST_TOUCH_MS:g} ms",
        None if bench.quick else first_ms <= FIRST_TOUCH_MS,
    )


PARTS = {
    "fates": by_fate,
    "beside_long_ones": beside_long_ones,
    "several_connections": on_several_connections,
    "stopped_peers": beside_stopped_peers,
    "much_memory": much_memory,
}


def main() -> None:
    parser = make_parser(__doc__, "fewer calls and less memory, which judge nothing")
    parser.add_argument(
        "--parts", default=",".join(PARTS), metavar="NAME,...", help="which of %(default)s; default: all"
    )
    parser.add_argument("--seeds", type=int, default=50, metavar="N", help="of the part fates; default: 50")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.parts.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    end_on_sigterm()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as folder:
        os.environ["MOONPOOL_RUNTIME_DIR"] = folder
        for name in arguments.parts.split(","):
            with ExitStack() as stack:
                for row in PARTS[name](Bench(Path(folder), stack, arguments.quick, arguments.seeds)):
                    print_table(name, [row])
                    rows.append(row)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
