"""docs/wire.md, byte by byte: its examples are what wire_client.py builds, which speaks to the real node in
the other tests, and what the real client sends is built alike."""

from __future__ import annotations

import mmap
import re
import select
import socket
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool import STORED, Store, _native

from . import wire_client as w
from .store_bed import MIB, TOKEN, NodeProcess, until
from .wire_client import Row, Wire

PAGE = Path(__file__).parents[2] / "docs" / "wire.md"

NODE_NONCE, CLIENT_NONCE, LIFE = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 80))
EXAMPLE_TOKEN = b"secret"
LIMITS = w.Limits(1 << 30, 33558528, 8 << 20, 1 << 28, 1024, 4096, 8 << 20, 16384)
FOUND = w.DESCRIPTOR.pack(65536, 5, 7, 0x9A71BB4C, 3)
PROOFS = {
    role: w.mac(role, EXAMPLE_TOKEN, first, second, LIFE, b"default")
    for role, first, second in ((b"client", NODE_NONCE, CLIENT_NONCE), (b"node", CLIENT_NONCE, NODE_NONCE))
}


def answer(kind: int, body: bytes, request_id: int) -> bytes:
    return w.frame(kind, body, request_id=request_id, flags=w.ANSWER)


def one_way(kind: int, body: bytes) -> bytes:
    return w.frame(kind, body, flags=w.ONE_WAY)


EXAMPLES = {
    "ERROR": answer(w.ERROR, struct.pack("<H", 7) + w.text16(b"too large"), 9),
    "CHALLENGE": w.frame(w.CHALLENGE, w.challenge(NODE_NONCE, LIFE), versions=(1, 1)),
    "AUTH": w.frame(
        w.AUTH, w.auth(b"default", CLIENT_NONCE, PROOFS[b"client"]), request_id=1, versions=(1, 1)
    ),
    "WELCOME": answer(w.WELCOME, PROOFS[b"node"] + LIMITS.pack(), 1),
    "OPEN_SPACE": w.frame(w.OPEN_SPACE, w.open_space(b"default", b""), request_id=2),
    "OPEN_SPACE, answer": answer(w.OPEN_SPACE, struct.pack("<I", 0), 2),
    "LEASE": w.frame(w.LEASE, w.lease(4096, 65536), request_id=3),
    "LEASE, answer": answer(w.LEASE, struct.pack("<QQ", 65536, 65536) + w.text16(b""), 3),
    "RETURN": one_way(w.RETURN, w.give_back(65536)),
    "COMMIT": w.frame(w.COMMIT, w.commit(0, [Row(65536, 5, 0x9A71BB4C, b"key", b"up")]), request_id=4),
    "COMMIT with marks": w.frame(
        w.COMMIT,
        w.commit(0, [Row(65536, 5, 0x9A71BB4C, b"key", b"up", w.marks(b"page", 1000))], flags=w.MARKS),
        request_id=4,
    ),
    "COMMIT, answer": answer(w.COMMIT, struct.pack("<IB", 1, w.STORED), 4),
    "LOOKUP": w.frame(w.LOOKUP, w.lookup(0, [b"key", b"no"], flags=w.PIN), request_id=5),
    "LOOKUP, answer": answer(w.LOOKUP, struct.pack("<QII", 11, 1, 2) + FOUND + bytes(32), 5),
    "RELEASE": one_way(w.RELEASE, w.release(11)),
    "TOUCH": one_way(w.TOUCH, w.touch(2, 10, [3, 4])),
    "REMOVE": w.frame(w.REMOVE, w.remove(0, [b"key", b"no"]), request_id=6),
    "REMOVE, answer": answer(w.REMOVE, struct.pack("<IBB", 2, 1, 0), 6),
    "LIST": w.frame(w.LIST, w.list_objects(0, 0, 100, b"k"), request_id=7),
    "LIST, answer": answer(
        w.LIST, struct.pack("<II", 0, 1) + w.ENTRY.pack(5, 7, 0x9A71BB4C, 1) + w.text16(b"key"), 7
    ),
    "READ": w.frame(w.READ, w.read(0, [w.by_name(b"key", room=5), w.pinned(7, 3, room=5)]), request_id=9),
    "READ, answer": answer(w.READ, w.read_answer([(5, 5, 7, 0x9A71BB4C, 3), w.READ_MISS], b"hello"), 9),
    "PUT": w.frame(w.PUT, w.put(0, [(0x9A71BB4C, b"key", b"up", b"hello")]), request_id=10),
    "PUT, answer": answer(w.PUT, struct.pack("<IB", 1, w.STORED), 10),
    "DESCRIBE": w.frame(w.DESCRIBE, w.describe(0, [b"key", b"no"]), request_id=11),
    "DESCRIBE, answer": answer(
        w.DESCRIBE, struct.pack("<I", 2) + w.DESCRIPTION.pack(5, 7, 0x9A71BB4C, 1, 1, 2) + bytes(32), 11
    ),
    "RELAY": w.frame(w.RELAY, struct.pack("<IB3xQB", 375, 35, 3, 1), request_id=12),
    "STAT": w.frame(w.STAT, request_id=8),
    "STAT, answer": answer(w.STAT, struct.pack("<I", 1) + w.text16(b"objects") + struct.pack("<Q", 1), 8),
}


