"""The serving side of `moonpool bench transfer`: memory to read and write, and its own CPU time.

    python -m moonpool.core.bench.peer PARENT BYTES KIND OPTIONS

is the peer that a bench on one host starts for itself: it says its address as a line of JSON, and ends with
its parent. KIND: of Memory. OPTIONS: keywords of its engine, as JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from moonpool.core.bench import control
from moonpool.core.bench.memory import Memory
from moonpool.core.errors import InvalidArgument
from moonpool.core.transfer.engine import TransferEngine

_LOOK_S = 0.25  # how soon a signal is noticed


def serve(engine: TransferEngine, data: Memory, on_ready: Callable[[list[str]], None]) -> None:
    """Serves that memory of the engine until SIGTERM or SIGINT."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopped.append(number))
    block = engine.allocate(control.CONTROL_BYTES, control.CONTROL)
    control.start(block.view)
    data.fill()
    on_ready(engine.addresses)
    while not stopped:
        for _, message in engine.notifications(timeout_s=_LOOK_S):
            control.answer(block.view, message, time.process_time_ns())


def main() -> None:
    """Serves with the arguments of the command line until the parent dies, which kills this process
    (SIGKILL), or until SIGTERM. Prints {"address": ...} once the memory is filled, or {"refused": ...} where
    an option of the engine or the kind of memory cannot be.
    """
    from moonpool.core.service.processes import die_with_parent

    parent, nbytes, kind, options = sys.argv[1:]
    die_with_parent(int(parent), signal.SIGKILL)
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(TransferEngine("bench-peer", metadata="", **json.loads(options)))
            data = Memory(engine, int(nbytes), kind)
        except InvalidArgument as error:
            print(json.dumps({"refused": str(error)}), flush=True)
            return
        serve(engine, data, lambda addresses: print(json.dumps({"address": addresses[0]}), flush=True))


if __name__ == "__main__":
    main()
