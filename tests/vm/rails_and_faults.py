"""In the virtual machine: what becomes of transfers over several rails of soft RoCE, slow, cut, silent, and
when their peer dies. `python -m tests.vm.rails_and_faults [--long] [SCENARIO ...]`, with rails a0-b0, a1-b1,
a2-b2 (guest.sh).

Each scenario checks every byte. It prints what it measured, and asserts no speed: the processor is emulated,
and its host may be busy. Times of faults have a margin of 5.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from moonpool.core.errors import Error, TransferError
from tests.vm.rails import (
    MARGIN,
    MIB,
    PATIENCE_S,
    SLOW_MBIT,
    Bed,
    carried,
    cut,
    deaf,
    far,
    lossy,
    lost,
    near,
    shape,
    submit,
    tell,
    wait_for,
)

DEADLINE_S = 2.0
TRIES = 10  # to lose the rails in the middle of a transfer

Fault = Callable[..., AbstractContextManager[None]]


def name_of(fault: Fault) -> str:
    return "cut" if fault is cut else "deaf"


def rates_of_rails(_: bool) -> None:
    """Rails carry by their speed. Printed: what two carry beside one, and 1:2:4 beside their sum. The
    transfers are so large that a piece on the slowest rail takes a small part of them."""
    with Bed(1, 8 * MIB) as bed:
        shape([SLOW_MBIT])
        bed.warm_up()
        one_s, _ = timed(bed)
    with Bed(2, 8 * MIB) as bed:
        shape([SLOW_MBIT] * 2)
        bed.warm_up()
        before = carried(2)
        two_s, two_beside = timed(bed)
        first, second = (after - was for after, was in zip(carried(2), before, strict=True))
        assert two_beside or min(first, second) > (first + second) / 10, (first, second)
    tell("two rails beside one:", times=f"{one_s / two_s:.2f}", target=1.9, one_s=f"{one_s:.2f}")
    with Bed(3, 48 * MIB) as bed:
        rates = [SLOW_MBIT / 2, SLOW_MBIT, SLOW_MBIT * 2]
        shape(rates)
        bed.warm_up()
        before = carried(3)
        took_s, beside = timed(bed)
        shares = [after - was for after, was in zip(carried(3), before, strict=True)]
        of_sum = bed.size * 8 / 1e6 / took_s / sum(rates)
        # A rail alone carries less than its link: headers, and acknowledgements on their way.
        alone = 8 * MIB * 8 / 1e6 / one_s / SLOW_MBIT
        of_alone = f"{of_sum / alone:.2f}"
        tell(
            "rails of 1:2:4:",
            of_what_each_carries_alone=of_alone,
            target=0.9,
            of_links=f"{of_sum:.2f}",
            carried=shares,
        )
        assert beside or 0 < shares[0] < shares[2], shares


def timed(bed: Bed) -> tuple[float, int]:
    """(seconds of a transfer, bytes of it that took TCP because rails seemed silent on a busy machine)."""
    bed.theirs.view[:] = bytes(bed.size)
    by_tcp = bed.moved("tcp")
    began_s = time.monotonic()
    bed.submit().result(PATIENCE_S * MARGIN)
    took_s = time.monotonic() - began_s
    bed.check()
    if beside := bed.moved("tcp") - by_tcp:
        tell("by TCP, for the machine was too busy:", bytes=beside)
    return took_s, beside


def rail_cut(long: bool) -> None:
    """A cable is pulled in mid transfer: the other rail carries on."""
    for _ in range(4 if long else 1):
        rail_lost(cut)


def rail_silent(long: bool) -> None:
    """The far end of a cable falls silent in mid transfer: the other rail carries on."""
    for _ in range(4 if long else 1):
        rail_lost(deaf)


def rail_lost(fault: Fault) -> None:
    with Bed(2, 8 * MIB) as bed:
        shape([SLOW_MBIT] * 2)
        bed.warm_up()
        assert any(one_of_two(bed, fault) for _ in range(TRIES)), "each transfer was too fast"


def one_of_two(bed: Bed, fault: Fault) -> bool:
    """Whether the rail was lost in mid transfer, and had pieces under way then."""
    bed.theirs.view[:] = bytes(bed.size)
    retries, by_tcp = bed.retries(), bed.moved("tcp")
    transfer = bed.submit()
    wait_for(lambda: transfer.bytes_done)
    with fault(0):
        began_s, open_bytes = time.monotonic(), bed.size - transfer.bytes_done
        wait_for(lambda: bed.retries() > retries or transfer.done)
        left_s = time.monotonic() - began_s
        assert transfer.result(PATIENCE_S * MARGIN) == bed.size
        all_s = time.monotonic() - began_s
    bed.check()
    again = bed.retries() - retries
    tell(
        f"one of two rails {name_of(fault)}:",
        open_bytes=open_bytes,
        left_after_s=f"{left_s:.2f}",
        target=1.0,
        pieces_again=again,
        all_s=f"{all_s:.2f}",
        by_tcp=bed.moved("tcp") - by_tcp,
    )
    assert left_s < 1.0 * MARGIN or not again
    return again > 0


def rail_lossy(_: bool) -> None:
    """One of two rails loses 1 % of its packets: soft RoCE sends all behind a lost one again, or waits for
    0.5 s. The transfer goes well, and the other rail carries more of it."""
    with Bed(2, 16 * MIB) as bed:
        shape([SLOW_MBIT] * 2)
        bed.warm_up()
        with lossy(0, 1.0):
            before = bed.by_rail()
            took_s, beside = timed(bed)
            shares = [after - was for after, was in zip(bed.by_rail(), before, strict=True)]
            packets = lost(0)
    tell("one of two rails lossy:", packets_lost=packets, carried=shares, s=f"{took_s:.2f}", by_tcp=beside)
    assert packets, "none was lost"
    assert beside or shares[0] < shares[1], shares


def rails_gone(long: bool) -> None:
    """All rails are lost: the rest goes by TCP, in the same transfer. Later by RDMA again."""
    for fault in (cut, deaf) if long else (cut,):
        all_of_two(fault)


def all_of_two(fault: Fault) -> None:
    with Bed(2, 4 * MIB) as bed:
        shape([SLOW_MBIT] * 2)
        bed.warm_up()
        assert any(lost_in_mid_transfer(bed, fault) for _ in range(TRIES)), "each transfer was too fast"


def lost_in_mid_transfer(bed: Bed, fault: Fault) -> bool:
    bed.theirs.view[:] = bytes(bed.size)
    tcp, rdma = bed.moved("tcp"), bed.moved("rdma")
    transfer = bed.submit()
    wait_for(lambda: bed.moved("rdma") > rdma)
    with fault(0, 1):
        assert transfer.result(PATIENCE_S * MARGIN) == bed.size
    bed.check()
    by_tcp, by_rdma = bed.moved("tcp") - tcp, bed.moved("rdma") - rdma
    tell(f"all rails {name_of(fault)}:", by_tcp=by_tcp, by_rdma=by_rdma)
    wait_for(lambda: bed.submit().result(PATIENCE_S) and bed.moved("rdma") > rdma + by_rdma)
    bed.check()
    return by_tcp > 0 and by_rdma > 0


def region_closed(long: bool) -> None:
    """The key of memory that its owner has closed opens nothing: at rest, and in the middle of a transfer."""
    for _ in range(20 if long else 2):
        close_in_mid_transfer()


def close_in_mid_transfer() -> None:
    with Bed(1, 4 * MIB, ["rdma"]) as bed:
        shape([SLOW_MBIT])
        memory = bytearray(bed.size)
        region = bed.far.register(memory)
        address = region.address
        wait_for(lambda: written(bed, address, 8))
        transfer = submit(bed.near, bed.peer, bed.ours, address)
        wait_for(lambda: transfer.bytes_done)
        region.close()
        left = bytes(memory)
        with suppress(TransferError):
            transfer.result(PATIENCE_S * MARGIN)
        assert transfer.error is not None, "a transfer to closed memory went well"
        assert not written(bed, address, 8)
        assert memory == left, "bytes came in after the region was closed"
        tell("a region was closed in mid transfer:", done=transfer.bytes_done, why=transfer.error)
        with bed.far.register(memory) as again:
            assert again.address == address
            wait_for(lambda: written(bed, address, bed.size))
            assert memory == bed.ours.view


def written(bed: Bed, address: int, length: int) -> bool:
    try:
        return bed.near.write(bed.peer, bed.ours.at(0), address, length) == length
    except Error:
        return False


class Target:
    """The far engine in a process of its own."""

    def __init__(self, size: int) -> None:
        command = [sys.executable, "-m", "tests.vm.rails_and_faults", "--target", str(size)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address, at = self.process.stdout.readline().split()
        self.memory = int(at)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def serve(size: int) -> None:
    with far(2) as engine:
        memory = engine.allocate(size)
        print(engine.addresses[0], memory.address, flush=True)
        sys.stdin.read()


def target_killed(long: bool) -> None:
    """The process of the peer is killed, or stopped, in mid transfer: no transfer outlives its deadline."""
    for number in (signal.SIGKILL, signal.SIGSTOP) * (5 if long else 1):
        signalled(number)


def signalled(number: signal.Signals) -> None:
    size = 4 * MIB
    target = Target(size)
    try:
        with near(2, timeout_s=10.0 * MARGIN) as engine:
            shape([SLOW_MBIT] * 2)
            ours = engine.allocate(size)
            ours.view[:] = random.Random(number).randbytes(size)
            peer = engine.open(target.address)
            submit(engine, peer, ours, target.memory).result(PATIENCE_S * MARGIN)
            transfer = submit(engine, peer, ours, target.memory, deadline_s=DEADLINE_S)
            wait_for(lambda: transfer.bytes_done)
            assert not transfer.done
            target.signal(number)
            began_s = time.monotonic()
            try:
                transfer.result(PATIENCE_S * MARGIN)
                how = "done"  # the NIC of a process that stands still goes on
            except TransferError as error:
                how = f"failed: {error}"
            took_s = time.monotonic() - began_s
            tell(f"the peer got {number.name}:", after_s=f"{took_s:.2f}", deadline_s=DEADLINE_S, it=how)
            assert took_s < DEADLINE_S + 1.0 * MARGIN
            assert how != "done" or number == signal.SIGSTOP
            if number == signal.SIGSTOP:
                target.signal(signal.SIGCONT)
                submit(engine, peer, ours, target.memory).result(PATIENCE_S * MARGIN)
                back = engine.allocate(size)
                engine.read(peer, back.at(0), target.memory, size)
                assert back.view == ours.view
    finally:
        target.end()


def short_cut(_: bool) -> None:
    """All cables are out for 3 s, with no other path: the transfer waits for them within its deadline, or
    fails within it."""
    with Bed(2, 4 * MIB, ["rdma"]) as bed:
        shape([SLOW_MBIT] * 2)
        bed.warm_up()
        transfer = bed.submit(deadline_s=10.0 * MARGIN)
        wait_for(lambda: transfer.bytes_done)
        began_s = time.monotonic()
        with cut(0, 1):
            time.sleep(3)
        with suppress(TransferError):
            transfer.result(PATIENCE_S * MARGIN)
        tell(
            "all cables out for 3 s:",
            after_s=f"{time.monotonic() - began_s:.2f}",
            it=transfer.error or "done",
        )
        wait_for(lambda: written(bed, bed.theirs.address, bed.size))
        bed.check()


SHORT = [rates_of_rails, rail_cut, rail_silent, rail_lossy, rails_gone, region_closed, target_killed]
LONG = [*SHORT, short_cut]


def main() -> None:
    if "--target" in sys.argv:
        return serve(int(sys.argv[-1]))
    long = "--long" in sys.argv
    named = [word for word in sys.argv[1:] if not word.startswith("-")]
    for scenario in LONG if long or named else SHORT:
        if named and scenario.__name__ not in named:
            continue
        began_s = time.monotonic()
        scenario(long)
        tell(f"ok {scenario.__name__}", s=f"{time.monotonic() - began_s:.1f}")
    tell("all scenarios passed")
    return None


if __name__ == "__main__":
    assert Path("/sys/class/infiniband/ra0").exists(), "needs rails: see guest.sh"
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
