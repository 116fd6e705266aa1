"""stat(keys): what objects are, over one node and several, without reading them; and nodes that lie of it."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool import AsyncStore, Copy, ObjectStat, Store
from moonpool.core.errors import InvalidArgument, ProtocolError, Unavailable

from . import wire_client as w
from .pool_bed import Pool, pool
from .stat_bed import NAMES, serve
from .store_bed import MIB, TOKEN, NodeProcess, until
from .wire_client import Wire

__all__ = ["pool"]


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(embedded="16MiB") as store:
        yield store


def test_an_object_and_a_miss(store: Store) -> None:
    data = os.urandom(1000)
    store.put("k", data)
    (one, none) = store.stat(["k", "none"])
    assert none is None
    assert one is not None
    (copy,) = one.copies
    assert (one.size, copy.size, copy.tiers, copy.pins, one.pinned) == (1000, 1000, ("dram",), 0, False)
    (entry,) = store.list()
    assert (copy.generation, copy.crc32c) == (entry.generation, entry.crc32c)
    _, pin = store.exists(["k"], pin=True)
    now = store.stat("k")
    assert now is not None
    assert (now.copies[0].pins, now.pinned) == (1, True)
    assert pin is not None
    pin.release()
    store.put("k", b"", replace=True)
    newer = store.stat("k", everywhere=False)
    assert newer is not None
    assert newer.size == 0
    assert newer.copies[0].generation > copy.generation
    assert store.stat([]) == []
    assert "objects" in store.stat()
    with pytest.raises(InvalidArgument):
        store.stat("")


def test_many_keys_take_several_frames(store: Store) -> None:
    keys = [f"k{i}" for i in range(40_000)]
    store.put(keys[::2000], [b"x"] * 20)
    found = store.stat(keys)
    assert [key for key, one in zip(keys, found, strict=True) if one] == keys[::2000]


def test_a_look_is_no_use(runtime_dir: Path) -> None:
    node = NodeProcess(runtime_dir / "n.sock")
    with Store(str(runtime_dir / "n.sock"), token=TOKEN) as store:
        size = node.metric("arena_ready_bytes") // 16
        store.put("oldest", bytes(size))
        for i in range(40):
            store.put(f"k{i}", bytes(size))
            if store.stat("oldest") is None:
                break
        else:
            raise AssertionError("it was kept")
    node.close()


def test_copies_on_other_nodes(pool: Pool) -> None:
    pool.node("a"), pool.node("b"), pool.node("c")
    a, c = pool.store("a"), pool.store("c")
    a.put("two", bytes(MIB), replicas=2)
    at_once = a.stat("two")  # before the directory has heard of it
    assert at_once is not None
    assert [copy.node for copy in at_once.copies] in (["a", "b"], ["a", "c"])
    pool.told()
    served = pool.total("served_bytes_total")
    seen = c.stat("two")
    assert seen is not None
    assert {copy.host for copy in seen.copies} == {f"host-{copy.node}" for copy in at_once.copies}
    assert {copy.address for copy in seen.copies} == {
        pool.nodes[copy.node].addresses[0] for copy in seen.copies
    }
    assert pool.total("served_bytes_total") == served
    near = a.stat("two", everywhere=False)
    assert near is not None
    assert [copy.node for copy in near.copies] == ["a"]
    data = os.urandom(9 * MIB)
    a.put("big", data)
    pool.told()
    big = c.stat("big")
    assert big is not None
    assert big.size == len(data)
    # Bytes of a manifest's size are no manifest.
    a.put("mine", bytes(96))
    mine = a.stat("mine")
    assert mine is not None
    assert mine.size == 96


def test_a_miss_must_be_certain(pool: Pool) -> None:
    pool.node("a"), pool.node("b")
    a = pool.store("a")
    a.put("k", b"x")
    assert a.stat("none") is None
    pool.master.stop()
    found = a.stat("k")
    assert found is not None
    with pytest.raises(Unavailable, match="none"):
        a.stat(["k", "none"])
    pool.nodes.pop("a").stop()
    with pytest.raises(Unavailable):
        a.stat("k")


def test_the_same_of_an_async_store() -> None:
    async def run() -> None:
        async with AsyncStore(embedded="16MiB") as store:
            await store.put("k", b"12345")
            one, none = await store.stat(["k", "none"])
            assert isinstance(one, ObjectStat)
            assert isinstance(one.copies[0], Copy)
            assert (one.size, none) == (5, None)
            assert (await store.stat("k")) == one
            assert "objects" in await store.stat()
            with pytest.raises(InvalidArgument):
                await store.remove("k", node="nobody")
            assert await store.remove("k")

    asyncio.run(run())


def test_a_node_of_the_release_before_is_asked_with_a_lookup(runtime_dir: Path) -> None:
    path = runtime_dir / "n.sock"
    found = w.DESCRIPTOR.pack(4096, 5, 7, 1, 0)
    lookup = struct.pack("<QII", 0, 1, 2) + found + bytes(32)
    fake, thread, asked = serve(path, NAMES, {w.LOOKUP: lookup})
    with Store(str(path), token=TOKEN) as store:
        one, none = store.stat(["k", "none"])
        assert none is None
        assert one is not None
        assert (one.size, one.copies[0].generation, one.copies[0].tiers) == (5, 7, ("dram",))
        assert w.DESCRIBE not in [frame.kind for frame in asked]
    thread.join(10)
    fake.close()


@pytest.mark.parametrize(
    "lie",
    [
        b"",
        struct.pack("<I", 1) + w.DESCRIPTION.pack(5, 7, 1, 0, 1, 0),  # one of two
        struct.pack("<I", 2) + w.DESCRIPTION.pack(5, 7, 1, 0, 1, 0) * 3,
        struct.pack("<I", 2) + w.DESCRIPTION.pack(5, 7, 1, 0, 1, 0) * 2 + b"x",
        struct.pack("<I", 2) + w.DESCRIPTION.pack(1 << 63, 7, 1, 0, 1, 0) * 2,
        struct.pack("<I", 0xFFFFFFFF),
    ],
)
def test_a_node_that_lies(runtime_dir: Path, lie: bytes) -> None:
    path = runtime_dir / "n.sock"
    fake, thread, _ = serve(path, NAMES + struct.pack("<I", 0xFFFFFFFF), {w.DESCRIBE: lie})
    with Store(str(path), token=TOKEN) as store, pytest.raises(ProtocolError):
        store.stat(["k", "none"])
    thread.join(10)
    fake.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        struct.pack("<II", 0, 1),
        struct.pack("<II", 77, 0),
        struct.pack("<II", 0, 0xFFFFFFFF),
        w.describe(0, [b"k"]) + b"x",
        w.describe(0, [b"k" * 1025]),
    ],
)
def test_a_client_that_lies(runtime_dir: Path, body: bytes) -> None:
    node = NodeProcess(runtime_dir / "n.sock")
    with Wire.open(runtime_dir / "n.sock", TOKEN) as wire:
        wire.send(w.DESCRIBE, body, request_id=5)
        assert "DESCRIBE" in wire.ended()[1]
    until(lambda: node.metric("connections") == 0)
    assert node.is_sound()
    node.close()


def test_a_removal_of_one_generation() -> None:
    with Store(embedded="16MiB") as store:
        store.put(["a", "b"], [b"old", b"b"])
        before = [one.copies[0] for one in store.stat(["a", "b"]) if one is not None]
        at = before[0].node
        store.put("a", b"new", replace=True)
        generations = [copy.generation for copy in before]
        assert store.remove(["a", "b", "c"], node=at, generation=[*generations, 7]) == [False, True, False]
        assert store.get("a") == b"new"
        assert not store.remove("a", node=at, generation=generations[0])
        now = store.stat("a")
        assert now is not None
        assert store.remove("a", node=at, generation=now.copies[0].generation)
        assert store.stat("a") is None
        with pytest.raises(InvalidArgument, match="one key at one node"):
            store.remove("a", generation=1)
        with pytest.raises(InvalidArgument, match="1 generations came with 2 keys"):
            store.remove(["a", "b"], node=at, generation=[1])


def test_a_node_of_the_release_before_removes_no_one_generation(runtime_dir: Path) -> None:
    path = runtime_dir / "old.sock"
    fake, thread, asked = serve(path, NAMES + struct.pack("<I", 3), {})
    with Store(str(path), token=TOKEN) as store, pytest.raises(Unavailable, match="older release"):
        store.remove("a", node="old", generation=1)
    thread.join(10)
    fake.close()
    assert w.REMOVE not in [frame.kind for frame in asked]
