"""A line to one address whose connections carry so many bytes a second each, each way:

    python -m benchmarks.transfer.slow_line FD HOST:PORT BYTES_PER_SECOND

FD is a socket: "host:port" out, where it listens; it ends when the socket does.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from benchmarks.processes import serve

PIECE = 64 << 10


def pump(source: socket.socket, sink: socket.socket, rate: float) -> None:
    """Until one of them ends. An idle line saves up the time of one piece at most."""
    free_s = 0.0
    with suppress(OSError):
        while data := source.recv(PIECE):
            sink.sendall(data)
            now_s = time.monotonic()
            free_s = max(free_s, now_s - PIECE / rate) + len(data) / rate
            if free_s > now_s:
                time.sleep(free_s - now_s)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def accept(listener: socket.socket, target: tuple[str, int], rate: float) -> None:
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(target)
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # What waits in buffers is beyond every priority: as little as a real line would hold.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE)
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=pump, args=(one, other, rate), daemon=True).start()


def main() -> None:
    descriptor, target, rate = sys.argv[1:]
    host, _, port = target.rpartition(":")

    def start() -> tuple[object, Callable[[Any], object]]:
        listener = socket.create_server(("127.0.0.1", 0))
        arguments = (listener, (host, int(port)), float(rate))
        threading.Thread(target=accept, args=arguments, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}", lambda request: None

    serve(descriptor, start)
    os._exit(0)


if __name__ == "__main__":
    main()
