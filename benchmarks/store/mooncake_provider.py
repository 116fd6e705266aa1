"""The process that holds Mooncake's segment.

python -m benchmarks.store.mooncake_provider FD MASTER MIB HOST
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys


def main() -> None:
    descriptor, master, size_mib, host = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as channel:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        sizes = (int(size_mib) << 20, 16 << 20)
        code = store.setup(host, "P2PHANDSHAKE", *sizes, "tcp", "", master)
        answer = {"error": f"setup failed with {code}"} if code else {"ready": True}
        channel.sendall(json.dumps(answer).encode() + b"\n")
        channel.recv(1)  # until the benchmark ends
    os._exit(0)


if __name__ == "__main__":
    main()
