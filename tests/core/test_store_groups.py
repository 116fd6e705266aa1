"""Groups and soft pins of a put: what a node evicts together, and what last; over memory and over TCP."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool import STORED, AsyncStore, Copy, Store
from moonpool.core.errors import InvalidArgument

from . import wire_client as w
from .pool_bed import Pool, pool
from .stat_bed import NAMES, serve
from .store_bed import MIB, TOKEN, NodeProcess, until
from .wire_client import Row, Wire

__all__ = ["pool"]
SIZE = MIB // 16  # less than a slab: larger pieces are made where that costs the fewest bytes
ROUNDS = 600  # over two arenas


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(embedded="16MiB") as store:
        yield store
        assert store._server is not None
        assert store._server.check_integrity()


def here(store: Store, *keys: str) -> list[bool]:
    return [one is not None for one in store.stat(list(keys))]


def the_copy(store: Store, key: str) -> Copy:
    one = store.stat(key)
    assert one is not None
    return one.copies[0]


def test_a_group_goes_together(store: Store) -> None:
    store.put("a", bytes(SIZE), groups="page")
    store.put(["x", "b"], [bytes(SIZE)] * 2, groups=[None, "page"])
    assert (the_copy(store, "a").grouped, the_copy(store, "x").grouped) == (True, False)
    seen = []
    for i in range(ROUNDS):
        store.put(f"fill{i}", bytes(SIZE))
        seen.append(here(store, "a", "b"))
        if not any(seen[-1]):
            break
    assert seen[0] == [True, True]
    assert seen[-1] == [False, False]
    assert [True, False] not in seen
    assert [False, True] not in seen


def test_a_pin_and_a_child_keep_the_whole_group(store: Store) -> None:
    store.put(["a", "b"], [bytes(SIZE)] * 2, groups=["page", "page"])
    _, pin = store.exists(["a"], pin=True)
    for i in range(ROUNDS):
        store.put(f"fill{i}", bytes(SIZE))
    assert here(store, "a", "b", "fill0") == [True, True, False]
    assert pin is not None
    pin.release()
    store.put("child", b"", parents="b")
    view = store.get("child")
    for i in range(ROUNDS):
        store.put(f"more{i}", bytes(SIZE))
    assert here(store, "a", "b") == [True, True]
    del view
    for i in range(ROUNDS):
        store.put(f"last{i}", bytes(SIZE))
    assert here(store, "a", "b", "child") == [False] * 3


def test_a_removal_is_about_its_keys_alone(store: Store) -> None:
    store.put(["a", "b", "c"], [b"1", b"2", b"3"], groups=["page"] * 3)
    assert store.remove("a") is True
    assert store.put("b", b"new", replace=True) == STORED  # it is in no group now
    assert here(store, "a", "b", "c") == [False, True, True]
    assert (the_copy(store, "b").grouped, the_copy(store, "c").grouped) == (False, True)
    assert store.put("a", b"1", groups="page") == STORED  # the group is whole again
    assert the_copy(store, "a").grouped


def test_soft_pins_go_last(store: Store) -> None:
    store.put("soft", bytes(SIZE), soft_pin_s=3600)
    store.put("plain", bytes(SIZE))
    for i in range(ROUNDS):
        store.put(f"fill{i}", bytes(SIZE))
    assert here(store, "soft", "plain") == [True, False]
    assert the_copy(store, "soft").soft_pinned
    # But they keep nobody else out.
    for i in range(ROUNDS):
        assert store.put(f"s{i}", bytes(SIZE), soft_pin_s=3600) == STORED
    assert here(store, "soft") == [False]


def test_a_soft_pin_ends_without_use_and_begins_with_it(store: Store) -> None:
    store.put("k", bytes(SIZE), soft_pin_s=1.0)
    assert the_copy(store, "k").soft_pinned
    until(lambda: not the_copy(store, "k").soft_pinned)  # a look is no use
    assert store.get("k") is not None
    assert the_copy(store, "k").soft_pinned
    until(lambda: not the_copy(store, "k").soft_pinned)
    for i in range(ROUNDS):
        store.put(f"fill{i}", bytes(SIZE))
    assert here(store, "k") == [False]


def test_a_group_with_a_soft_pin_goes_last_as_a_whole(store: Store) -> None:
    store.put("a", bytes(SIZE), groups="page")
    store.put("b", bytes(SIZE), groups="page", soft_pin_s=3600)
    for i in range(ROUNDS):
        store.put(f"fill{i}", bytes(SIZE))
    assert here(store, "a", "b") == [True, True]


def test_over_tcp_and_to_copies(pool: Pool) -> None:
    pool.node("a"), pool.node("b")
    a = pool.store("a")
    a.put(["x", "y"], [b"1", b"2"], node="b", groups=["page", "page"], soft_pin_s=3600)
    a.put(["p", "q"], [b"1", b"2"], groups=["page", None], replicas=2)
    with Store(f"tcp://{pool.nodes['b'].addresses[0]}", token=TOKEN) as remote:
        remote.put("z", b"3", groups="page")
    pool.told()
    for key, grouped, soft in (("x", True, True), ("z", True, False), ("q", False, False)):
        assert (the_copy(a, key).grouped, the_copy(a, key).soft_pinned) == (grouped, soft)
    copies = a.stat("p")
    assert copies is not None
    assert [copy.grouped for copy in copies.copies] == [True, True]


def test_an_async_store() -> None:
    async def run() -> None:
        async with AsyncStore(embedded="16MiB") as store:
            await store.put("k", b"1", groups="page", soft_pin_s=3600)
            one = await store.stat("k")
            assert one is not None
            assert (one.copies[0].grouped, one.copies[0].soft_pinned) == (True, True)

    asyncio.run(run())


def test_what_cannot_be_meant(store: Store) -> None:
    with pytest.raises(InvalidArgument, match="2 keys came with 1 groups"):
        store.put(["a", "b"], [b"", b""], groups=["page"])
    with pytest.raises(InvalidArgument, match="1025 bytes"):
        store.put("a", b"x", groups="p" * 1025)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidArgument, match="soft_pin_s"):
            store.put("a", b"x", soft_pin_s=wrong)
    assert store.put("a", b"x", soft_pin_s=1e12) == STORED  # as long as there is


@pytest.mark.parametrize("features", [b"", struct.pack("<I", 1)])
def test_a_node_of_the_release_before_gets_no_marks(runtime_dir: Path, features: bytes) -> None:
    path = runtime_dir / "n.sock"
    answers = {w.LEASE: struct.pack("<QQH", 0, 65536, 0), w.COMMIT: struct.pack("<IB", 1, w.STORED)}
    fake, thread, asked = serve(path, NAMES + features, answers)
    with Store(str(path), token=TOKEN) as store:
        assert store.put("key", b"hello", groups="page", soft_pin_s=1) == STORED
    thread.join(10)
    fake.close()
    (commit,) = (frame for frame in asked if frame.kind == w.COMMIT)
    assert commit.body == w.commit(0, [Row(0, 5, 0x9A71BB4C, b"key")])


@pytest.mark.parametrize(
    "marks",
    [
        b"",
        b"\x01",
        w.text16(b"page"),
        w.text16(b"page") + b"\1\2\3",
        w.marks(b"p" * 1025),
        w.marks(b"page") + b"x",
        struct.pack("<H", 0xFFFF) + b"page",
    ],
)
def test_marks_that_lie(runtime_dir: Path, marks: bytes) -> None:
    node = NodeProcess(runtime_dir / "n.sock")
    with Wire.open(runtime_dir / "n.sock", TOKEN) as wire:
        offset, _, _ = wire.lease(100, 5000)
        wire.send(w.COMMIT, w.commit(wire.space, [Row(offset, 5, 0, b"k", b"", marks)], flags=w.MARKS))
        assert "COMMIT" in wire.ended()[1]
    until(lambda: node.metric("connections") == 0)
    assert node.is_sound()
    assert node.metric("leased_bytes") == 0
    node.close()


def test_groups_are_one_for_each_key(store: Store) -> None:
    with pytest.raises(InvalidArgument, match="one for each"):
        store.put(["x", "y"], [b"1", b"2"], groups="ab")
