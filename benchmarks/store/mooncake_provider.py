"""The process that holds Mooncake's segment.

python -m benchmarks.store.mooncake_provider FD MASTER MIB HOST
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.processes import serve


def main() -> None:
    descriptor, master, size_mib, host = sys.argv[1:]
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()

    def start() -> tuple[object, Callable[[Any], object]]:
        sizes = (int(size_mib) << 20, 16 << 20)
        if code := store.setup(host, "P2PHANDSHAKE", *sizes, "tcp", "", master):
            raise RuntimeError(f"setup failed with {code}")
        return {"ready": True}, lambda request: None

    serve(descriptor, start)
    os._exit(0)


if __name__ == "__main__":
    main()