def examples_of_the_page() -> dict[str, bytes]:
    example = r"^Example, ([A-Z_]+(?:, answer| with marks)?)[^\n]*:\n\n```hex\n(.*?)^```"
    found = re.findall(example, PAGE.read_text(), re.M | re.S)
    return {name: bytes.fromhex(text) for name, text in found}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_the_page_is_what_is_sent(name: str) -> None:
    assert examples_of_the_page()[name].hex(" ") == EXAMPLES[name].hex(" ")


def test_the_page_has_no_other_examples_and_names_every_kind() -> None:
    assert set(examples_of_the_page()) == set(EXAMPLES)
    kinds = {
        name: int(kind)
        for page in PAGE.parent.glob("wire*.md")
        for name, kind in re.findall(r"^\| `([A-Z_]+)` \| (\d+) \|", page.read_text(), re.M)
    }
    header = (PAGE.parent.parent / "core" / "csrc" / "wire" / "frame.hpp").read_text()
    enum = re.findall(r"^    k([A-Za-z]+) = (\d+),", header, re.M)
    assert kinds == {re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper(): int(value) for name, value in enum}


def test_the_shared_index_lies_as_store_md_says(runtime_dir: Path) -> None:
    node = NodeProcess(runtime_dir / "n.sock")
    with Wire.dial(runtime_dir / "n.sock") as wire:
        incarnation = wire.receive().body[32:]
    with (
        Wire.open(runtime_dir / "n.sock", TOKEN) as wire,
        Store(str(runtime_dir / "n.sock"), token=TOKEN) as store,
    ):
        names = ["key", "n" * 72, "n" * 73]
        store.put(names, [b"12345", b"", b"678"])
        _, _, found = wire.lookup([name.encode() for name in names])
        with mmap.mmap(wire.descriptors[1], 0, prot=mmap.PROT_READ) as index:
            magic, slots, buckets, life = struct.unpack_from("<8sII16s", index)
            assert (magic, life) == (b"MPLINDX1", incarnation)
            assert buckets & (buckets - 1) == 0
            entries = (4096 + 4 * buckets + 4095) // 4096 * 4096
            for name, (offset, size, generation, crc, slot) in zip(names, found, strict=True):
                assert slot < slots
                key_hash = _native.key_hash("default", "default", b"", name.encode())
                row = struct.unpack_from("<Q16sQQIIIHH72s", index, entries + 128 * slot)
                assert row[:6] == (2 * generation, key_hash, offset, size, crc, 0)
                assert row[7:9] == (len(name) if len(name) <= 72 else 65535, 1)
                if len(name) <= 72:
                    assert row[9][: len(name)].decode() == name
                bucket = int.from_bytes(key_hash[:8], "little") & (buckets - 1)
                (link,) = struct.unpack_from("<I", index, 4096 + 4 * bucket)
                chain = []
                while link:
                    chain.append(link - 1)
                    (link,) = struct.unpack_from("<I", index, entries + 128 * (link - 1) + 48)
                assert slot in chain
            store.remove("key")
            (seq,) = struct.unpack_from("<Q", index, entries + 128 * found[0][4])
            assert seq % 2 == 1
    node.close()


