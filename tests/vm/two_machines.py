"""Two virtual machines with a line between them (guest.sh): an engine in each, and what becomes of its
transfers when the far process is killed, and when the line goes down.
`python -m tests.vm.two_machines far|near`, in machine 2 and in machine 1.
"""

from __future__ import annotations

import hashlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moonpool import Transfer, TransferEngine
from moonpool.core.errors import Error, TransferError
from tests.vm.rails import MARGIN, MIB, PATIENCE_S, SLOW_MBIT, TOKEN, sh, submit, tell, wait_for

NEAR, FAR = "10.9.0.1", "10.9.0.2"
CONTROL = (FAR, 7000)
SIZE = 8 * MIB
DEADLINE_S = 10.0  # a transfer takes about half of it
OPTIONS: dict[str, Any] = {"token": TOKEN, "transports": ["rdma", "tcp"], "rdma_devices": ["rxe0"]}


# ---- the far machine


def serve() -> None:
    """An engine with memory. Its address, then for each line of input the digest of the memory."""
    with TransferEngine("far", listen=f"{FAR}:0", **OPTIONS) as engine:
        memory = engine.allocate(SIZE)
        print(engine.addresses[0], memory.address, flush=True)
        for _ in sys.stdin:
            print(digest(memory.view), flush=True)


def far() -> None:
    """Starts and kills such processes as the near machine says, until that goes away."""
    process: subprocess.Popen[str] | None = None
    with socket.create_server(CONTROL) as server:
        server.settimeout(PATIENCE_S * MARGIN)
        connection, _ = server.accept()
    with connection.makefile("rw", buffering=1) as control:
        for command in control:
            if command == "kill\n" and process:
                process.kill()
                print("killed", process.wait(), file=control)
                continue
            if command == "start\n":
                pipe = subprocess.PIPE
                command_line = [sys.executable, "-m", "tests.vm.two_machines", "serve"]
                process = subprocess.Popen(command_line, stdin=pipe, stdout=pipe, text=True)
            else:
                assert process, command
                print(command, end="", file=process.stdin, flush=True)
            assert process.stdout
            print(process.stdout.readline(), end="", file=control)
    if process:
        process.kill()


# ---- the near machine


class Far:
    """The far machine, as the near one tells it what to do."""

    def __init__(self) -> None:
        wait_for(self._connected)

    def _connected(self) -> bool:
        try:
            self.control = socket.create_connection(CONTROL, timeout=PATIENCE_S * MARGIN).makefile("rw")
        except OSError:
            return False
        return True

    def __call__(self, command: str) -> str:
        print(command, file=self.control, flush=True)
        return self.control.readline().strip()


class Bed:
    """An engine here, memory of random bytes, and a new process there."""

    def __init__(self, far: Far, engine: TransferEngine) -> None:
        self.far, self.engine = far, engine
        self.ours = engine.allocate(SIZE)
        address, remote = far("start").split()
        self.remote, self.peer = int(remote), engine.open(address)

    def fill(self) -> None:
        self.ours.view[:] = random.randbytes(SIZE)

    def submit(self, **options: float) -> Transfer:
        return submit(self.engine, self.peer, self.ours, self.remote, **options)

    def check(self) -> None:
        """The far process has our bytes, and we can read them."""
        assert self.far("digest") == digest(self.ours.view), "the far memory has other bytes"
        sent = digest(self.ours.view)
        self.ours.view[:] = bytes(SIZE)
        self.engine.read(self.peer, self.ours.at(0), self.remote, SIZE)
        assert digest(self.ours.view) == sent

    def there_and_back(self) -> None:
        """Waits until memory has its keys, and after a fault until the rail is tried again."""
        wait_for(self._written)
        self.fill()
        self.submit().result(PATIENCE_S * MARGIN)
        self.check()

    def _written(self) -> bool:
        before = self.by_rdma()
        try:
            self.engine.write(self.peer, self.ours.at(0), self.remote, 8)
        except Error:
            return False
        return self.by_rdma() > before

    def by_rdma(self) -> int:
        return self.engine.metrics()["rdma_write_bytes_total"]


def digest(memory: memoryview) -> str:
    return hashlib.sha256(memory).hexdigest()


def ended_in_time(transfer: Transfer, deadline_s: float, began_s: float) -> str:
    try:
        transfer.result(PATIENCE_S * MARGIN)
        how = "done"
    except TransferError as error:
        how = f"failed: {error}"
    took_s = time.monotonic() - began_s
    assert took_s < deadline_s + 1.0 * MARGIN, (took_s, how)
    return f"{how} after {took_s:.2f} s"


def begun(bed: Bed, deadline_s: float) -> tuple[Transfer, float]:
    """A transfer in its middle, and when it began."""
    bed.fill()
    began_s = time.monotonic()
    transfer = bed.submit(deadline_s=deadline_s)
    wait_for(lambda: transfer.bytes_done or transfer.done)
    assert not transfer.done
    return transfer, began_s


def killed(bed: Bed) -> None:
    """kill -9 of the far process in mid transfer: an error, within the deadline."""
    transfer, began_s = begun(bed, DEADLINE_S)
    told = bed.far("kill")
    how = ended_in_time(transfer, DEADLINE_S, began_s)
    tell("the far process in mid transfer:", told=told, done=transfer.bytes_done, it=how)
    assert how.startswith("failed"), how


def line_gone(bed: Bed) -> None:
    """The line goes down in mid transfer and stays down: an error, within the deadline."""
    transfer, began_s = begun(bed, DEADLINE_S)
    with down():
        how = ended_in_time(transfer, DEADLINE_S, began_s)
    tell("the line went down in mid transfer:", done=transfer.bytes_done, it=how)
    assert how.startswith("failed"), how


def line_down_for_a_second(bed: Bed) -> None:
    """Right bytes, or an error within the deadline."""
    deadline_s = DEADLINE_S * MARGIN
    transfer, began_s = begun(bed, deadline_s)
    with down():
        time.sleep(1)
        done = transfer.bytes_done
    how = ended_in_time(transfer, deadline_s, began_s)
    tell("the line was down for 1 s in mid transfer:", done=done, it=how)
    if how.startswith("done"):
        bed.check()


@contextmanager
def down() -> Iterator[None]:
    sh("ip link set eth0 down")
    try:
        yield
    finally:
        sh("ip link set eth0 up")


def near() -> None:
    far = Far()
    with TransferEngine("near", listen=f"{NEAR}:0", timeout_s=10.0 * MARGIN, **OPTIONS) as engine:
        bed = Bed(far, engine)
        bed.there_and_back()
        tell("there and back:", by_rdma=bed.by_rdma())
        sh(f"tc qdisc replace dev eth0 root tbf rate {SLOW_MBIT}mbit burst 32kb limit 64mb")
        for fault in (line_gone, line_down_for_a_second):
            fault(bed)
            bed.there_and_back()
        killed(bed)
        Bed(far, engine).there_and_back()
    print("two machines moved all bytes")


if __name__ == "__main__":
    {"far": far, "near": near, "serve": serve}[sys.argv[1]]()
