"""Other processes for the tests of the engine: ``engine_puppet.py VERB ARGUMENTS``. Each says on stdout what
it did, one JSON value a line, and ends when its stdin does, unless it was killed before."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from typing import Any

from moonpool import TransferEngine, TransferError
from moonpool.core.transfer.region import Region


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def make_region(engine: TransferEngine, kind: str, nbytes: int) -> tuple[Region, memoryview]:
    if kind == "host_arena":
        region = engine.allocate(nbytes, "cpu:0")
        return region, region.view
    memory = mmap.mmap(-1, nbytes)
    return engine.register(memory, "cpu:1"), memoryview(memory)


def peer(token: str, kind: str, nbytes: str, options: str) -> None:
    """An engine with one region of that kind; each line on stdin is a command."""
    engine = TransferEngine(token=token.encode(), **json.loads(options))
    region, view = make_region(engine, kind, int(nbytes))
    say({"address": engine.addresses[0], "region": region.address})
    for line in sys.stdin:
        verb, *rest = json.loads(line)
        if verb == "peek":
            offset, length = rest
            say(bytes(view[offset : offset + length]).hex())
        elif verb == "poke":
            offset, data = rest
            view[offset : offset + len(data) // 2] = bytes.fromhex(data)
            say("poked")
        elif verb == "notifications":
            say([[sender, message.hex()] for sender, message in engine.notifications(rest[0])])
        elif verb == "check on message":
            check_on_message(engine, view, *rest)
        elif verb == "metrics":
            say(engine.metrics())
        elif verb == "close region":
            region.close()
            say("closed")
        elif verb == "hide":
            forbid(PR_SET_DUMPABLE, 0)
            say("hidden")
        elif verb == "send":
            address, message = rest
            engine.notify(engine.open(address), bytes.fromhex(message))
            say("sent")


PR_SET_DUMPABLE = 4
CAP_SYS_PTRACE = 19
_libc = ctypes.CDLL(None, use_errno=True)


def forbid(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def give_up_ptrace() -> None:
    """This thread may look into no other process that is not its own to look into, not even as root."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice 32 bits
    if _libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for index in range(3):
        sets[index] &= ~(1 << CAP_SYS_PTRACE)
    if _libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def reader(token: str, address: str, region: str, options: str) -> None:
    """Reads the first bytes of a peer's region over and over; each line on stdin is a command."""
    engine = TransferEngine(token=token.encode(), **json.loads(options))
    here, segment = engine.allocate(4096), None
    for line in sys.stdin:
        verb, *rest = json.loads(line)
        if verb == "give up ptrace":
            give_up_ptrace()
            say("given up")
        elif verb == "read":
            segment = segment or engine.open(address)
            here.view[:] = bytes(4096)
            try:
                engine.read(segment, here.address, int(region), rest[0])
                error = ""
            except TransferError as caught:
                error = str(caught)
            segment.refresh()
            say([bytes(here.view[: rest[0]]).hex(), segment.transport, error, engine.metrics()])


def check_on_message(engine: TransferEngine, view: memoryview, rounds: int) -> None:
    """Each message is a number, which is said; the whole region must be full of it when it arrives."""
    while rounds:
        for _, message in engine.notifications(10):
            number = int(message)
            is_there = bytes(view) == bytes([number % 256]) * len(view)
            say(number if is_there else f"message {number} came before its data")
            rounds -= 1


def user(token: str, address: str, nbytes: str, options: str) -> None:
    """Reads a peer's whole region again and again, until it is killed."""
    engine = TransferEngine(token=token.encode(), **json.loads(options))
    region = engine.allocate(int(nbytes))
    segment = engine.open(address)
    for number in range(1 << 60):
        engine.read(segment, region, segment.at(0))
        if number == 3:
            say("reading")


if __name__ == "__main__":
    os.environ.pop("MOONPOOL_CLUSTER_TOKEN", None)
    {f.__name__: f for f in (peer, user, reader)}[sys.argv[1]](*sys.argv[2:])
