"""The wire format once more, in plain Python: docs/wire.md as a program. It speaks to the real node in tests,
rightly or, where a test wants it, wrongly; nothing of the product uses it."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

MAGIC = 0x314C504D  # "MPL1"
VERSION = 1
HEADER = struct.Struct("<IBBHIIQ")  # magic, version, kind, flags, payload bytes, versions, request id
ANSWER, ONE_WAY = 1, 2  # flags

ERROR, CHALLENGE, AUTH, WELCOME = 1, 2, 3, 4
OPEN_SPACE, LEASE, RETURN, COMMIT, LOOKUP, RELEASE, TOUCH, REMOVE, LIST, STAT, READ, PUT = range(16, 28)
DESCRIBE, RELAY = 28, 29

PIN, PREFIX = 1, 2  # flags of LOOKUP
REPLACE, MARKS, VERSIONS, SIZES = 1, 2, 4, 8  # flags of COMMIT and PUT
STORED, EXISTS, REFUSED, DAMAGED = 0, 1, 2, 3
EXISTS_MANIFEST = 5
BY_PIN, PIECE = 1, 2  # of the "how" in a row of READ

DESCRIPTOR = struct.Struct("<QQQII")  # offset, size, generation, crc, slot
ENTRY = struct.Struct("<QQII")  # size, generation, crc, pins of a LIST row; its name follows
READ_ROW = struct.Struct("<QQQII")  # size, bytes that follow, generation, crc, slot
DESCRIPTION = struct.Struct("<QQIIBB6x")  # size, generation, crc, pins, where, keep
REMOVE_VERSIONS = 1 << 31
READ_MISS = (2**64 - 1, 0, 0, 0, 0)
WELCOME_LIMITS = struct.Struct("<QQQQIIII")  # see Limits


Versions = tuple[int, int]  # the lowest and the highest that a side speaks
UNSAID: Versions = (0, 0)  # of the release before, and in all frames but CHALLENGE and AUTH


def frame(
    kind: int,
    body: bytes = b"",
    *,
    request_id: int = 0,
    flags: int = 0,
    version: int = VERSION,
    versions: Versions = UNSAID,
) -> bytes:
    lowest, highest = versions
    header = HEADER.pack(MAGIC, version, kind, flags, len(body), lowest | highest << 16, request_id)
    return header + body


def text16(text: bytes) -> bytes:
    return struct.pack("<H", len(text)) + text


def mac(
    role: bytes, token: bytes, first_nonce: bytes, second_nonce: bytes, incarnation: bytes, tenant: bytes
) -> bytes:
    """role is b"client" (the node's nonce comes first) or b"node" (the client's nonce comes first)."""
    message = b"moonpool " + role + bytes([VERSION]) + first_nonce + second_nonce + incarnation + tenant
    return hmac.digest(token, message, hashlib.sha256)


def challenge(nonce: bytes, incarnation: bytes) -> bytes:
    return nonce + incarnation


def auth(tenant: bytes, nonce: bytes, proof: bytes) -> bytes:
    return text16(tenant) + nonce + proof


@dataclass(frozen=True)
class Limits:
    """What WELCOME says after the node's proof."""

    arena_bytes: int
    index_bytes: int
    slab_bytes: int
    object_bytes_max: int
    key_bytes_max: int
    parts_max: int
    frame_bytes_max: int
    frame_keys_max: int

    def pack(self) -> bytes:
        return WELCOME_LIMITS.pack(*self.__dict__.values())


@dataclass(frozen=True)
class Row:
    """One object of a COMMIT."""

    offset: int
    size: int
    crc: int
    name: bytes
    parent: bytes = b""
    marks: bytes = b""  # group and soft pin, with the flag MARKS

    def pack(self) -> bytes:
        head = struct.pack("<QQI", self.offset, self.size, self.crc)
        return head + text16(self.name) + text16(self.parent) + self.marks


def marks(group: bytes, soft_ms: int = 0) -> bytes:
    return text16(group) + struct.pack("<I", soft_ms)


def open_space(namespace: bytes, fingerprint: bytes) -> bytes:
    return text16(namespace) + text16(fingerprint)


def lease(least: int, want: int) -> bytes:
    return struct.pack("<QQ", least, want)


def give_back(offset: int) -> bytes:
    return struct.pack("<Q", offset)


