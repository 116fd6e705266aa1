"""A client that knows the token and shakes hands rightly, then lies: it harms itself only. The node's books
stay sound, its memory bounded, and others are served."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool import STORED, Store

from . import wire_client as w
from .store_bed import MIB, PROTOCOL, TOKEN, TOO_LARGE, NodeProcess, assert_serves, until
from .wire_client import Row, Wire


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[NodeProcess]:
    # Without the scrub: the checksums of these clients are lies as well.
    node = NodeProcess(runtime_dir / "node-t.sock", scrub_bytes_per_s=0)
    yield node
    assert_serves(node.socket_path)
    until(lambda: node.metric("connections") == 0)
    metrics = node.metrics()
    assert metrics["integrity"]
    assert (metrics["leased_bytes"], metrics["pins"], metrics["objects_pinned"]) == (0, 0, 0)
    assert metrics["arena_free_bytes"] + metrics["object_bytes"] == metrics["arena_ready_bytes"]
    node.close()


@pytest.fixture
def wire(node: NodeProcess) -> Iterator[Wire]:
    with Wire.open(node.socket_path, TOKEN) as wire:
        yield wire


def commit_is_refused(wire: Wire, *rows: Row) -> None:
    wire.send(w.COMMIT, w.commit(wire.space, rows), request_id=9)
    code, text = wire.ended()
    assert code == PROTOCOL
    assert "commit" in text.lower()


def test_the_flag_sizes_tells_what_may_be_a_manifest(wire: Wire, node: NodeProcess) -> None:
    offset, _, _ = wire.lease(100, 5000)
    rows = [Row(offset, 96, 0, b"a"), Row(offset + 128, 97, 0, b"b")]
    assert wire.commit(rows, flags=w.SIZES) == [w.STORED] * 2
    again = [Row(offset + 1024, 10, 0, b"a"), Row(offset + 2048, 96, 0, b"b")]
    assert wire.commit(again, flags=w.SIZES) == [w.EXISTS_MANIFEST, w.EXISTS]
    assert wire.commit(again) == [w.EXISTS] * 2  # a client of the release before


def test_the_good_case_first(wire: Wire, node: NodeProcess) -> None:
    offset, size, why = wire.lease(100, 5000)
    assert (size % 4096, why) == (0, "")
    assert size >= 5000
    rows = [Row(offset, 100, 0, b"a"), Row(offset + 128, 50, 0, b"b", b"a"), Row(0, 0, 0, b"empty")]
    assert wire.commit(rows) == [w.STORED] * 3
    assert wire.commit([Row(offset + 256, 1, 0, b"a")]) == [w.EXISTS]
    assert wire.commit([Row(offset + 256, 1, 0, b"a")], flags=w.REPLACE) == [w.STORED]
    pin, hits, found = wire.lookup([b"b", b"absent", b"a"], flags=w.PIN)
    assert (hits, [row[:2] for row in found]) == (2, [(offset + 128, 50), (0, 0), (offset + 256, 1)])
    assert wire.stat()["objects_pinned"] == 2
    wire.send(w.RELEASE, w.release(pin), flags=w.ONE_WAY)
    wire.send(w.RELEASE, w.release(pin), flags=w.ONE_WAY)  # twice is harmless
    wire.send(w.TOUCH, w.touch(1, 50, [0, 77, 0xFFFFFFFF]), flags=w.ONE_WAY)  # slots that are not in use too
    assert wire.stat()["objects_pinned"] == 0
    assert node.metric("leased_bytes") == size
    wire.send(w.RETURN, w.give_back(offset), flags=w.ONE_WAY)
    assert wire.stat()["leased_bytes"] == 0
    removed = wire.ask(w.REMOVE, w.remove(wire.space, [b"a", b"a", b"b"])).body
    assert removed == struct.pack("<IBBB", 3, 1, 0, 1)


@pytest.mark.parametrize(
    ("begin", "size"),
    [
        (-4096, 4096),
        (-1, 2),
        (4095, 2),
        (8192, 1),
        (0, 1 << 32),
        (0, (1 << 64) - 1),
        (1 << 63, 1 << 63),
        (-64, 64),
    ],
)
def test_memory_that_was_not_leased(wire: Wire, begin: int, size: int) -> None:
    other = Wire.open(wire.socket.getpeername(), TOKEN)
    other.lease(1, 4096)  # lies before it
    offset, granted, _ = wire.lease(1, 4096)
    assert granted == 4096
    commit_is_refused(wire, Row((offset + begin) % (1 << 64), size, 0, b"k"))
    other.close()


def test_memory_of_another_client(wire: Wire, node: NodeProcess) -> None:
    with Wire.open(node.socket_path, TOKEN) as other:
        offset, _, _ = other.lease(1, 4096)
        commit_is_refused(wire, Row(offset, 64, 0, b"k"))
        assert other.commit([Row(offset, 64, 0, b"k")]) == [w.STORED]


@pytest.mark.parametrize(("second", "size"), [(0, 64), (0, 32), (32, 64), (-32, 64), (63, 1)])
def test_the_same_memory_twice(wire: Wire, second: int, size: int) -> None:
    offset, _, _ = wire.lease(1, 4096)
    assert wire.commit([Row(offset + 64, 64, 0, b"first")]) == [w.STORED]
    commit_is_refused(wire, Row(offset + 64 + second, size, 0, b"second"))


def test_the_same_memory_twice_in_one_frame(wire: Wire) -> None:
    offset, _, _ = wire.lease(1, 4096)
    commit_is_refused(wire, Row(offset, 64, 0, b"first"), Row(offset, 64, 0, b"second"))


def test_memory_that_was_given_back(wire: Wire) -> None:
    offset, _, _ = wire.lease(1, 4096)
    wire.send(w.RETURN, w.give_back(offset), flags=w.ONE_WAY)
    commit_is_refused(wire, Row(offset, 64, 0, b"k"))


def test_a_lease_that_it_does_not_hold_is_not_taken_back(wire: Wire, node: NodeProcess) -> None:
    with Wire.open(node.socket_path, TOKEN) as other:
        offset, size, _ = other.lease(1, 4096)
        wire.send(w.RETURN, w.give_back(offset), flags=w.ONE_WAY)
        assert wire.ended()[0] == PROTOCOL
        assert other.stat()["leased_bytes"] == size
        other.send(w.RETURN, w.give_back(offset + 64), flags=w.ONE_WAY)
        assert other.ended()[0] == PROTOCOL


def test_unreasonable_leases(wire: Wire) -> None:
    for least in (16 * MIB + 1, 1 << 63, (1 << 64) - 1):
        offset, size, why = wire.lease(least, least)
        assert (offset, size) == (0, 0)
        assert "object limit" in why
    for least, want in ((0, 0), (5, 1), (1, (1 << 64) - 1)):
        offset, size, why = wire.lease(least, want)
        assert why == ""
        assert 0 < size <= 16 * MIB + 4 * MIB


def test_leases_have_a_maximum(wire: Wire, node: NodeProcess) -> None:
    granted = [wire.lease(1, 1) for _ in range(257)]
    assert all(size == 4096 for _, size, _ in granted[:256])
    assert "already holds 256 leases" in granted[256][2]
    assert len({offset for offset, _, _ in granted[:256]}) == 256
    assert_serves(node.socket_path)


def test_pins_have_a_maximum_of_objects(wire: Wire, node: NodeProcess) -> None:
    assert wire.commit([Row(0, 0, 0, b"k")]) == [w.STORED]
    before = node.rss_bytes()
    held = 0
    while (answer := wire.ask(w.LOOKUP, w.lookup(wire.space, [b"k"] * 16384, flags=w.PIN))).kind == w.LOOKUP:
        held += 16384
        assert held <= 1 << 20
    assert held == 1 << 20
    code, text = answer.error
    assert code == TOO_LARGE
    assert "1048576 objects" in text
    assert node.rss_bytes() - before < 64 * MIB
    assert_serves(node.socket_path)


def test_pins_have_a_maximum(wire: Wire, node: NodeProcess) -> None:
    assert wire.commit([Row(0, 0, 0, b"k")]) == [w.STORED]
    one = w.frame(w.LOOKUP, w.lookup(wire.space, [b"k"], flags=w.PIN))
    before = node.rss_bytes()
    answers = []
    for _ in range(65536 // 256):
        wire.socket.sendall(one * 256)
        answers = [wire.receive() for _ in range(256)]
        assert all(answer.kind == w.LOOKUP for answer in answers)
    assert wire.ask(w.LOOKUP, w.lookup(wire.space, [b"k"], flags=w.PIN)).error[0] == TOO_LARGE
    (last,) = struct.unpack_from("<Q", answers[-1].body)
    wire.send(w.RELEASE, w.release(last), flags=w.ONE_WAY)
    assert wire.ask(w.LOOKUP, w.lookup(wire.space, [b"k"], flags=w.PIN)).kind == w.LOOKUP
    assert node.rss_bytes() - before < 32 * MIB


def test_spaces_have_a_maximum(wire: Wire, node: NodeProcess) -> None:
    before = node.rss_bytes()
    wires = [wire]
    for place in range(2):  # of which each holds as many as it may
        for i in range(1024):
            answer = wires[-1].ask(w.OPEN_SPACE, w.open_space(b"%d %d" % (place, i), b""))
        assert answer.error == (TOO_LARGE, "this connection already has 1024 spaces, the limit")
        wires.append(Wire.open(node.socket_path, TOKEN))
    # It has its own, and the one it began with; others come and go by the ten thousand.
    assert node.metric("spaces") == 2 * 1023 + 1
    for _ in range(20):
        with Wire.open(node.socket_path, TOKEN) as other:
            names = [os.urandom(250).hex().encode() for _ in range(1000)]
            batch = b"".join(w.frame(w.OPEN_SPACE, w.open_space(name, b"")) for name in names)
            other.socket.sendall(batch)
            assert {other.receive().kind for _ in range(1000)} == {w.OPEN_SPACE}
    assert node.rss_bytes() - before < 64 * MIB
    for each in wires:
        each.close()
    until(lambda: node.metric("spaces") == 0)  # with the last that used them
    with Wire.open(node.socket_path, TOKEN) as other:
        assert other.ask(w.OPEN_SPACE, w.open_space(b"new", b"")).kind == w.OPEN_SPACE


@pytest.mark.parametrize(
    "names", [(b"n" * 60_000, b""), (b"n", b"f" * 60_000)], ids=["namespace", "fingerprint"]
)
def test_the_names_of_a_space_have_a_maximum(
    wire: Wire, node: NodeProcess, names: tuple[bytes, bytes]
) -> None:
    _, text = wire.ask(w.OPEN_SPACE, w.open_space(*names)).error
    assert "node.key_bytes_max" in text
    assert wire.stat()["spaces"] == 1


def test_a_space_of_another_connection_is_none_of_this_one(wire: Wire, node: NodeProcess) -> None:
    with Wire.open(node.socket_path, TOKEN) as other:
        answer = other.ask(w.OPEN_SPACE, w.open_space(b"theirs", b""))
        space = int.from_bytes(answer.body, "little")
        assert space != wire.space
        wire.send(w.LOOKUP, w.lookup(space, [b"k"]), request_id=3)
        assert wire.ended()[0] == PROTOCOL


def test_a_space_that_was_never_opened(node: NodeProcess) -> None:
    for kind, body in (
        (w.COMMIT, w.commit(77, [])),
        (w.LOOKUP, w.lookup(77, [])),
        (w.REMOVE, w.remove(77, [])),
        (w.LIST, w.list_objects(77, 0, 1, b"")),
    ):
        with Wire.open(node.socket_path, TOKEN) as wire:
            wire.send(kind, body, request_id=3)
            assert wire.ended()[0] == PROTOCOL


def test_counts_over_the_limit(node: NodeProcess) -> None:
    head = struct.pack("<IBBHI", 0, 0, 0, 1, 16385)
    for kind, body in (
        (w.COMMIT, head),
        (w.LOOKUP, head),
        (w.LOOKUP, struct.pack("<IBBHI", 0, 0, 0, 1, 0xFFFFFFFF)),
        (w.REMOVE, struct.pack("<II", 0, 16385)),
        (w.REMOVE, w.remove(0, [b"a"], [1, 2])),
        (w.REMOVE, w.remove(0, [b"a"]) + b"\1\2\3"),
        (w.TOUCH, struct.pack("<QQI", 0, 0, 0xFFFFFFFF)),
        (w.COMMIT, w.commit(0, [Row(0, 0, 0, b"k" * 1025)])),
        (w.COMMIT, w.commit(0, [Row(0, 0, 0, b"")])),
        (w.LOOKUP, w.lookup(0, [b"k" * 1025])),
    ):
        with Wire.open(node.socket_path, TOKEN) as wire:
            wire.send(kind, body, request_id=3)
            assert wire.ended()[0] == PROTOCOL


def test_a_flood_of_questions_whose_answers_are_never_read(wire: Wire, node: NodeProcess) -> None:
    """The node stops reading once 1 MiB of answers waits: the flood stands in the sender's own socket."""
    names = [b"%d" % i for i in range(16384)]
    assert wire.commit([Row(0, 0, 0, name) for name in names]) == [w.STORED] * 16384
    question = w.frame(w.LOOKUP, w.lookup(wire.space, names))
    before = node.rss_bytes()
    sent = 0
    wire.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):  # noqa: PT012
        while True:
            assert sent < 200 << 20
            wire.socket.sendall(question)
            sent += len(question)
    with Store(str(node.socket_path), token=TOKEN) as store:
        for i in range(100):
            assert store.put(f"other{i}", b"x") == STORED
        assert all(store.exists([f"other{i}" for i in range(100)]))
    grown = node.rss_bytes() - before
    print(f"stopped after {sent / MIB:.2f} MiB of questions; the node grew by {grown / MIB:.2f} MiB")
    assert grown < 16 * MIB


