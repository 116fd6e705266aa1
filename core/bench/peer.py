"""The serving side of `moonpool bench transfer`: memory to read and write, and its own CPU time.

    python -m moonpool.core.bench.peer PARENT BYTES own|foreign OPTIONS

is the peer that a bench on one host starts for itself: it says its address as a line of JSON, and ends with
its parent. OPTIONS: keywords of its engine, as JSON.
"""

from __future__ import annotations

import json
import mmap
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from moonpool.core.bench import control
from moonpool.core.errors import InvalidArgument
from moonpool.core.transfer.engine import TransferEngine

_LOOK_S = 0.25  # how soon a signal is noticed


def fill(view: memoryview) -> None:
    """Puts pattern(0) there, a piece at a time."""
    piece = 1 << 24
    for at in range(0, len(view), piece):
        part = view[at : at + piece]
        part[:] = control.pattern(at // 8, len(part)).data


def serve(engine: TransferEngine, nbytes: int, foreign: bool, on_ready: Callable[[list[str]], None]) -> None:
    """Serves until SIGTERM or SIGINT. foreign: memory that the engine did not allocate."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopped.append(number))
    block = engine.allocate(control.CONTROL_BYTES, control.CONTROL)
    control.start(block.view)
    data = data_region(engine, nbytes, foreign)
    fill(data.view)
    on_ready(engine.addresses)
    while not stopped:
        for _, message in engine.notifications(timeout_s=_LOOK_S):
            control.answer(block.view, message, time.process_time_ns())


def data_region(engine: TransferEngine, nbytes: int, foreign: bool) -> Any:
    """The region that bytes are read from and written to."""
    if foreign:
        return engine.register(mmap.mmap(-1, nbytes), control.DATA)
    return engine.allocate(nbytes, control.DATA)


def main() -> None:
    """Serves with the arguments of the command line until the parent dies, which kills this process
    (SIGKILL), or until SIGTERM. Prints {"address": ...} once the memory is filled, or {"refused": ...} where
    an option of the engine cannot be.
    """
    from moonpool.core.service.processes import die_with_parent

    parent, nbytes, kind, options = sys.argv[1:]
    die_with_parent(int(parent), signal.SIGKILL)
    try:
        engine = TransferEngine("bench-peer", metadata="", **json.loads(options))
    except InvalidArgument as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    with engine:
        serve(
            engine,
            int(nbytes),
            kind == "foreign",
            lambda addresses: print(json.dumps({"address": addresses[0]}), flush=True),
        )


if __name__ == "__main__":
    main()
