"""What one server of a node gives to another: nothing changes, and a description that lies is refused.

Both servers are of this process, so that their tables can be recounted.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool import STORED, Presence, Store, _native
from moonpool.core.errors import Error

from . import wire_client as w
from .store_bed import MIB, TOKEN, assert_serves, until
from .take_over_bed import PATIENCE_S, START_S, given_copies, make_server, replaced

KIB = 1 << 10
HEAD = struct.Struct("<IIQII")  # magic, version, bytes, CRC-32C, 0


@pytest.fixture
def path(runtime: Path) -> Path:
    return runtime / "node-t.sock"


@pytest.fixture
def server(path: Path) -> Iterator[_native.Server]:
    server = make_server(path)
    server.start()
    yield server
    server.stop()


def crc32c(data: bytes) -> int:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def memory_file(content: bytes) -> int:
    fd = os.memfd_create("description")
    os.write(fd, content)
    return fd


def with_head(body: bytes, version: int = 1) -> bytes:
    return HEAD.pack(0x4B54504D, version, len(body), crc32c(body), 0) + body


# ---- nothing changes


def test_each_object_is_what_it_was(server: _native.Server, path: Path, rng: random.Random) -> None:
    names = [f"n{i}" for i in range(500)] + ["long " + "x" * 500, "y" * 1024]
    values = [rng.randbytes(rng.choice((0, 1, 64, 4096, 9000))) for _ in names]
    with Store(str(path), token=TOKEN) as store, Store(str(path), token=TOKEN, namespace="other") as other:
        assert set(store.put(names, values)) == {STORED}
        other.put(names[:50], values[50:100])
        store.remove(names[100:200])
        store.put(names[50:100], values[:50], replace=True)
        wanted = values[:50] + values[:50] + [None] * 100 + values[200:]
        before = store.stat(names)
        counted = {name: server.metrics()[name] for name in ("objects", "object_bytes", "spaces")}
        new = replaced(server, path)
        try:
            assert new.check_integrity()
            assert {name: new.metrics()[name] for name in counted} == counted
            found = [None if each is None else bytes(each) for each in store.get(names, verify=True)]
            assert found == wanted
            assert [bytes(each or b"") for each in other.get(names[:50])] == values[50:100]
            assert store.stat(names) == before
            # The numbers that objects have go on: a new one never looks like an old one.
            assert store.put(names[100:200], values[100:200]) == [STORED] * 100
            assert new.check_integrity()
        finally:
            new.stop()


def test_the_order_of_eviction_stays(server: _native.Server, path: Path) -> None:
    with Store(str(path), token=TOKEN) as store:
        for i in range(10):
            store.put(f"old-{i}", bytes(MIB))
        store.put("parent", b"p")
        store.put("child", b"c", parents="parent")
        store.put(["g1", "g2"], [bytes(KIB)] * 2, groups=["g", "g"])
        store.put("soft", bytes(KIB), soft_pin_s=3600)
        for i in (3, 5):
            assert store.get(f"old-{i}") is not None  # used last of all
        until(lambda: server.metrics()["pins"] == 0)
        new = replaced(server, path)
        try:
            assert new.check_integrity()
            while all(store.exists([f"old-{i}" for i in (0, 1)])):
                assert store.put(os.urandom(8), bytes(MIB)) == STORED
                assert new.check_integrity()
            assert store.exists(["old-3", "old-5", "soft"]) == [Presence.HIT] * 3
            # Until all that is ordinary has gone; a group goes as a whole, and a chain from its end.
            while store.exists("old-5") is Presence.HIT:
                assert store.put(os.urandom(8), bytes(MIB)) == STORED
                gone = [each is Presence.MISS for each in store.exists(["g1", "g2"])]
                assert gone[0] == gone[1]
                assert new.check_integrity()
            assert store.exists("soft") is Presence.HIT
        finally:
            new.stop()


def test_what_a_connection_holds_stays_its_own(server: _native.Server, path: Path) -> None:
    with w.Wire.open(path, TOKEN) as wire, w.Wire.open(path, TOKEN) as idle:
        offset, size, why = wire.lease(MIB, MIB)
        assert not why
        wire.commit([w.Row(offset, 100, crc32c(bytes(100)), b"before")])
        found = wire.lookup([b"before"], flags=w.PIN)
        pin = found[0]
        leased = server.metrics()["leased_bytes"]
        # A frame that is half sent: the other process gets its beginning.
        frame = w.frame(w.STAT, b"", request_id=77)
        idle.socket.sendall(frame[:10])
        new = replaced(server, path)
        try:
            assert new.metrics()["leased_bytes"] == leased
            assert new.metrics()["pins"] == 1
            assert wire.commit([w.Row(offset + 4096, 50, crc32c(bytes(50)), b"after")]) == [0]
            idle.socket.sendall(frame[10:])
            assert idle.receive().request_id == 77
            with Store(str(path), token=TOKEN) as store:
                assert store.exists(["before", "after"]) == [Presence.HIT] * 2
            assert new.check_integrity()
            wire.send(w.RELEASE, w.release(pin), flags=w.ONE_WAY)
            wire.send(w.RETURN, w.give_back(offset), flags=w.ONE_WAY)
            until(lambda: new.metrics()["leased_bytes"] == 0)
            until(lambda: new.metrics()["pins"] == 0)
            assert size >= MIB
            assert new.check_integrity()
        finally:
            new.stop()


def test_what_is_taken_back_is_as_before(server: _native.Server, path: Path, rng: random.Random) -> None:
    values = {f"k{i}": rng.randbytes(1000) for i in range(100)}
    with Store(str(path), token=TOKEN) as store:
        store.put(list(values), list(values.values()))
        for _ in range(3):
            description, numbers = given_copies(server)
            for number in (description, *numbers):
                os.close(number)
            server.take_back()
            # The node serves, and its index answers again.
            assert_serves(path)
            assert [bytes(each or b"") for each in store.get(list(values))] == list(values.values())
            assert server.check_integrity()


def test_an_ssd_keeps_its_content(path: Path, tmp_path: Path, rng: random.Random) -> None:
    ssd = [(str(tmp_path), 256 * MIB)]
    # All is written at once: what is in memory only goes when something else needs its place.
    options: dict[str, Any] = {"ssd": ssd, "ssd_clean_share": 1.0}
    server = make_server(path, **options)
    server.start()
    values = {f"k{i}": rng.randbytes(MIB // 2) for i in range(60)}  # twice the memory
    with Store(str(path), token=TOKEN, timeout_s=30.0) as store:
        for key, value in values.items():
            assert store.put(key, value) == STORED
            until(lambda: server.metrics()["ssd_dirty_objects"] == 0, PATIENCE_S)
            until(lambda: server.metrics()["ssd_writing"] == 0, PATIENCE_S)
        there = [key for key in values if store.exists(key) is Presence.HIT]
        assert len(there) > 40
        removed = there[:5]
        store.remove(removed)
        for _ in range(2):
            server = replaced(server, path, **options)
            assert server.check_integrity()
            assert set(store.exists(removed)) == {Presence.MISS}
            for key in there[5:]:
                found = store.get(key, verify=True)
                assert found is not None, key
                assert bytes(found) == values[key]
                del found
        # A successor that fails leaves the directory to the one before.
        description, numbers = given_copies(server)
        for number in (description, *numbers):
            os.close(number)
        server.take_back()
        for key in there[5:]:
            assert store.get(key) is not None
        assert set(store.exists(removed)) == {Presence.MISS}
        assert server.check_integrity()
    server.stop()


def test_tenants_keep_the_memory_that_they_have(path: Path, rng: random.Random) -> None:
    """One has borrowed what is above the other's minimum; afterwards it is taken back."""
    tenants = [("a", 16 * MIB), ("b", 16 * MIB)]
    limits = [(name, 4 * MIB, 28 * MIB, None, None, None) for name, _ in tenants]
    server = make_server(path, tenants=tenants, limits=limits)
    server.start()
    stores = {name: Store(str(path), tenant=name, token=TOKEN) for name, _ in tenants}
    with stores["a"] as a, stores["b"] as b:
        values = {f"k{i}": rng.randbytes(MIB) for i in range(20)}
        for key, value in values.items():
            assert a.put(key, value) == STORED
        borrowed = server.metrics()['tenant_dram_bytes{tenant="a"}']
        assert borrowed > 16 * MIB
        there = [key for key in values if a.exists(key) is Presence.HIT]
        assert len(there) > 16
        server = replaced(server, path, tenants=tenants, limits=limits)
        assert server.check_integrity()
        assert server.metrics()['tenant_dram_bytes{tenant="a"}'] == borrowed
        for key in there:
            found = a.get(key, verify=True)
            assert found is not None
            assert bytes(found) == values[key]
        del found
        for i in range(20):
            assert b.put(f"b{i}", rng.randbytes(MIB)) == STORED
            assert server.check_integrity()
        assert server.metrics()['tenant_dram_bytes{tenant="a"}'] < borrowed
        for key in there:
            found = a.get(key)
            assert found is None or bytes(found) == values[key]
        del found
    server.stop()


