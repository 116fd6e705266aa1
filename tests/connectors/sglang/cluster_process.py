"""A master, or a node of its cluster, in a process of its own, so that it can be stopped where it is:
``cluster_process.py master``, ``cluster_process.py node SOCKET MASTER``. Says where it is when it serves, and
ends with its stdin."""

from __future__ import annotations

import sys
import time

from moonpool import _native
from moonpool.core.config.native_settings import master_settings, node_settings

TOKEN = b"a token of this test"


def main() -> None:
    if sys.argv[1] == "master":
        master = _native.MasterServer(["127.0.0.1:0"], TOKEN, master_settings())
        master.start()
        print(master.addresses[0], flush=True)
        sys.stdin.read()
        master.stop()
        return
    socket, address = sys.argv[2:]
    node = _native.Server(
        socket,
        [("default", 16 << 20)],
        TOKEN,
        node_settings(),
        listen=["127.0.0.1:0"],
        master=address,
        name="holder",
    )
    node.start()
    while not node.metrics()["master_joined"]:
        time.sleep(0.001)
    print(socket, flush=True)
    sys.stdin.read()
    node.stop()


if __name__ == "__main__":
    main()
