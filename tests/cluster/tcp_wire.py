"""The wire over TCP in plain Python (docs/wire.md), for what no client of ours would send."""

from __future__ import annotations

import os
import socket
import struct

from ..core import wire_client as w
from ..core.wire_client import Wire
from .hosts import Host
from .namespaces import Namespace


class TcpWire(Wire):
    """A connection for one purpose; the caller is in ``place`` (a host, or the switch)."""

    @classmethod
    def call(cls, place: Host | Namespace, address: str, timeout_s: float = 10.0) -> TcpWire:
        return cls(connect(place, address, timeout_s), timeout_s)

    @classmethod
    def store(cls, place: Host | Namespace, address: str, token: str, timeout_s: float = 10.0) -> TcpWire:
        """Proved, for a node's objects, with the default space open."""
        wire = cls.call(place, address, timeout_s)
        wire.prove(token.encode(), b"store")
        answer = wire.ask(w.OPEN_SPACE, w.open_space(b"default", b""))
        assert answer.kind == w.OPEN_SPACE, answer.error
        (wire.space,) = struct.unpack("<I", answer.body)
        return wire

    def prove(self, token: bytes, purpose: bytes, tenant: bytes = b"default") -> bytes:
        """The handshake -> the purpose's part of WELCOME"""
        node_nonce, incarnation = self.challenged()
        nonce = os.urandom(32)
        covered = tenant + b"\0" + purpose
        proof = w.mac(b"client", token, node_nonce, nonce, incarnation, covered)
        self.send(w.AUTH, w.auth(tenant, nonce, proof) + w.text16(purpose), request_id=1)
        welcome = self.receive()
        assert (welcome.kind, welcome.request_id) == (w.WELCOME, 1), welcome
        assert welcome.body[:32] == w.mac(b"node", token, nonce, node_nonce, incarnation, covered)
        return welcome.body[32:]

    def challenged(self) -> tuple[bytes, bytes]:
        """-> the node's nonce, its incarnation"""
        greeting = self.receive()
        assert greeting.kind == w.CHALLENGE, greeting
        assert len(greeting.body) == 48
        return greeting.body[:32], greeting.body[32:]

    def read(self, rows: list[bytes]) -> tuple[list[tuple[int, ...]], bytes]:
        """-> (size, bytes that follow, generation, crc, slot) of each, and the bytes"""
        body = self.ask(w.READ, w.read(self.space, rows)).body
        (n,) = struct.unpack_from("<I", body)
        end = 4 + n * w.READ_ROW.size
        return list(w.READ_ROW.iter_unpack(body[4:end])), body[end:]


def connect(place: Host | Namespace, address: str, timeout_s: float = 10.0) -> socket.socket:
    host, _, port = address.rpartition(":")
    namespace = place.namespace if isinstance(place, Host) else place
    with namespace.entered():
        return socket.create_connection((host, int(port)), timeout_s)