Limits = dict[str, tuple[int | None, int | None]]


@pytest.mark.parametrize(
    ("before", "after", "a_has", "b_gets"),
    [
        ({}, {"a": (4, 8), "b": (4, 24)}, 8, 16),  # b's file keeps its size
        ({"a": (4, None), "b": (4, 28)}, {"a": (4, 8), "b": (4, 28)}, 8, 24),
        ({"a": (4, 28), "b": (4, 28)}, {"a": (4, 8), "b": (4, 40)}, 8, 24),
        ({"a": (4, 8), "b": (4, 24)}, {"a": (4, None), "b": (4, 24)}, 8, 24),
        ({"a": (4, 8), "b": (4, 24)}, {}, 8, 16),
    ],
    ids=["first", "lowered", "of a larger file", "raised", "gone"],
)
def test_limits_that_changed_come_into_force(
    path: Path, rng: random.Random, before: Limits, after: Limits, a_has: int, b_gets: int
) -> None:
    """In MiB: (dram_min, dram_max) of two tenants with 16 each, and what they have afterwards."""
    tenants = [("a", 16 * MIB), ("b", 16 * MIB)]

    def rows(limits: Limits) -> list[tuple[str, int | None, int | None, None, None, None]]:
        sizes = {name: [None if each is None else each * MIB for each in row] for name, row in limits.items()}
        return [(name, *row, None, None, None) for name, row in sizes.items()]

    server = make_server(path, tenants=tenants, limits=rows(before))
    server.start()
    stores = {name: Store(str(path), tenant=name, token=TOKEN) for name, _ in tenants}

    def has(name: str) -> int:
        return server.metrics()[f'tenant_dram_bytes{{tenant="{name}"}}'] // MIB

    with stores["a"] as a, stores["b"] as b:
        values = {f"k{i}": rng.randbytes(MIB) for i in range(7)}
        assert {a.put(key, value) for key, value in values.items()} == {STORED}
        until(lambda: server.memory()[0] == server.memory()[1], START_S)
        server = replaced(server, path, tenants=tenants, limits=rows(after))
        until(lambda: has("a") == a_has, START_S)
        for i in range(40):
            assert b.put(f"b{i}", rng.randbytes(MIB)) == STORED
        assert has("b") == b_gets
        for key, value in values.items():
            found = a.get(key, verify=True)
            assert found is None or bytes(found) == value
        del found
        assert [kind for _, kind, *_ in server.take_notes() if kind == "memory_short"] == []
        assert server.check_integrity()
    server.stop()


