"""A peer of another release, as far as versions of the wire format go (docs/wire.md, Versions): what it says
in its headers as a caller and where it is called. This release speaks OWN; NEXT is the release behind it."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from dataclasses import dataclass

from . import wire_client as w
from .store_bed import TOKEN
from .wire_client import UNSAID, Closed, Frame, Versions, Wire

OWN: Versions = (1, 1)
NEXT: Versions = (1, 2)
BEHIND_NEXT: Versions = (2, 2)  # it has given up what this release speaks
PROTOCOL_CODE = 6


@dataclass(frozen=True)
class Release:
    """version: of the header of its CHALLENGE, and the one that its AUTH takes. versions: its range."""

    name: str
    version: int
    versions: Versions


WORKING = [Release("before", 1, UNSAID), Release("same", 1, OWN), Release("next", 1, NEXT)]


@dataclass(frozen=True)
class Misfit:
    """A release that has no version in common. said: what the sentence calls its versions."""

    release: Release
    said: str


def sentences(peer: str, own: str, said: str) -> tuple[str, str]:
    """What the side of this release says: with itself, then with the peer, as the one to upgrade."""
    text = f"{own} speaks version 1 of the wire format, {peer} {said}, none in common; upgrade "
    return text + own, text + peer


def offer(wire: Wire, release: Release, purpose: bytes, *, with_body: bool = True) -> tuple[Frame, Frame]:
    """Calls as that release would; purpose: b"" for a Unix socket -> CHALLENGE, and the answer to AUTH"""
    challenge = wire.receive()
    assert challenge.kind == w.CHALLENGE, challenge
    node_nonce, incarnation = challenge.body[:32], challenge.body[32:]
    nonce = os.urandom(32)
    covered = b"default" + (b"\0" + purpose if purpose else b"")
    proof = w.mac(b"client", TOKEN, node_nonce, nonce, incarnation, covered)
    body = w.auth(b"default", nonce, proof) + (w.text16(purpose) if purpose else b"")
    wire.send(
        w.AUTH,
        body if with_body else b"",
        request_id=1,
        version=release.version,
        versions=release.versions,
    )
    return challenge, wire.receive()


class Called:
    """A port, or a Unix socket, where a peer of that release is called. ``heard()``: the AUTH of each caller;
    None: it hung up without one. Nothing answers it."""

    def __init__(self, release: Release, listener: socket.socket) -> None:
        self.release = release
        self.times: list[float] = []  # of the calls
        self._listener = listener
        self._heard: queue.Queue[Frame | None] = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    @classmethod
    def by_tcp(cls, release: Release) -> Called:
        return cls(release, socket.create_server(("127.0.0.1", 0)))

    @classmethod
    def by_socket(cls, release: Release, path: str) -> Called:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen()
        return cls(release, listener)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def heard(self, timeout_s: float = 30.0) -> Frame | None:
        return self._heard.get(timeout=timeout_s)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        release = self.release
        challenge = w.frame(w.CHALLENGE, bytes(48), version=release.version, versions=release.versions)
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.times.append(time.monotonic())
            with sock:
                wire = Wire(sock)
                try:
                    sock.sendall(challenge)
                    self._heard.put(wire.receive())
                except (Closed, OSError):
                    self._heard.put(None)
