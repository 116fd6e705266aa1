"""The measuring side of `moonpool bench transfer`."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any

from moonpool.core.bench import control, load
from moonpool.core.bench.load import Gauge
from moonpool.core.bench.memory import OWN, Memory
from moonpool.core.config import paths
from moonpool.core.errors import CorruptObject, InvalidArgument, ProtocolError, Timeout, Unavailable
from moonpool.core.transfer.engine import TransferEngine
from moonpool.core.transfer.region import Region
from moonpool.core.transfer.segment import Segment
from moonpool.core.transfer.types import Batch, PeerRail, RemoteRegion

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

START_TIMEOUT_S = 30.0
MARK_TIMEOUT_S = 10.0
OPERATIONS_MAX = 4096  # of each thread, made ahead; then they come round again
_CHECK_PIECE = 1 << 24


@dataclass(frozen=True)
class Plan:
    """One row. Sizes in bytes.

    size: of a slice. batch: slices of one operation. depth: operations of one thread that are on their way.
    working_set: memory on each side that the slices of all threads walk through.
    """

    size: int
    batch: int = 1
    depth: int = 1
    threads: int = 1
    direction: str = "read"
    working_set: int = 64 << 20
    seconds: float = 5.0
    verify: bool = False

    def __post_init__(self) -> None:
        if self.threads * self.share < self.least:
            raise InvalidArgument(
                f"{self.threads} threads x {self.depth} operations x {self.batch} slices of {self.size} "
                f"bytes need a working set of {self.least} bytes; it has {self.working_set}: raise "
                f"--working-set",
                operation="bench",
            )

    @property
    def least(self) -> int:
        """The smallest working set in which no two slices on their way overlap."""
        return self.threads * self.depth * self.batch * self.size

    @property
    def share(self) -> int:
        """What of the working set each thread walks through, in whole operations."""
        step = self.size * self.batch
        return self.working_set // self.threads // step * step


@dataclass(frozen=True)
class RailUse:
    """A network card here and one of the peer, during one row. state, why: at its end, as of PeerRail."""

    transport: str
    port: str
    path: str
    state: str
    why: str
    bytes: int
    pieces: int
    faults: int


@dataclass
class Row:
    """What was measured. cpu_s_per_gb: CPU seconds for 10**9 bytes, of this side and of the other.
    rails: of transports that have such, also those that carried nothing.
    """

    size: int
    batch: int
    depth: int
    threads: int
    direction: str
    transport: str
    seconds: float
    bytes: int
    operations: int
    gb_per_s: float
    operations_per_s: float
    p50_us: float
    p99_us: float
    cpu_s_per_gb: float
    peer_cpu_s_per_gb: float
    verified_bytes: int
    interrupted: bool = False
    rails: list[RailUse] = field(default_factory=list)


class Bench:
    """An engine, its memory, and what it moves bytes to and from."""

    remote: RemoteRegion

    def __init__(self, engine: TransferEngine, segment: Segment, working_set: int, kind: str) -> None:
        self.engine = engine
        self.segment = segment
        self.memory = Memory(engine, working_set, kind)
        self.local: Region = self.memory.region
        self._seed = secrets.randbits(32)

    def peer_cpu_ns(self) -> int:
        """The CPU time of the other side, as of now."""
        raise NotImplementedError

    def run(self, plan: Plan, on_second: Callable[[float, int], None]) -> Row:
        """Measures one row. Raises TransferError when the peer is lost, CorruptObject for wrong bytes."""
        self._seed += 1
        reading = plan.direction == "read"
        expected = self._prepare(plan) if plan.verify else None
        workers = [_Worker(self, plan, number, expected) for number in range(plan.threads)]
        peer_before, moved_before, rails_before = self.peer_cpu_ns(), self._moved(), self._rails()
        cpu_before = time.process_time_ns()
        outcome = load.run(workers, plan.seconds, on_second)
        cpu_ns = time.process_time_ns() - cpu_before
        transport = _shares(moved_before, self._moved())
        rails = _used(rails_before, self._rails())
        peer_cpu_ns = self.peer_cpu_ns() - peer_before
        verified = 0
        if expected is not None:
            verified = (
                sum(worker.verified for worker in workers) if reading else self._check(workers, expected)
            )
        nbytes = outcome.operations * plan.size * plan.batch
        gigabytes = nbytes / 1e9 or float("inf")
        return Row(
            plan.size,
            plan.batch,
            plan.depth,
            plan.threads,
            plan.direction,
            transport,
            outcome.seconds,
            nbytes,
            outcome.operations,
            nbytes / 1e9 / outcome.seconds,
            outcome.operations / outcome.seconds,
            outcome.p50_us,
            outcome.p99_us,
            cpu_ns / 1e9 / gigabytes,
            peer_cpu_ns / 1e9 / gigabytes,
            verified,
            outcome.interrupted,
            rails,
        )

    def _prepare(self, plan: Plan) -> npt.NDArray[np.uint8]:
        """The bytes that will have been read, or that will be written; they lie in local memory then."""
        if plan.direction == "read":
            self._write_back(plan.working_set, 0)  # an earlier row may have written there
            return control.pattern(0, plan.working_set)
        bytes_to_write = control.pattern(self._seed, plan.working_set)
        self.memory.put(bytes_to_write)
        return bytes_to_write

    def _write_back(self, nbytes: int, seed: int) -> None:
        self.memory.put(control.pattern(seed, nbytes))
        self.engine.write(self.segment, self.local.address, self.remote.address, nbytes)

    def _check(self, workers: Sequence[_Worker], expected: npt.NDArray[np.uint8]) -> int:
        """Reads back all that was written. -> bytes"""
        self.memory.clear(0, len(expected))
        checked = 0
        for worker in workers:
            for begin, end in worker.touched():
                for at in range(begin, end, _CHECK_PIECE):
                    length = min(_CHECK_PIECE, end - at)
                    self.engine.read(self.segment, self.local.at(at), self.remote.at(at), length)
                    found = self.memory.take(at, length)
                    _compare(found, expected[at : at + length], at, self.segment.address)
                    checked += length
        return checked

    def _moved(self) -> dict[str, int]:
        """Bytes by transport."""
        metrics = self.engine.metrics()
        ways = ("read", "write")
        return {
            name: sum(metrics.get(f"{name}_{way}_bytes_total", 0) for way in ways)
            for name in self.engine.transports()
        }

    def _rails(self) -> dict[tuple[str, str], PeerRail]:
        """By transport and path."""
        return {
            (path.transport, rail.path): rail
            for path in self.engine.paths(self.segment)
            for rail in path.rails
        }


class EngineBench(Bench):
    """Between the memory of two engines, of which the other one is a bench server."""

    def __init__(self, engine: TransferEngine, address: str, working_set: int, kind: str = OWN) -> None:
        super().__init__(engine, engine.open(address), working_set, kind)
        self._control = self._region(control.CONTROL)
        self.remote = self._region(control.DATA)
        if working_set > self.remote.length:
            raise InvalidArgument(
                f"the server at {address} offers {self.remote.length} bytes, less than the working set of "
                f"{working_set}: lower --working-set or start it with --memory",
                operation="bench",
                peer=address,
            )
        self._block: Region = engine.allocate(control.CONTROL_BYTES, "bench:client")
        self._marks = secrets.randbits(48)

    def peer_cpu_ns(self) -> int:
        """Asked of the server."""
        self._marks += 1
        self.engine.notify(self.segment, control.mark_message(self._marks))
        give_up_s = time.monotonic() + MARK_TIMEOUT_S
        while True:
            self.engine.read(self.segment, self._block, self._control.address, 64)
            found = control.read(self._block.view)
            if found is None:
                raise ProtocolError("the server is a bench of another version", peer=self.segment.address)
            if found[0] == self._marks:
                return found[1]
            if time.monotonic() > give_up_s:
                raise Timeout(
                    f"the bench server at {self.segment.address} did not answer within {MARK_TIMEOUT_S:g} s",
                    peer=self.segment.address,
                )
            select.select([], [], [], 0.001)

    def _region(self, location: str) -> RemoteRegion:
        for region in self.segment.regions:
            if region.location == location:
                return region
        raise ProtocolError(
            f"the engine at {self.segment.address} is no bench server; "
            f"start one: moonpool bench transfer --serve",
            operation="bench",
            peer=self.segment.address,
        )


class _Worker:
    """One thread: its operations, over its share of both memories."""

    def __init__(self, bench: Bench, plan: Plan, number: int, expected: npt.NDArray[np.uint8] | None) -> None:
        self._bench = bench
        self._plan = plan
        self._expected = expected if plan.direction == "read" else None
        self._begin = number * plan.share
        self._step = plan.size * plan.batch
        self._steps = min(plan.share // self._step, OPERATIONS_MAX)
        self._operations = 0
        self.verified = 0

    def __call__(self, gauge: Gauge) -> None:
        if self._plan.depth > 1:
            self._deep(gauge)
        else:
            self._blocking(gauge)
        self._operations = gauge.operations

    def touched(self) -> Iterator[tuple[int, int]]:
        """What was written at least once, from offset to offset. One step more than was counted may be."""
        steps = min(self._operations, self._steps)
        if steps:
            yield self._begin, self._begin + steps * self._step

    def _blocking(self, gauge: Gauge) -> None:
        engine, segment, lengths = self._bench.engine, self._bench.segment, self._plan.size
        move: Any = engine.read if self._plan.direction == "read" else engine.write
        clock, add, verify = time.perf_counter_ns, gauge.add, self._expected is not None
        began = clock()
        for offset, local, remote in cycle(self._columns()):
            move(segment, local, remote, lengths)
            now = clock()
            add(now - began)
            if verify:
                self._compare(offset)
                now = clock()
            if gauge.stop:
                return
            began = now

    def _deep(self, gauge: Gauge) -> None:
        engine, plan, segment = self._bench.engine, self._plan, self._bench.segment
        clock, waiting = time.perf_counter_ns, deque[tuple[int, int, Any]]()
        operation: Any = plan.direction
        for offset, local, remote in cycle(self._columns()):
            if plan.batch == 1:
                local, remote = [local], [remote]
            batch = Batch(operation, segment, local, remote, plan.size)
            waiting.append((clock(), offset, engine.submit(batch)))
            if len(waiting) < plan.depth:
                continue
            self._end(gauge, *waiting.popleft())
            if gauge.stop:
                break
        while waiting:
            waiting.popleft()[2].result()

    def _end(self, gauge: Gauge, began: int, offset: int, transfer: Any) -> None:
        transfer.result()
        gauge.add(time.perf_counter_ns() - began)
        if self._expected is not None:
            self._compare(offset)

    def _columns(self) -> list[tuple[int, Any, Any]]:
        """(offset, local, remote) of each operation; addresses, or lists of them in a batch."""
        made: list[tuple[int, Any, Any]] = []
        size, batch = self._plan.size, self._plan.batch
        local, remote = self._bench.local.address, self._bench.remote.address
        for number in range(self._steps):
            offset = self._begin + number * self._step
            places = range(offset, offset + self._step, size)
            if batch == 1:
                made.append((offset, local + offset, remote + offset))
            else:
                made.append((offset, [local + at for at in places], [remote + at for at in places]))
        return made

    def _compare(self, offset: int) -> None:
        assert self._expected is not None
        found = self._bench.memory.take(offset, self._step)
        _compare(found, self._expected[offset : offset + self._step], offset, self._bench.segment.address)
        self._bench.memory.clear(offset, self._step)  # the next time round it must be read anew
        self.verified += self._step


def _compare(
    found: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8], offset: int, address: str
) -> None:
    import numpy as np

    if not np.array_equal(found, expected):
        at = offset + int(np.argmax(found != expected))
        raise CorruptObject(
            f"wrong bytes: the first one at offset {at} of the memory of {address}",
            operation="bench",
            peer=address,
        )


def _shares(before: dict[str, int], after: dict[str, int]) -> str:
    """Which transports moved the bytes between two readings: "shm", or "shm 90 %, tcp 10 %"."""
    moved = {name: value - before.get(name, 0) for name, value in after.items()}
    moved = {name: value for name, value in moved.items() if value}
    if len(moved) < 2:
        return next(iter(moved), "none")
    total = sum(moved.values())
    ordered = sorted(moved.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * value / total:.0f} %" for name, value in ordered)


def _used(before: dict[tuple[str, str], PeerRail], after: dict[tuple[str, str], PeerRail]) -> list[RailUse]:
    """What each rail carried between two readings."""
    return [
        RailUse(
            transport,
            rail.port,
            rail.path,
            rail.state,
            rail.why,
            rail.bytes - before[transport, path].bytes,
            rail.pieces - before[transport, path].pieces,
            rail.faults - before[transport, path].faults,
        )
        for (transport, path), rail in after.items()
    ]


@contextmanager
def spawned(nbytes: int, kind: str = OWN, **options: Any) -> Iterator[tuple[str, bytes]]:
    """A peer in a process of its own, with a token of its own. -> its address, the token

    kind: of Memory. options: keywords of its TransferEngine, which JSON can carry.
    """
    token = secrets.token_hex(16)
    env = {name: value for name, value in os.environ.items() if name != paths.TOKEN_FILE_VARIABLE}
    command = [sys.executable, "-P", "-m", "moonpool.core.bench.peer", str(os.getpid()), str(nbytes)]
    process = subprocess.Popen(
        [*command, kind, json.dumps(options)],
        env=env | {paths.TOKEN_VARIABLE: token},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us: we end it when its figures were read
    )
    try:
        yield _hear_address(process), token.encode()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _hear_address(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], START_TIMEOUT_S)[0]:
        raise Timeout(f"the peer did not start within {START_TIMEOUT_S:g} s", operation="bench")
    line = process.stdout.readline()
    if not line:
        raise Unavailable(f"the peer ended with {process.wait()} while it started", operation="bench")
    said = json.loads(line)
    if "refused" in said:
        raise InvalidArgument(said["refused"], operation="bench")
    return str(said["address"])


@contextmanager
def in_process(token: bytes | None, nbytes: int, kind: str = OWN, **options: Any) -> Iterator[str]:
    """A peer that is another engine of this process. -> its address

    kind: of Memory. options: keywords of its TransferEngine.
    """
    import threading

    with TransferEngine("bench-peer", token=token, metadata="", **options) as engine:
        block = engine.allocate(control.CONTROL_BYTES, control.CONTROL)
        control.start(block.view)
        Memory(engine, nbytes, kind).fill()
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                for _, message in engine.notifications(timeout_s=0.25):
                    control.answer(block.view, message, 0)  # its CPU time is in ours

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield engine.addresses[0]
        finally:
            over.set()
            thread.join()
