"""A process with engines whose memory is moved: python -m benchmarks.transfer.engines FD ENGINES BYTES

FD is a socket: [[address, where its memory begins], ...] out; then each line is a number of bytes by which
the first engine's memory is to grow, and is answered with how many it has. It ends when the socket does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.processes import serve
from benchmarks.transfer.drivers.moonpool import TOKEN
from moonpool import TransferEngine


def main() -> None:
    descriptor, engines, size = sys.argv[1:]
    made: list[TransferEngine] = []  # until the benchmark ends

    def start() -> tuple[object, Callable[[Any], object]]:
        told = []
        for number in range(int(engines)):
            made.append(TransferEngine(f"target {number}", token=TOKEN, io_threads=1))
            region = made[-1].allocate(int(size))
            region.view[:] = bytes([number % 251 + 1]) * int(size)
            told.append([made[-1].addresses[0], region.address])
        return told, grow

    def grow(more: int) -> object:
        region = made[0].allocate(more)
        return region.address

    serve(descriptor, start)
    os._exit(0)


if __name__ == "__main__":
    main()
