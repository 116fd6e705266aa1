"""A stand-in for a node that answers as a test says."""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path

from . import wire_client as w
from .store_bed import MIB, TOKEN
from .wire_client import FakeNode, Frame, Wire

LIMITS = w.Limits(MIB, MIB, 4096, 4096, 1024, 4096, 8 * MIB, 16384)


def serve(
    path: Path, features: bytes, answers: dict[int, bytes]
) -> tuple[FakeNode, threading.Thread, list[Frame]]:
    """A node with those features, which answers each kind with that body; what it was asked."""
    fake = FakeNode(path)
    asked: list[Frame] = []

    def script(wire: Wire) -> None:
        wire.send(w.CHALLENGE, w.challenge(b"c" * 32, b"i" * 16))
        auth = wire.receive()
        nonce = auth.body[9:41]
        memory = _memory()
        proof = w.mac(b"node", TOKEN, nonce, b"c" * 32, b"i" * 16, b"default")
        body = proof + LIMITS.pack() + features
        welcome = w.frame(w.WELCOME, body, request_id=auth.request_id, flags=w.ANSWER)
        socket.send_fds(wire.socket, [welcome], memory)
        for descriptor in memory:
            os.close(descriptor)
        while True:
            frame = wire.receive()
            asked.append(frame)
            body = answers.get(frame.kind, struct.pack("<I", 0))
            wire.send(frame.kind, body, request_id=frame.request_id, flags=w.ANSWER)

    thread = threading.Thread(target=fake.serve, args=[script])
    thread.start()
    return fake, thread, asked


def _memory() -> list[int]:
    arena, index = os.memfd_create("moonpool-arena-fake"), os.memfd_create("moonpool-index")
    os.ftruncate(arena, MIB)
    os.ftruncate(index, MIB)
    os.pwrite(index, struct.pack("<8sII16s", b"MPLINDX1", 64, 16, b"i" * 16), 0)
    return [arena, index]


NAMES = w.text16(b"old") + w.text16(b"") + w.text16(b"") + w.text16(b"")