def test_pipelined_questions_are_all_answered_in_order(wire: Wire, node: NodeProcess) -> None:
    """Among them more answers than the backlog holds: reading goes on whenever there is room again."""
    names = [b"%d" % i for i in range(16384)]
    assert wire.commit([Row(0, 0, 0, name) for name in names]) == [w.STORED] * 16384
    body = w.lookup(wire.space, names)
    n = 60
    sender = threading.Thread(
        target=lambda: [wire.send(w.LOOKUP, body, request_id=i) for i in range(1, n + 1)]
    )
    sender.start()
    for i in range(1, n + 1):
        answer = wire.receive()
        assert (answer.kind, answer.request_id, len(answer.body)) == (w.LOOKUP, i, 16 + 32 * 16384)
    sender.join()


def test_a_flood_of_one_way_frames_does_not_starve_others(wire: Wire, node: NodeProcess) -> None:
    flood = w.frame(w.RELEASE, w.release(1), flags=w.ONE_WAY) * 2000
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            wire.socket.sendall(flood)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with Store(str(node.socket_path), token=TOKEN, timeout_s=2) as store:
            for i in range(200):
                assert store.put(f"k{i}", b"x") == STORED
    finally:
        stop.set()
        sender.join()


def test_objects_smaller_than_the_alignment_fill_a_lease(wire: Wire, node: NodeProcess) -> None:
    """One byte each, placed backwards: no quadratic cost, and every byte comes back."""
    offset, _, _ = wire.lease(16384 * 2, 16384 * 2)
    before = node.rss_bytes()
    rows = [Row(offset + 2 * i, 1, 0, b"%d" % i) for i in reversed(range(16384))]
    assert wire.commit(rows) == [w.STORED] * 16384
    assert node.rss_bytes() - before < 16 * MIB
    wire.send(w.RETURN, w.give_back(offset), flags=w.ONE_WAY)
    wire.ask(w.REMOVE, w.remove(wire.space, [row.name for row in rows]))
    metrics = node.metrics()
    assert metrics["object_bytes"] == 0
    assert metrics["arena_free_bytes"] == metrics["arena_ready_bytes"]


def test_a_client_that_ends_in_mid_put_leaves_nothing(wire: Wire, node: NodeProcess) -> None:
    offset, size, _ = wire.lease(16 * MIB, 16 * MIB)
    assert wire.commit([Row(offset, 64, 0, b"whole")]) == [w.STORED]
    body = w.commit(wire.space, [Row(offset + 64, 64, 0, b"half")])
    wire.socket.sendall(w.frame(w.COMMIT, body)[:-1])
    assert node.metric("leased_bytes") == size
    wire.close()
    until(lambda: node.metric("leased_bytes") == 0)
    with Store(str(node.socket_path), token=TOKEN) as store:
        assert store.put("half", b"free at once") == STORED
        assert store.get("half") == b"free at once"
        assert node.metric("objects") == 2  # what was committed before is an object like any other
