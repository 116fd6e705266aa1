"""What the tests of the engine share: peers in processes of their own, and a relay that slows TCP down."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moonpool import TransferEngine

from .store_bed import TOKEN, Puppet

TRANSPORTS = ("loopback", "shm", "tcp")


class EnginePuppet(Puppet):
    script = Path(__file__).with_name("engine_puppet.py")


class Peer(EnginePuppet):
    """An engine with one region, in a process that can be killed and stopped. kind: host_arena or host."""

    def __init__(self, kind: str = "host_arena", nbytes: int = 1 << 20, **options: Any) -> None:
        super().__init__("peer", TOKEN.decode(), kind, nbytes, json.dumps({"name": "peer"} | options))
        said = self.hear()
        self.address: str = said["address"]
        self.region: int = said["region"]
        self.nbytes = nbytes
        self.kind = kind

    def ask(self, *command: Any, timeout_s: float = 30.0) -> Any:
        self.tell(json.dumps(command) + "\n")
        return self.hear(timeout_s)

    def peek(self, offset: int = 0, length: int | None = None) -> bytes:
        return bytes.fromhex(self.ask("peek", offset, self.nbytes if length is None else length))

    def poke(self, data: bytes, offset: int = 0) -> None:
        self.ask("poke", offset, data.hex())


class Reader(EnginePuppet):
    """An engine that reads the memory of a peer, in a process that can give up its right to look there."""

    def __init__(self, peer: Peer, **options: Any) -> None:
        super().__init__("reader", TOKEN.decode(), peer.address, peer.region, json.dumps(options))

    def ask(self, *command: Any) -> Any:
        self.tell(json.dumps(command) + "\n")
        return self.hear()


def moved(engine: TransferEngine, direction: str = "") -> dict[str, int]:
    """Bytes that an engine moved by each transport; those that moved none are left out."""
    return moved_of(engine.metrics(), direction)


def moved_of(metrics: dict[str, int], direction: str = "") -> dict[str, int]:
    found = {}
    for transport in TRANSPORTS:
        names = [
            f"{transport}_{way}_bytes_total" for way in ([direction] if direction else ["read", "write"])
        ]
        found[transport] = sum(metrics[name] for name in names)
    return {transport: count for transport, count in found.items() if count}


def timed(name: str, call: Callable[[], Any], limit_s: float, error: type[Exception]) -> Any:
    """What it raises; it must do so in time. Prints how long it took."""
    began = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    spent = time.monotonic() - began
    print(f"{name}: {spent:.3f} s: {caught.value}")
    assert spent < limit_s
    return caught.value


class Relay:
    """A TCP relay to one address, at most so many bytes a second each way, until it is stalled.

    receive_bytes: what the kernel keeps for it of what was sent (a sender takes that for delivered)."""

    PIECE = 16384

    def __init__(self, target: str, bytes_per_s: float = 0, *, receive_bytes: int | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._bytes_per_s = bytes_per_s
        self._open = threading.Event()
        self._open.set()
        self._over = threading.Event()
        self._sockets: list[socket.socket] = []
        self.carried = 0
        self._stall_at: int | None = None
        self._listener = socket.socket()
        if receive_bytes is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def pace(self, bytes_per_s: float) -> None:
        """0: as fast as it goes."""
        self._bytes_per_s = bytes_per_s

    def stall(self) -> None:
        """From now on nothing goes through, and nothing ends."""
        self._open.clear()

    def stall_after(self, nbytes: int) -> None:
        """Stalls when it has carried about so many bytes more."""
        self._stall_at = self.carried + nbytes

    @property
    def stalled(self) -> bool:
        return not self._open.is_set()

    def go_on(self) -> None:
        self._open.set()

    def cut(self) -> None:
        """Ends all connections that there are."""
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._over.set()
        self._open.set()
        self._listener.close()
        self.cut()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(self.PIECE):
                if self._stall_at is not None and self.carried >= self._stall_at:
                    self.stall()
                self._open.wait()
                if self._bytes_per_s:
                    self._over.wait(len(data) / self._bytes_per_s)
                sink.sendall(data)
                self.carried += len(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for one in (source, sink):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