def commit(space: int, rows: Iterable[Row], *, flags: int = 0) -> bytes:
    rows = list(rows)
    return struct.pack("<IBBHI", space, flags, 0, 0, len(rows)) + b"".join(row.pack() for row in rows)


def lookup(space: int, names: list[bytes], *, flags: int = 0, width: int = 1) -> bytes:
    return struct.pack("<IBBHI", space, flags, 0, width, len(names)) + b"".join(map(text16, names))


def release(pin: int) -> bytes:
    return struct.pack("<Q", pin)


def touch(objects: int, size: int, slots: list[int]) -> bytes:
    return struct.pack(f"<QQI{len(slots)}I", objects, size, len(slots), *slots)


def remove(
    space: int, names: list[bytes], generations: Sequence[int] = (), *, versions: Sequence[int] = ()
) -> bytes:
    numbers = versions or generations
    n = len(names) | (REMOVE_VERSIONS if versions else 0)
    head = struct.pack("<II", space, n) + b"".join(map(text16, names))
    return head + struct.pack(f"<{len(numbers)}Q", *numbers)


def by_name(name: bytes, *, room: int, begin: int = 0, how: int = 0) -> bytes:
    """A row of READ."""
    return struct.pack("<BQQ", how, begin, room) + text16(name)


def pinned(generation: int, slot: int, *, room: int, begin: int = 0, how: int = 0) -> bytes:
    """A row of READ, for an object that somebody pinned."""
    return struct.pack("<BQQQI", how | BY_PIN, begin, room, generation, slot)


def read(space: int, rows: list[bytes]) -> bytes:
    return struct.pack("<II", space, len(rows)) + b"".join(rows)


def read_answer(rows: list[tuple[int, int, int, int, int]], data: bytes) -> bytes:
    return struct.pack("<I", len(rows)) + b"".join(READ_ROW.pack(*row) for row in rows) + data


def put(
    space: int,
    objects: list[tuple[int, bytes, bytes, bytes]],
    *,
    flags: int = 0,
    version: int | None = None,
) -> bytes:
    """objects: (crc, name, parent's name, bytes); version: of each of them."""
    last = b"" if version is None else struct.pack("<Q", version)
    flags |= 0 if version is None else VERSIONS
    rows = b"".join(
        struct.pack("<QI", len(data), crc) + text16(name) + text16(parent) + last
        for crc, name, parent, data in objects
    )
    head = struct.pack("<IBBHII", space, flags, 0, 0, len(objects), len(rows))
    return head + rows + b"".join(data for *_, data in objects)


def describe(space: int, names: list[bytes]) -> bytes:
    return remove(space, names)


def list_objects(space: int, cursor: int, limit: int, prefix: bytes) -> bytes:
    return struct.pack("<III", space, cursor, limit) + text16(prefix)


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    request_id: int
    body: bytes
    version: int = VERSION
    versions: Versions = UNSAID

    @property
    def error(self) -> tuple[int, str]:
        assert self.kind == ERROR, self
        code, size = struct.unpack_from("<HH", self.body)
        assert len(self.body) == 4 + size
        return code, self.body[4:].decode()


def header_of(data: bytes) -> tuple[Frame, int]:
    """A frame without its body, and the size of that."""
    magic, version, kind, flags, size, versions, request_id = HEADER.unpack(data)
    assert magic == MAGIC
    assert version == VERSION or kind == AUTH
    assert versions == 0 or kind in (CHALLENGE, AUTH, WELCOME)
    return Frame(kind, flags, request_id, b"", version, (versions & 0xFFFF, versions >> 16)), size


class Closed(Exception):
    """The other side ended the connection."""


