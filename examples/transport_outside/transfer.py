"""Two engines in two processes whose bytes go by a library's transport: ``python transfer.py LIBRARY``."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import moonpool


def offer(library: str, told: Connection) -> None:
    with moonpool.TransferEngine("offers", outside_transports=[library]) as engine:
        region = engine.allocate(1 << 20)
        region.view[:5] = b"hello"
        told.send(engine.addresses[0])
        told.recv()  # until the other one is done


def main() -> None:
    library = str(Path(sys.argv[1]).resolve())
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=offer, args=(library, there))
    process.start()
    # Without "transports" it would be used where shared memory is not.
    with moonpool.TransferEngine("takes", outside_transports=[library], transports=["unix_socket"]) as engine:
        local = engine.allocate(1 << 20)
        peer = engine.open(here.recv())
        engine.read(peer, local, peer.at(0), 65536)
        print(bytes(local.view[:5]).decode())
        for path in engine.paths(peer):
            print(f"{path.transport}: {path.path or path.why}")
        print(f"{engine.metrics()['unix_socket_read_bytes_total']} bytes by unix_socket")
    here.send("done")
    process.join()


if __name__ == "__main__":
    main()
