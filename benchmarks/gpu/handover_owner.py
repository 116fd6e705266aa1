"""The process whose KV cache is read: python -m benchmarks.gpu.handover_owner FD BLOCKS TOKEN_HEX [DRIVER]

FD is a socket: {"address", "cache", "pid"} out when it is ready; it ends when the socket does. The cache's
bytes are those of ``contents(BLOCKS)``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.card import LIBRARY, Bytes, Card
from benchmarks.gpu.handover import engine
from benchmarks.gpu.kv_cache import BLOCK_BYTES, LAYERS
from benchmarks.processes import serve
from moonpool import _native

SEED = 23


def contents(blocks: int) -> Bytes:
    return np.random.default_rng(SEED).integers(0, 256, LAYERS * blocks * BLOCK_BYTES, np.uint8)


def main() -> None:
    descriptor, blocks, token, *library = sys.argv[1:]
    kept: list[Any] = []  # until the benchmark ends

    def start() -> tuple[object, Callable[[Any], object]]:
        if library:
            _native.use_driver_for_tests(library[0])
        card = Card(*(library or [LIBRARY]))
        values = contents(int(blocks))
        address = card.allocate(values.size)
        piece = card.pinned(64 << 20)
        for at in range(0, values.size, piece.size):
            part = values[at : at + piece.size]
            piece[: part.size] = part
            card.queue(address + at, piece.ctypes.data, part.size)
            card.finish()
        owner = engine("owner", bytes.fromhex(token))
        kept.extend([card, owner, owner.register((address, values.size))])
        return {"address": owner.addresses[0], "cache": address, "pid": os.getpid()}, lambda request: None

    serve(descriptor, start)
    os._exit(0)


if __name__ == "__main__":
    main()
