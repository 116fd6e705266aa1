"""The master's frames in plain Python: docs/wire_master.md as a program, and a connection that speaks them,
rightly or, where a test wants it, wrongly. Nothing of the product uses it."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from . import wire_client as w
from .wire_client import Wire

JOIN, DELTA, BEAT, MEMBERS, LOCATE, PLACE, FORGET, LEAVE, REMOVALS, ORDERED = range(32, 42)
MIRROR, MASTERS = 42, 45
BEGIN, END, APPLIED = 1, 2, 4  # flags of DELTA
REMOVED = 0x80  # in a row of DELTA
PREFIX, SUSPECTS, ORDER = 1, 2, 4  # flags of LOCATE
TAKES_CHANGES = 1  # flag of MEMBERS
CHANGED, FILLING, SINCE = 1, 2, 4  # flags of its answer
NOTHING = (1 << 64) - 1  # in place of what a node has applied: it holds nothing
DRAM, SSD = 0, 1
PACE = struct.pack("<III", 5, 200, 1)  # of a master with few nodes: behind its answers to JOIN and BEAT
TENANT_LOAD = struct.Struct("<QQQQ")  # arena, free, objects, oldest age in ms; the tenant's name is before


@dataclass(frozen=True)
class Identity:
    name: bytes
    incarnation: bytes
    host_id: bytes = b"host"
    address: bytes = b"127.0.0.1:7710"
    socket: bytes = b""
    events: bytes = b""
    replay: bytes = b""

    def pack(self) -> bytes:
        texts = (self.name, self.host_id, self.address, self.socket)
        return self.incarnation + b"".join(map(w.text16, texts))

    def endpoints(self) -> bytes:
        return w.text16(self.events) + w.text16(self.replay)


@dataclass(frozen=True)
class Load:
    """One tenant, called default."""

    arena: int = 1 << 30
    free: int = 1 << 29
    objects: int = 0
    oldest_ms: int = 0

    def pack(self) -> bytes:
        row = w.text16(b"default") + TENANT_LOAD.pack(self.arena, self.free, self.objects, self.oldest_ms)
        return struct.pack("<QQH", 0, 0, 1) + row


def drops(first: int, hashes: list[bytes], *, every: bool = False) -> bytes:
    return struct.pack("<BQI", every, first, len(hashes)) + b"".join(hashes)


def versions(upto: int, of_drops: list[int], *, all_before: int = 0) -> bytes:
    return struct.pack("<QQ", all_before, upto) + struct.pack(f"<{len(of_drops)}Q", *of_drops)


def join(identity: Identity, load: Load, applied: int = NOTHING) -> bytes:
    return identity.pack() + load.pack() + identity.endpoints() + struct.pack("<Q", applied)


def delta(rows: list[tuple[bytes, int]], *, flags: int = 0) -> bytes:
    """rows: (hash, tier, with REMOVED where it is gone)"""
    return struct.pack("<II", flags, len(rows)) + b"".join(key + bytes([what]) for key, what in rows)


def delta_applied(rows: list[tuple[bytes, int]], applied: int, *, flags: int = 0) -> bytes:
    """The same of a node that knows versions."""
    head = struct.pack("<IIQ", flags | APPLIED, len(rows), applied)
    return head + b"".join(key + bytes([what]) for key, what in rows)


def beat(drops_done: int, load: Load, applied: int = 0) -> bytes:
    return struct.pack("<Q", drops_done) + load.pack() + struct.pack("<Q", applied)


def removals(complete_since: int, rows: list[tuple[bytes, int]]) -> bytes:
    """rows: (hash, version)"""
    head = struct.pack("<QI", complete_since, len(rows))
    return head + b"".join(key + struct.pack("<Q", version) for key, version in rows)


def ordered(
    first: int, epoch: int, keys: list[bytes], nodes: list[int], told: list[int], placed: list[int]
) -> bytes:
    """told, placed: of each key a number with one bit of each of the nodes."""
    row = (len(nodes) + 7) // 8
    head = struct.pack("<QQIHH", first, epoch, len(keys), len(nodes), 0)
    bits = b"".join(n.to_bytes(row, "little") for n in [*told, *placed])
    return head + struct.pack(f"<{len(nodes)}H", *nodes) + b"".join(keys) + bits


def member(number: int, state: int, silent_ms: int, identity: Identity, load: Load) -> bytes:
    return struct.pack("<HBBQ", number, state, 0, silent_ms) + identity.pack() + load.pack()


def locate(hashes: list[bytes], *, flags: int = 0, holders_max: int = 0, width: int = 1) -> bytes:
    return struct.pack("<BBHI", flags, holders_max, width, len(hashes)) + b"".join(hashes)


def place(size: int, n: int, avoid_nodes: list[int], avoid_hosts: list[bytes], *, flags: int = 0) -> bytes:
    head = struct.pack("<QHBBHH", size, n, flags, 0, len(avoid_nodes), len(avoid_hosts))
    return head + struct.pack(f"<{len(avoid_nodes)}H", *avoid_nodes) + b"".join(map(w.text16, avoid_hosts))


def forget(hashes: list[bytes], unreached: list[int]) -> bytes:
    nodes = struct.pack(f"<{len(unreached)}H", *unreached)
    return struct.pack("<IHH", len(hashes), len(unreached), 0) + nodes + b"".join(hashes)


def masters(term: int, addresses: list[bytes], *, of_owner: bool = True, own: int = 0) -> bytes:
    return struct.pack("<QBBB", term, of_owner, own, len(addresses)) + b"".join(map(w.text16, addresses))


def connect(address: str, token: bytes, purpose: bytes, *, timeout_s: float = 10.0) -> Wire:
    """A proved TCP connection for that purpose."""
    host, _, port = address.rpartition(":")
    wire = Wire(socket.create_connection((host, int(port)), timeout_s), timeout_s)
    greeting = wire.receive()
    assert greeting.kind == w.CHALLENGE, greeting
    nonce, incarnation = greeting.body[:32], greeting.body[32:48]
    own = os.urandom(32)
    proved = b"default\0" + purpose
    proof = w.mac(b"client", token, nonce, own, incarnation, proved)
    wire.send(w.AUTH, w.auth(b"default", own, proof) + w.text16(purpose), request_id=1)
    welcome = wire.receive()
    assert welcome.kind == w.WELCOME, welcome.error
    assert welcome.body[:32] == w.mac(b"node", token, own, nonce, incarnation, proved)
    return wire