# ---- a description that lies


def refused(path: Path, content: bytes, numbers: list[int], match: str, mib: int = 16) -> None:
    with pytest.raises(Error, match=match):
        make_server(path, mib, (memory_file(content), [os.dup(number) for number in numbers]))


def test_a_description_that_lies_is_refused_and_the_node_serves_on(
    server: _native.Server, path: Path, rng: random.Random
) -> None:
    with Store(str(path), token=TOKEN) as store:
        view = store.put("held", b"held") and store.get("held")
        store.put([f"k{i}" for i in range(20)], [rng.randbytes(100) for _ in range(20)])
        description, numbers = given_copies(server)
        whole = os.pread(description, 1 << 20, 0)
        body = whole[HEAD.size :]
        assert with_head(body) == whole
        refused(path, b"", numbers, "it is none")
        refused(path, whole[: HEAD.size - 1], numbers, "it is none")
        refused(path, b"x" + whole[1:], numbers, "it is none")
        refused(path, with_head(body, version=2), numbers, "in version 2, and this release reads version 1")
        refused(path, whole[:-1], numbers, "cut off")
        refused(path, whole + b"x", numbers, "cut off")
        refused(path, whole[:-1] + bytes([whole[-1] ^ 1]), numbers, "checksum")
        for cut in (0, 1, 20, len(body) // 2, len(body) - 1):
            refused(path, with_head(body[:cut]), numbers, "not sound")
        refused(path, with_head(body + b"x"), numbers, "not sound")
        refused(path, whole, numbers[:-1], "its descriptors")
        refused(path, whole, [*numbers, numbers[0]], "its descriptors")
        # Another file than an arena of that size.
        with open(os.devnull, "rb") as nothing:
            refused(path, whole, [nothing.fileno(), *numbers[1:]], "is not what it describes")
        refused(path, whole, numbers, "another size", mib=8)
        server.take_back()
        assert view is not None
        assert bytes(view) == b"held"
        assert_serves(path)
        assert server.check_integrity()
        for number in (description, *numbers):
            os.close(number)


def test_whatever_a_description_says_it_is_refused_or_sound(
    server: _native.Server, path: Path, rng: random.Random
) -> None:
    """Bytes and lengths at random, with a checksum that fits."""
    with Store(str(path), token=TOKEN) as store:
        store.put([f"k{i}" for i in range(8)], [rng.randbytes(100) for _ in range(8)])
        store.put("c", b"c", parents="k1")
        view = store.get("k1")
        description, numbers = given_copies(server)
        body = os.pread(description, 1 << 20, 0)[HEAD.size :]
        outcomes = set()
        for _ in range(400):
            changed = bytearray(body)
            for _ in range(rng.choice((1, 1, 2, 4))):
                at = rng.randrange(len(changed))
                width = rng.choice((1, 4, 8))
                value = rng.choice((0, 1, 0xFF, rng.getrandbits(8 * width), (1 << 8 * width) - 1))
                changed[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
            copies = [os.dup(number) for number in numbers]
            try:
                other = make_server(path, 16, (memory_file(with_head(bytes(changed))), copies))
            except Error:
                outcomes.add("refused")
                continue
            other.prepare()
            assert other.check_integrity()
            outcomes.add("taken")
            del other
        assert outcomes == {"refused", "taken"}
        server.take_back()
        assert view is not None
        assert_serves(path)
        for number in (description, *numbers):
            os.close(number)
