"""A line to one address whose connections carry so many bytes a second each, each way:

    python -m benchmarks.transfer.slow_line FD HOST:PORT BYTES_PER_SECOND

FD is a socket: "host:port" out, where it listens; then each line is "stall" (nothing goes through, nothing
ends), "cut" (all connections end), or "go on"; it ends when the socket does.
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


class Line:
    def __init__(self, target: tuple[str, int], rate: float) -> None:
        self._target, self._rate = target, rate
        self._flows = threading.Event()
        self._flows.set()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def obey(self, request: object) -> object:
        if request == "stall":
            self._flows.clear()
        elif request == "cut":
            ends, self._ends = self._ends, []
            shut(ends)
        else:
            self._flows.set()
        return request

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(self._target)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # What waits in buffers is beyond every priority: as little as a real line would hold.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE)
            self._ends += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        """Until one of them ends. An idle line saves up the time of one piece at most."""
        free_s = 0.0
        with suppress(OSError):
            while data := source.recv(PIECE):
                self._flows.wait()
                sink.sendall(data)
                now_s = time.monotonic()
                free_s = max(free_s, now_s - PIECE / self._rate) + len(data) / self._rate
                if free_s > now_s:
                    time.sleep(free_s - now_s)
        shut([source, sink])


def shut(ends: list[socket.socket]) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def main() -> None:
    descriptor, target, rate = sys.argv[1:]
    host, _, port = target.rpartition(":")

    def start() -> tuple[object, Callable[[Any], object]]:
        line = Line((host, int(port)), float(rate))
        return line.address, line.obey

    serve(descriptor, start)
    os._exit(0)


if __name__ == "__main__":
    main()
