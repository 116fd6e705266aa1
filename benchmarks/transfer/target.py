"""The process whose memory is moved to or from: python -m benchmarks.transfer.target FD DRIVER BYTES

FD is a socket: {"address": .., "about": ..} out when it is ready; it ends when the socket does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.processes import serve
from benchmarks.transfer.drivers import Target, load
from benchmarks.transfer.memory import let_others_look


def main() -> None:
    descriptor, driver, size = sys.argv[1:]
    kept: list[Target] = []  # until the benchmark ends

    def start() -> tuple[object, Callable[[Any], object]]:
        let_others_look()
        kept.append(load(driver, "Target")(int(size)))
        kept[0].region.fill("target")
        return {"address": kept[0].region.address, "about": kept[0].about}, lambda request: None

    serve(descriptor, start)
    os._exit(0)  # peers may hang or crash while they are torn down


if __name__ == "__main__":
    main()
