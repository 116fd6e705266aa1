"""A relay on the way between two hosts, which neither of them can see.

The switch takes packets from one host to a port of the other as its own (a routing rule and a local route),
and the relay, which listens there under the other's address, dials on. The test delays, slows, holds, ends or
spoils what passes. One thread, no data is ever reordered: TCP would not do it either.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from .hosts import Host, Network

UP, DOWN = "up", "down"  # from the caller to the server; back
PIECE = 64 << 10
WAITING_BYTES_MAX = 1 << 20  # of one direction; then the relay reads no further, and the sender feels it
IP_TRANSPARENT = 19
DIRECTIONS = (UP, DOWN)

# (direction, offset in its stream, bytes): changes the bytes in place
Spoiler = Callable[[str, int, bytearray], None]


class Lane:
    """One direction of one connection."""

    def __init__(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        self.direction, self.source, self.target = direction, source, target
        self.pieces: deque[tuple[float, bytearray]] = deque()  # (not before, bytes)
        self.waiting = 0
        self.passed = 0
        self.source_ended = False
        self.ended = False  # and said so to the target


class Relay:
    """Serves from construction to close(). Settings hold for all connections, from now on."""

    def __init__(self, network: Network, caller: Host, server: Host, port: int) -> None:
        self.delay_s = 0.0  # of each byte, in each direction
        self.bytes_per_s = 0.0  # of each direction of each connection; 0: no limit
        self.spoil: Spoiler | None = None
        self.held: frozenset[str] = frozenset()  # directions in which nothing moves
        self.accepted = 0
        self.passed = dict.fromkeys(DIRECTIONS, 0)
        self._server = (server.address, port)
        self._network = network
        table = 1000 + port
        # TCP by its number: a minimal Debian has no /etc/protocols to look the name up in.
        tcp = f"ipproto {socket.IPPROTO_TCP:d} dport {port}"
        self._rule = f"iif {caller.cable} to {server.address} {tcp} lookup {table}"
        self._route = f"local {server.address} dev lo table {table}"
        self._lanes: list[Lane] = []
        self._refusing = False
        self._wake, self._waker = socket.socketpair()
        self._closing = False
        with network.switch.entered():
            self._listener = socket.socket()
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.setsockopt(socket.IPPROTO_IP, IP_TRANSPARENT, 1)
            self._listener.bind(self._server)
            self._listener.listen(256)
        self._listener.setblocking(False)
        network.switch.ip(f"route replace {self._route}", f"rule add {self._rule}")
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    # ---- what a test does

    def hold(self, *directions: str) -> None:
        """Nothing moves in these directions (all, when none is named); connections stay."""
        self.held = frozenset(directions or DIRECTIONS)
        self._poke()

    def flow(self) -> None:
        self.held = frozenset()
        self._poke()

    def cut(self, *, refuse: bool = False) -> None:
        """Ends every connection with a reset. ``refuse``: later ones too, until mend()."""
        with self._lock:
            self._refusing = refuse
            for lane in self._lanes:
                lane.ended = True
            for end in {lane.source for lane in self._lanes}:
                reset(end)
            self._lanes.clear()
        self._poke()

    def mend(self) -> None:
        self._refusing = False

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._lanes) // 2

    def close(self) -> None:
        self._closing = True
        self._poke()
        self._thread.join()
        self.cut()
        for end in (self._listener, self._wake, self._waker):
            end.close()
        self._network.switch.ip(f"rule del {self._rule}")

    # ---- its thread

    def _poke(self) -> None:
        self._waker.send(b"x")

    def _run(self) -> None:
        with self._network.switch.entered():
            while not self._closing:
                with selectors.DefaultSelector() as selector, self._lock:
                    wait_s = self._interests(selector)
                    self._lock.release()
                    try:
                        ready = selector.select(wait_s)
                    finally:
                        self._lock.acquire()
                    for key, events in ready:
                        self._serve(key, events)

    def _interests(self, selector: selectors.DefaultSelector) -> float | None:
        now = time.monotonic()
        wanted: dict[socket.socket, int] = {self._wake: selectors.EVENT_READ}
        wanted[self._listener] = selectors.EVENT_READ
        wait_s: float | None = None
        for lane in self._lanes:
            if not lane.source_ended and lane.waiting < WAITING_BYTES_MAX:
                wanted[lane.source] = wanted.get(lane.source, 0) | selectors.EVENT_READ
            if lane.direction in self.held or lane.ended or not (lane.pieces or lane.source_ended):
                continue
            due = lane.pieces[0][0] if lane.pieces else now
            if due <= now:
                wanted[lane.target] = wanted.get(lane.target, 0) | selectors.EVENT_WRITE
            else:
                wait_s = min(due - now, wait_s if wait_s is not None else due - now)
        for end, events in wanted.items():
            selector.register(end, events)
        return wait_s

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._wake:
            self._wake.recv(4096)
        elif key.fileobj is self._listener:
            self._accept()
        else:
            for lane in list(self._lanes):
                if lane.source is key.fileobj and events & selectors.EVENT_READ:
                    self._read(lane)
                if lane.target is key.fileobj and events & selectors.EVENT_WRITE:
                    self._write(lane)
            self._forget_ended()

    def _accept(self) -> None:
        caller, _ = self._listener.accept()
        self.accepted += 1
        if self._refusing:
            reset(caller)
            return
        try:
            server = socket.create_connection(self._server, 5)
        except OSError:
            reset(caller)
            return
        for end in (caller, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lanes += [Lane(UP, caller, server), Lane(DOWN, server, caller)]

    def _read(self, lane: Lane) -> None:
        try:
            data = bytearray(lane.source.recv(PIECE))
        except BlockingIOError:
            return
        except OSError:
            self._break(lane)
            return
        if not data:
            lane.source_ended = True
            return
        if self.spoil is not None:
            self.spoil(lane.direction, lane.passed, data)
        lane.passed += len(data)
        self.passed[lane.direction] += len(data)
        lane.waiting += len(data)
        now = time.monotonic()
        due = now + self.delay_s
        if self.bytes_per_s:
            last = lane.pieces[-1][0] if lane.pieces else now
            due = max(due, last + len(data) / self.bytes_per_s)
        lane.pieces.append((due, data))

    def _write(self, lane: Lane) -> None:
        try:
            while lane.pieces and lane.pieces[0][0] <= time.monotonic():
                data = lane.pieces[0][1]
                n = lane.target.send(data)
                lane.waiting -= n
                del data[:n]
                if data:
                    return
                lane.pieces.popleft()
            if lane.source_ended and not lane.pieces:
                lane.ended = True
                lane.target.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return
        except OSError:
            self._break(lane)

    def _break(self, broken: Lane) -> None:
        """One end is gone: the other one is told the hard way."""
        for lane in self._lanes:
            if lane.source in (broken.source, broken.target):
                lane.ended = True
                reset(lane.source)

    def _forget_ended(self) -> None:
        sources = {lane.source: lane for lane in self._lanes}
        for lane in list(self._lanes):
            back = sources.get(lane.target)
            if lane.ended and back is not None and back.ended:
                self._lanes.remove(lane)
                self._lanes.remove(back)
                del sources[lane.target], sources[lane.source]
                lane.source.close()
                lane.target.close()


def reset(end: socket.socket) -> None:
    """Closes it with RST instead of FIN."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def flip_bit(direction: str, offset: int, bit: int = 0) -> Spoiler:
    """A spoiler that flips one bit at an offset of the stream of each connection."""

    def spoil(passing: str, begin: int, data: bytearray) -> None:
        if passing == direction and begin <= offset < begin + len(data):
            data[offset - begin] ^= 1 << bit

    return spoil


def flip_in(direction: str, mark: bytes, times: int = 1) -> Spoiler:
    """A spoiler that flips one bit of the first ``times`` places where ``mark`` passes."""
    left = [times]

    def spoil(passing: str, _: int, data: bytearray) -> None:
        if passing != direction or not left[0]:
            return
        at = data.find(mark)
        if at >= 0:
            left[0] -= 1
            data[at + len(mark) // 2] ^= 1

    return spoil
