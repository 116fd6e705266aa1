"""Rails of soft RoCE in the virtual machine, a0-b0, a1-b1 and so on (guest.sh): their cables, which can be
slow, lossy, cut and silent, and two engines with a transfer between them.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from moonpool import Batch, Region, Segment, Transfer, TransferEngine

TOKEN = b"of this test, and of no other"
MIB = 1 << 20
SLICE = 128 << 10
SLOW_MBIT = 16  # of a rail: the emulated processor, which carries 200 Mbit/s, is not what limits it
MARGIN = 5  # of a machine that is busy
PATIENCE_S = 60.0


def tell(what: str, **figures: object) -> None:
    print(what, *(f"{name}={value}" for name, value in figures.items()), flush=True)


class Shell:
    """Runs commands in the middle of transfers: a fork of this process would take longer than they do."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            ["bash"], stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )

    def __call__(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(f"{{ {command}; }} 2>&1; echo; echo ended $?", file=self.process.stdin, flush=True)
        lines = []
        for line in self.process.stdout:
            if line.startswith("ended "):
                assert line == "ended 0\n", (command, lines)
                break
            lines.append(line)
        return "".join(lines)


sh = Shell()


# ---- the cables


def shape(rates_mbit: Sequence[float]) -> None:
    """Slows what leaves a0, a1, ... down; the queue is longer than what soft RoCE has under way."""
    for rail, rate in enumerate(rates_mbit):
        sh(f"tc qdisc replace dev a{rail} root tbf rate {rate}mbit burst 32kb limit 64mb")


def carried(rails: int) -> list[int]:
    """Bytes that left a0, a1, ... since they were shaped."""
    return [json.loads(sh(f"tc -s -j qdisc show dev a{rail} root"))[0]["bytes"] for rail in range(rails)]


@contextmanager
def cut(*rails: int) -> Iterator[None]:
    """The cables are pulled out: both ends see that."""
    for rail in rails:
        sh(f"ip link set a{rail} down")
    try:
        yield
    finally:
        for rail in rails:
            # With the device its routes went.
            net, table = f"10.8.{rail}", 200 + 2 * rail
            sh(f"ip link set a{rail} up && ip route replace {net}.0/24 dev a{rail} src {net}.1 table {table}")


@contextmanager
def deaf(*rails: int) -> Iterator[None]:
    """The far side drops what arrives; no port goes down, and nothing tells the near side."""
    for rail in rails:
        sh(f"tc qdisc add dev b{rail} ingress")
        sh(f"tc filter add dev b{rail} ingress matchall action drop")
    try:
        yield
    finally:
        for rail in rails:
            sh(f"tc qdisc del dev b{rail} ingress")


@contextmanager
def lossy(rail: int, percent: float) -> Iterator[None]:
    """A cable that loses so many packets of each direction, by chance, and is as slow as shape() makes it."""
    netem = f"root netem limit 100000 loss {percent}%"
    sh(f"tc qdisc del dev a{rail} root; tc qdisc add dev a{rail} {netem} rate {SLOW_MBIT}mbit")
    sh(f"tc qdisc add dev b{rail} {netem}")
    try:
        yield
    finally:
        sh(f"tc qdisc del dev a{rail} root; tc qdisc del dev b{rail} root")


def lost(rail: int) -> int:
    """Packets of both directions that a lossy cable has lost."""
    ends = (f"a{rail}", f"b{rail}")
    return sum(json.loads(sh(f"tc -s -j qdisc show dev {end} root"))[0]["drops"] for end in ends)


# ---- the engines


def near(rails: int, transports: Sequence[str] = ("rdma", "tcp"), **options: float) -> TransferEngine:
    devices = [f"ra{rail}" for rail in range(rails)]
    return TransferEngine("near", token=TOKEN, transports=transports, rdma_devices=devices, **options)


def far(rails: int) -> TransferEngine:
    devices = [f"rb{rail}" for rail in range(rails)]
    return TransferEngine("far", token=TOKEN, transports=["rdma", "tcp"], rdma_devices=devices)


class Bed:
    """Two engines of this process with a rail or several, and memory of random bytes on the near one."""

    def __init__(self, rails: int, size: int, transports: Sequence[str] = ("rdma", "tcp")) -> None:
        self.far, self.near = far(rails), near(rails, transports, timeout_s=10.0 * MARGIN)
        self.size = size
        self.theirs, self.ours = self.far.allocate(size), self.near.allocate(size)
        self.peer = self.near.open(self.far.addresses[0])
        self.fill()
        # The memory gets its keys in the background; until then bytes take TCP.
        wait_for(
            lambda: self.near.write(self.peer, self.ours.at(0), self.theirs.address, 8) and self.moved("rdma")
        )

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.near.close()
        self.far.close()

    def fill(self) -> None:
        self.ours.view[:] = random.Random(self.size).randbytes(self.size)

    def moved(self, transport: str) -> int:
        return self.near.metrics()[f"{transport}_write_bytes_total"]

    def retries(self) -> int:
        """Pieces that went again, because of a rail that was left."""
        return self.near.metrics()["retries_total"]

    def by_rail(self) -> list[int]:
        """Bytes that each rail has brought, without what it sent again."""
        [path] = [row for row in self.near.paths(self.peer) if row.transport == "rdma"]
        return [rail.bytes for rail in sorted(path.rails, key=lambda rail: rail.port)]

    def submit(self, **options: float) -> Transfer:
        return submit(self.near, self.peer, self.ours, self.theirs.address, **options)

    def check(self) -> None:
        assert self.theirs.view == self.ours.view, "other bytes than those that were written"

    def warm_up(self) -> None:
        """Each rail was used: its queue pair is there, and its rate is known."""
        self.submit().result(PATIENCE_S * MARGIN)
        self.check()


def submit(engine: TransferEngine, peer: Segment, ours: Region, remote: int, **options: float) -> Transfer:
    places = range(0, len(ours), SLICE)
    local, theirs = [ours.at(at) for at in places], [remote + at for at in places]
    return engine.submit(Batch("write", peer, local, theirs, SLICE), **options)


def wait_for(ready: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S * MARGIN
    while not ready():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.002)
