"""Lines to addresses, which can be cut and healed:

    python -m benchmarks.history.lines FD HOST:PORT...

FD is a socket of JSON lines: the addresses of the lines, in the order of their targets; then {"cut": [n,
...]} says which of them carry nothing until the next one says otherwise. A cut line keeps its connections,
and what was sent there waits, as with TCP.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from benchmarks.processes import serve

PIECE = 64 << 10
CONNECT_S = 5.0


class Line:
    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.flows = threading.Event()
        self.flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        self.flows.wait()
        try:
            far = socket.create_connection(self._target, CONNECT_S)
        except OSError:  # its process is dead: nothing answers there
            near.close()
            return
        far.settimeout(None)
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        other = threading.Thread(target=self._pump, args=(far, near), daemon=True)
        other.start()
        self._pump(near, far)
        other.join()
        near.close()
        far.close()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE):
                self.flows.wait()
                sink.sendall(data)
        self.flows.wait()
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def start(targets: list[str]) -> tuple[object, Callable[[Any], object]]:
    lines = [Line(target) for target in targets]

    def obey(asked: dict[str, list[int]]) -> object:
        for number, line in enumerate(lines):
            if number in asked["cut"]:
                line.flows.clear()
            else:
                line.flows.set()
        return asked

    return [line.address for line in lines], obey


if __name__ == "__main__":
    serve(sys.argv[1], lambda: start(sys.argv[2:]))
