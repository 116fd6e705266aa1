"""No engine: blocking sockets, one message with the payload, a 64-byte answer.

The receiving side is a loop in C++, as an engine's is. The caller is Python (sendmsg, recv_into), as the
engines' callers are, or C++: what the machine can do without any Python.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from array import array
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from benchmarks.transfer.drivers import Call, PythonCaller
from benchmarks.transfer.memory import Region

ANSWER = 64
LIBRARY = "MOONPOOL_BENCH_PLAIN_LOOP"  # the environment variable that says where plain_loop.cpp was built


def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(os.environ[LIBRARY])
    word, address = ctypes.c_uint64, ctypes.c_void_p
    loaded.plain_serve.argtypes = (ctypes.c_int, word)
    loaded.plain_send.argtypes = (ctypes.c_int, word, address, word, word, word, address)
    return loaded


class Target:
    def __init__(self, size: int) -> None:
        self.region = Region(size)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.about = {"port": self._listener.getsockname()[1]}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        serve = library().plain_serve
        while True:
            connection, _ = self._listener.accept()
            no_delay(connection)
            threading.Thread(
                target=serve, args=(connection.detach(), self.region.address), daemon=True
            ).start()


class Initiator:
    op, limit = "write", "plain C++"

    def __init__(self, size: int, remote: int, about: dict[str, Any]) -> None:
        self.region, self._port = Region(size), about["port"]
        self._connections: list[socket.socket] = []

    def caller(self, thread: int, calls: Sequence[Sequence[int]], block: int) -> Sender:
        return Sender(self._connection(thread), self.region, calls, block)

    def limit_caller(self, thread: int, calls: Sequence[Sequence[int]], block: int) -> NativeSender:
        return NativeSender(self._connection(thread), self.region, calls, block)

    def _connection(self, thread: int) -> socket.socket:
        while len(self._connections) <= thread:
            self._connections.append(socket.create_connection(("127.0.0.1", self._port)))
            no_delay(self._connections[-1])
        return self._connections[thread]


class Sender(PythonCaller):
    def __init__(
        self, connection: socket.socket, region: Region, calls: Sequence[Sequence[int]], block: int
    ) -> None:
        self.connection, self.region, self.block = connection, region, block
        self.batch = len(calls[0])
        self.offsets = array("Q", chain.from_iterable(calls))
        view, self._answer = region.view(), bytearray(ANSWER)
        made: list[Call] = []
        for offsets in calls:
            blocks = [view[offset : offset + block] for offset in offsets]
            made.append(partial(self._send, blocks, block * len(offsets)))
        super().__init__(made, expected=ANSWER)

    def run(self, first: int, count: int) -> list[float]:
        self.announce(first, count)
        return super().run(first, count)

    def announce(self, first: int, count: int) -> None:
        offsets = self.offsets[first * self.batch : (first + count) * self.batch]
        self.connection.sendall(array("Q", [self.block, self.batch, count]) + offsets)

    def _send(self, blocks: list[memoryview], size: int) -> int:
        if self.connection.sendmsg(blocks) != size:
            raise RuntimeError("a blocking sendmsg sent a part")
        return self.connection.recv_into(self._answer, ANSWER, socket.MSG_WAITALL)


class NativeSender(Sender):
    def run(self, first: int, count: int) -> list[float]:
        self.announce(first, count)
        spent_s = array("d", bytes(8 * count))
        offsets = self.offsets.buffer_info()[0] + 8 * first * self.batch
        numbers = (offsets, self.block, self.batch, count, spent_s.buffer_info()[0])
        if library().plain_send(self.connection.fileno(), self.region.address, *numbers):
            raise RuntimeError("the other side of a plain socket went away")
        return spent_s.tolist()


def no_delay(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
