"""Many nodes, or many clients, of one master: their connections and frames, without their stores.

    python -m benchmarks.directory.crowd FD nodes ADDRESS FIRST COUNT
    python -m benchmarks.directory.crowd FD clients ADDRESS CONNECTIONS ASKERS

FD is a socket for JSON lines (benchmarks.processes.serve). Nodes join, tell an empty inventory and beat at
the pace that the master asks for, with another load each time; {"lose": seconds} has one of them end each
second, and another life take its place half a second later. {"ask": seconds, "every_s": ..} has each asker,
a host that asks for its processes, ask the master so often what changed since the epoch that it knows. The
askers are spread over the connections; the first list of all nodes is asked for once and taken for all, since
the master keeps nothing of its clients.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.processes import serve
from moonpool.core.config.paths import read_or_create_token
from moonpool.core.service.processes import allow_many_descriptors
from tests.core import master_wire as m
from tests.core import wire_client as w

PAUSE_S = 0.002
CONNECT_TIMEOUT_S = 30.0
# One-way, and those to be answered; each with loads of its own.
BEATS = [
    [
        w.frame(
            m.BEAT,
            m.beat(0, m.Load(free=(1 << 29) + i * 4096 * 7919 % (1 << 28), oldest_ms=i), 1),
            request_id=2 * asks,
            flags=0 if asks else w.ONE_WAY,
        )
        for i in range(997)
    ]
    for asks in (False, True)
]


class Nodes:
    def __init__(self, address: str, first: int, count: int) -> None:
        self.address, self.token = address, read_or_create_token()
        self.wires: list[w.Wire] = []
        self.beat_s, self.beats_per_answer, self.turns = 0.2, 1, 0
        self.beats = 0
        self.answers = select.epoll()
        self.reading = threading.Lock()  # or the number of a closed descriptor would be another connection's
        threading.Thread(target=self._beat, daemon=True).start()
        for number in range(first, first + count):
            self.wires.append(self._join(number))
        self.first = first

    def _join(self, number: int) -> w.Wire:
        name = b"node-%d" % number
        endpoint = b"tcp://10.1.%d.%d:5559" % divmod(number, 256)
        me = m.Identity(
            name,
            os.urandom(16),
            host_id=b"host-%032d" % number,
            address=b"10.1.%d.%d:7710" % divmod(number, 256),
            socket=b"/run/moonpool/node-default.sock",
            events=endpoint,
            replay=endpoint,
        )
        wire = m.connect(self.address, self.token, b"member", timeout_s=CONNECT_TIMEOUT_S)
        answer = wire.ask(m.JOIN, m.join(me, m.Load()))
        if answer.kind != m.JOIN:
            raise RuntimeError(str(answer.error))
        wire.send(m.DELTA, m.delta_applied([], 1, flags=m.BEGIN | m.END), flags=w.ONE_WAY)
        wire.socket.setblocking(False)
        self.answers.register(wire.socket, select.EPOLLIN)
        return wire

    def _beat(self) -> None:
        """In turns over all of them, for ever."""
        at, began_s, due = 0, time.monotonic(), 0.0
        while True:
            now_s = time.monotonic()
            # Not more than one beat of each at once, however late this thread is.
            due = min(due + (now_s - began_s) * len(self.wires) / self.beat_s, len(self.wires))
            began_s = now_s
            for _ in range(int(due)):
                at = (at + 1) % len(self.wires)
                self.turns += at == 0
                asks = (self.turns + at) % self.beats_per_answer == 0
                with contextlib.suppress(OSError):
                    self.wires[at].socket.send(BEATS[asks][self.beats % len(BEATS[asks])])
                self.beats += 1
            due -= int(due)
            while self._read_answers():
                pass
            time.sleep(PAUSE_S)

    def _read_answers(self) -> bool:
        answer = b""
        with self.reading:
            ready = self.answers.poll(0, 1024)
            for descriptor, _ in ready:
                with contextlib.suppress(OSError):
                    answer = os.read(descriptor, 65536) or answer
        if len(answer) > 8:
            beat_ms, self.beats_per_answer = struct.unpack("<II", answer[-8:])
            self.beat_s = beat_ms / 1000
        return len(ready) == 1024

    def lose(self, seconds: float) -> dict[str, float]:
        began_s, lost, beats = time.monotonic(), 0, self.beats
        while (left_s := began_s + seconds - time.monotonic()) > 0:
            place = lost * 7919 % len(self.wires)
            with self.reading:
                self.answers.unregister(self.wires[place].socket)
                self.wires[place].close()
            time.sleep(min(0.5, left_s))
            try:
                self.wires[place] = self._join(self.first + place)
            except (RuntimeError, TimeoutError) as error:  # where the machine is too busy
                print(error, file=sys.stderr)
            lost += 1
            time.sleep(max(0.0, min(began_s + lost - time.monotonic(), began_s + seconds - time.monotonic())))
        elapsed_s = time.monotonic() - began_s
        return {"lost": lost, "beats_per_s": (self.beats - beats) / elapsed_s, "beat_s": self.beat_s}


class Clients:
    def __init__(self, address: str, connections: int, askers: int) -> None:
        token = read_or_create_token()
        self.wires = [
            m.connect(address, token, b"directory", timeout_s=CONNECT_TIMEOUT_S) for _ in range(connections)
        ]
        self.of_socket = {wire.socket.fileno(): number for number, wire in enumerate(self.wires)}
        self.epochs = [0] * askers
        self.arrivals = select.epoll()

    def ask(self, seconds: float, every_s: float) -> dict[str, float]:
        """The epoch of an answer is that of the process that asked: questions of a connection are answered in
        their order."""
        whole = self.wires[0].ask(m.MEMBERS, struct.pack("<QB", 0, m.TAKES_CHANGES)).body
        self.epochs = [struct.unpack_from("<Q", whole)[0]] * len(self.epochs)
        waiting: list[list[int]] = [[] for _ in self.wires]
        kept = [b""] * len(self.wires)
        for wire in self.wires:
            wire.socket.setblocking(False)
            self.arrivals.register(wire.socket, select.EPOLLIN)
        began_s = last_s = time.monotonic()
        at, due = 0, 0.0
        found = {"questions": 0, "answers": 0, "bytes": 0, "epochs": 0}
        while (now_s := time.monotonic()) < began_s + seconds:
            due = min(due + (now_s - last_s) * len(self.epochs) / every_s, len(self.wires))
            last_s = now_s
            for _ in range(int(due)):
                at = (at + 1) % len(self.epochs)
                connection = at % len(self.wires)
                question = struct.pack("<QB", self.epochs[at], m.TAKES_CHANGES)
                self.wires[connection].socket.send(w.frame(m.MEMBERS, question, request_id=at + 1))
                waiting[connection].append(at)
                found["questions"] += 1
            due -= int(due)
            for descriptor, _ in self.arrivals.poll(PAUSE_S, 4096):
                connection = self.of_socket[descriptor]
                self._take(os.read(descriptor, 1 << 20), connection, waiting[connection], kept, found)
        elapsed_s = time.monotonic() - began_s
        for wire in self.wires:
            self.arrivals.unregister(wire.socket)
        return {**found, "questions_per_s": found["answers"] / elapsed_s, "whole_bytes": len(whole) + 24}

    def _take(
        self, arrived: bytes, connection: int, waiting: list[int], kept: list[bytes], found: dict[str, int]
    ) -> None:
        data = kept[connection] + arrived
        at = 0
        while len(data) - at >= w.HEADER.size:
            size = w.HEADER.size + struct.unpack_from("<I", data, at + 8)[0]
            if len(data) - at < size:
                break
            if data[at + 5] != m.MEMBERS:
                raise RuntimeError(f"the master said {data[at : at + size]!r}")
            (epoch,) = struct.unpack_from("<Q", data, at + w.HEADER.size)
            process = waiting.pop(0)
            found["epochs"] += epoch - self.epochs[process]
            found["bytes"] += size
            found["answers"] += 1
            self.epochs[process] = epoch
            at += size
        kept[connection] = data[at:]


def start(role: str, address: str, *counts: str) -> tuple[object, Callable[[Any], object]]:
    allow_many_descriptors()
    crowd: Nodes | Clients
    if role == "nodes":
        crowd = nodes = Nodes(address, *map(int, counts))
        return {"joined": len(nodes.wires)}, lambda request: nodes.lose(request["lose"])
    crowd = clients = Clients(address, *map(int, counts))
    return {"connected": len(crowd.wires)}, lambda request: clients.ask(request["ask"], request["every_s"])


if __name__ == "__main__":
    socket.setdefaulttimeout(None)
    serve(sys.argv[1], lambda: start(*sys.argv[2:]))