class Wire:
    """A connection to a node, or to a client when a test plays the node; every wait has a deadline."""

    def __init__(self, sock: socket.socket, timeout_s: float = 10.0) -> None:
        self.socket = sock
        self.socket.settimeout(timeout_s)
        self.descriptors: list[int] = []
        self.welcome = b""  # its body
        self.space = 0
        self._request_id = 0

    @classmethod
    def dial(cls, path: Path | str, timeout_s: float = 10.0) -> Wire:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(path))  # blocking: with a timeout, Python gives up where the queue is full
        return cls(sock, timeout_s)

    @classmethod
    def open(cls, path: Path | str, token: bytes, *, tenant: bytes = b"default") -> Wire:
        """A connection that has shaken hands and opened the space that a Store has by default."""
        wire = cls.dial(path)
        wire.handshake(token, tenant)
        answer = wire.ask(OPEN_SPACE, open_space(b"default", b""))
        (wire.space,) = struct.unpack("<I", answer.body)
        return wire

    def handshake(self, token: bytes, tenant: bytes = b"default") -> Limits:
        greeting = self.receive()
        assert greeting.kind == CHALLENGE, greeting
        assert len(greeting.body) == 48, greeting
        node_nonce, incarnation = greeting.body[:32], greeting.body[32:]
        nonce = os.urandom(32)
        proof = mac(b"client", token, node_nonce, nonce, incarnation, tenant)
        self.send(AUTH, auth(tenant, nonce, proof), request_id=1)
        welcome = self.receive()
        assert (welcome.kind, welcome.request_id) == (WELCOME, 1), welcome
        assert welcome.body[:32] == mac(b"node", token, nonce, node_nonce, incarnation, tenant)
        assert len(self.descriptors) == 2
        self.welcome = welcome.body
        return Limits(*WELCOME_LIMITS.unpack_from(welcome.body, 32))

    def send(
        self,
        kind: int,
        body: bytes = b"",
        *,
        request_id: int = 0,
        flags: int = 0,
        version: int = VERSION,
        versions: Versions = UNSAID,
    ) -> None:
        said = frame(kind, body, request_id=request_id, flags=flags, version=version, versions=versions)
        self.socket.sendall(said)

    def receive(self) -> Frame:
        received, size = header_of(self._exactly(HEADER.size))
        return replace(received, body=self._exactly(size))

    def ask(self, kind: int, body: bytes = b"") -> Frame:
        """Sends a request and gives its answer, an ERROR frame included."""
        self._request_id += 1
        self.send(kind, body, request_id=self._request_id)
        answer = self.receive()
        assert answer.request_id in (self._request_id, 0), answer
        assert answer.kind == ERROR or (answer.kind, answer.flags) == (kind, ANSWER), answer
        return answer

    def ended(self) -> tuple[int, str]:
        """Waits for the ERROR frame with which the node ends a connection, and for the end."""
        last = self.receive()
        assert last.request_id == 0
        assert self.is_closed()
        return last.error

    def is_closed(self) -> bool:
        """Waits for the end of the connection; False when there are more bytes."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def lease(self, least: int, want: int) -> tuple[int, int, str]:
        """(offset, size, why not)"""
        body = self.ask(LEASE, lease(least, want)).body
        offset, size, text = struct.unpack_from("<QQH", body)
        assert len(body) == 18 + text
        return offset, size, body[18:].decode()

    def commit(self, rows: Iterable[Row], *, flags: int = 0) -> list[int]:
        body = self.ask(COMMIT, commit(self.space, rows, flags=flags)).body
        (n,) = struct.unpack_from("<I", body)
        assert len(body) == 4 + n
        return list(body[4:])

    def lookup(
        self, names: list[bytes], *, flags: int = 0, width: int = 1
    ) -> tuple[int, int, list[tuple[int, ...]]]:
        """(pin, hits, descriptors)"""
        body = self.ask(LOOKUP, lookup(self.space, names, flags=flags, width=width)).body
        pin, hits, n = struct.unpack_from("<QII", body)
        assert len(body) == 16 + 32 * n
        return pin, hits, list(DESCRIPTOR.iter_unpack(body[16:]))

    def stat(self) -> dict[str, int]:
        body = self.ask(STAT).body
        (n,) = struct.unpack_from("<I", body)
        at, rows = 4, {}
        for _ in range(n):
            (size,) = struct.unpack_from("<H", body, at)
            name = body[at + 2 : at + 2 + size].decode()
            (rows[name],) = struct.unpack_from("<Q", body, at + 2 + size)
            at += 10 + size
        assert at == len(body)
        return rows

    def close(self) -> None:
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece, descriptors, _, _ = socket.recv_fds(self.socket, size - len(data), 4)
            self.descriptors += descriptors
            if not piece:
                raise Closed(f"after {len(data)} of {size} bytes")
            data += piece
        return bytes(data)


class FakeNode:
    """A listening socket with a script for each connection, for what a real node would never do."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen(8)
        self.listener.settimeout(10)

    def serve(self, script: Callable[[Wire], None]) -> None:
        """Takes one connection and plays the script; the client may end it at any time."""
        sock, _ = self.listener.accept()
        with Wire(sock) as wire:
            try:
                script(wire)
            except (Closed, ConnectionError):
                return

    def close(self) -> None:
        self.listener.close()