class Relay:
    """Stands between a client and a node, keeps what the client says, and hands descriptors on."""

    def __init__(self, path: Path, node: Path) -> None:
        self.said = bytearray()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._node = node
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with client, Wire.dial(self._node).socket as node:
            sources = {each.fileno(): each for each in (client, node)}
            poll = select.poll()  # unlike select(), for any number of open files
            for number in sources:
                poll.register(number, select.POLLIN)
            while True:
                for number, _ in poll.poll(20_000):
                    source = sources[number]
                    data, descriptors, _, _ = socket.recv_fds(source, 65536, 4)
                    if not data:
                        return
                    if source is client:
                        self.said += data
                    socket.send_fds(node if source is client else client, [data], descriptors)
                    for descriptor in descriptors:
                        socket.close(descriptor)

    def frames(self) -> list[w.Frame]:
        frames, at = [], 0
        while at < len(self.said):
            received, size = w.header_of(bytes(self.said[at : at + w.HEADER.size]))
            at += w.HEADER.size
            frames.append(replace(received, body=bytes(self.said[at : at + size])))
            at += size
        return frames

    def close(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._listener.close()


def test_the_real_client_says_what_the_page_says(runtime_dir: Path) -> None:
    node = NodeProcess(runtime_dir / "n.sock")
    relay = Relay(runtime_dir / "relay.sock", runtime_dir / "n.sock")
    with Store(str(runtime_dir / "relay.sock"), token=TOKEN, namespace="ns", fingerprint=b"fp") as store:
        assert store.put("key", b"12345", parents="up") == STORED
        assert store.put("key", b"6789", replace=True) == STORED
        assert store.put("own", bytes(MIB), ack=False) == STORED
        assert store.get("key", bytearray(5)) == 4
        assert store.longest_prefix(["key", "no"], width=2).blocks == 0
        view = store.get("key")
        assert view == b"6789"
        assert len(store.list("k", limit=100)) == 1
        assert store.remove(["key", "no"]) == [True, False]
        del view
        store.stat()
    relay.close()
    until(lambda: node.metric("connections") == 0)
    assert node.metric("protocol_errors_total") == 0
    node.close()

    said: dict[int, list[w.Frame]] = {}
    for frame in relay.frames():
        said.setdefault(frame.kind, []).append(frame)
    assert set(said) == {w.AUTH, *range(w.OPEN_SPACE, w.STAT + 1)}
    one_way = {w.RETURN, w.RELEASE, w.TOUCH}
    for kind, frames in said.items():
        for frame in frames:
            assert frame.flags == (w.ONE_WAY if frame.request_id == 0 else 0)
            assert (frame.request_id == 0) == (kind in one_way) or kind == w.COMMIT
    assert said[w.AUTH][0].body[:9] == w.text16(b"default")
    assert len(said[w.AUTH][0].body) == 9 + 32 + 32
    assert said[w.OPEN_SPACE][0].body == w.open_space(b"ns", b"fp")
    least, want = struct.unpack("<QQ", said[w.LEASE][0].body)
    assert least <= want
    first, second, third = said[w.COMMIT]
    (offset,) = struct.unpack_from("<Q", first.body, 12)
    (crc,) = struct.unpack_from("<I", first.body, 28)
    assert first.body == w.commit(0, [Row(offset, 5, crc, b"key", b"up")], flags=w.SIZES)
    assert second.body[4] == w.REPLACE
    assert third.flags == w.ONE_WAY
    lookups = [frame.body for frame in said[w.LOOKUP]]
    assert w.lookup(0, [b"key", b"no"], flags=w.PIN | w.PREFIX, width=2) in lookups
    assert w.lookup(0, [b"key"], flags=w.PIN) in lookups
    assert all(len(frame.body) == 8 for frame in said[w.RELEASE] + said[w.RETURN])
    assert said[w.LIST][0].body == w.list_objects(0, 0, 100, b"k")
    assert said[w.REMOVE][0].body == w.remove(0, [b"key", b"no"])
    assert said[w.STAT][0].body == b""
    objects, size, n = struct.unpack_from("<QQI", said[w.TOUCH][0].body)
    assert objects >= 1
    assert len(said[w.TOUCH][0].body) == 20 + 4 * n
    assert (
        sum(struct.unpack_from("<QQ", frame.body)[1] for frame in said[w.TOUCH]) == 8
    )  # 4 copied, 4 as a view
    assert size >= 4
