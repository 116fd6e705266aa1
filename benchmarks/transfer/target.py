"""The process whose memory is moved to or from: python -m benchmarks.transfer.target FD DRIVER BYTES

FD is a socket: {"address": .., "about": ..} out when it is ready; it ends when the socket does.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from benchmarks.transfer.drivers import load
from benchmarks.transfer.memory import let_others_look


def main() -> None:
    descriptor, driver, size = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as channel:
        try:
            let_others_look()
            target = load(driver, "Target")(int(size))
            target.region.fill("target")
            answer = {"address": target.region.address, "about": target.about}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        channel.sendall(json.dumps(answer).encode() + b"\n")
        channel.recv(1)  # until the benchmark ends
    os._exit(0)  # peers may hang or crash while they are torn down


if __name__ == "__main__":
    main()
