"""Objects that are larger than a node takes: they lie in stripes on several nodes, and are there as a whole
or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from moonpool import EXISTS, STORED, Presence, Store
from moonpool.core.errors import InvalidArgument
from moonpool.core.store.types import PutStatus

from .pool_bed import Pool, fill, pool
from .store_bed import MIB, until

__all__ = ["pool"]


def test_the_stripes_go_with_the_last_copy_of_their_manifest(pool: Pool) -> None:
    for name in "abc":
        pool.node(name, 24)
    a = pool.store("a")
    data = os.urandom(9 * MIB)
    assert a.put("big", data, replicas=3).replicas == 3
    pool.told()
    for name in "ba":
        assert a.remove("big", node=name) is True
        pool.told()
        assert bytes(a.get("big")) == data
    assert a.remove("big", node="c") is True
    pool.told()
    assert pool.total("objects") == 0


def test_an_object_larger_than_a_node_takes_is_striped(pool: Pool) -> None:
    pool.node("a"), pool.node("b"), pool.node("c")
    a, b = pool.store("a"), pool.store("b")
    data = os.urandom(9 * MIB + 5)
    assert a.put("big", data) == STORED
    assert a.put("big", data) == EXISTS
    until(lambda: b.get("big") is not None)
    assert all(server.metrics()["object_bytes"] >= MIB for server in pool.nodes.values())
    for store in (a, b):
        into = bytearray(len(data))
        assert store.get("big", into, verify=True) == len(data)
        assert into == data
        assert bytes(store.get("big")) == data
        with pytest.raises(InvalidArgument, match=str(len(data))):
            store.get("big", bytearray(100))
    assert [entry.key for entry in b.list()] == [b"big"]
    assert a.put("big", data[::-1], replace=True) == STORED
    until(lambda: b.get("big") is not None)  # never the old bytes
    assert bytes(b.get("big")) == data[::-1]
    # Bytes that look like a manifest are an object like any other.
    copy = bytes(96)
    assert a.put("mine", copy) == STORED
    assert bytes(a.get("mine")) == copy


@pytest.mark.parametrize("by", ["a", "b"])
@pytest.mark.parametrize("how", ["remove", "replace", "replace striped"])
def test_the_stripes_of_an_object_go_with_it(pool: Pool, by: str, how: str) -> None:
    """By the client that put it, and by another. What looks like a manifest and is none is harmless."""
    pool.node("a"), pool.node("b"), pool.node("c")
    a, store = pool.store("a"), pool.store(by)
    assert a.put("big", os.urandom(9 * MIB), replicas=2).replicas == 2
    forged = b"\xffmoonpool stripe" + bytes(80)
    assert a.put("forged", forged) == STORED
    pool.told()
    assert pool.total("object_bytes") > 9 * MIB
    assert store.remove(["forged"]) == [True]
    left = {"remove": 0, "replace": 100, "replace striped": 10 * MIB + 96}[how]
    if how == "remove":
        assert store.remove("big")
    else:
        assert store.put("big", bytes(left if how == "replace" else 10 * MIB), replace=True) == STORED
        pool.told()
        assert store.get("big") is not None
    assert pool.total("object_bytes") == left


def test_the_stripes_of_an_object_with_a_long_name_go_with_it(pool: Pool) -> None:
    """The index of a node, which its clients read, has no names over 72 bytes."""
    pool.node("a"), pool.node("b")
    a = pool.store("a")
    key = "k" * 100
    assert a.put(key, os.urandom(9 * MIB)) == STORED
    assert a.put(key, b"new", replace=True) == STORED
    pool.told()
    assert pool.total("object_bytes") == 3


def striped(pool: Pool) -> tuple[Store, bytes]:
    """A store with an object whose stripes lie on two nodes."""
    pool.node("a"), pool.node("b")
    a = pool.store("a")
    data = os.urandom(9 * MIB)
    assert a.put("big", data) == STORED
    pool.told()
    return a, data


def crowd(store: Store, node: str, n: int, name: str = "crowd") -> None:
    """Puts n MiB at a node, which evicts what was used the longest ago."""
    for i in range(n):
        assert store.put(f"{name}{i}", bytes(MIB), node=node) == STORED


@pytest.mark.parametrize("again", ["striped", "small"])
def test_an_object_that_lost_a_stripe_is_a_miss_and_can_be_put_again(pool: Pool, again: str) -> None:
    a, data = striped(pool)
    crowd(a, "b", 16)
    pool.told()
    assert a.get("big") is None
    assert a.exists("big") is Presence.MISS
    assert a.exists(["big"], pin=True) == ([Presence.MISS], None)
    for pin in (False, True):
        assert a.longest_prefix(["big", "crowd15"], pin=pin).blocks == 0
        assert a.longest_prefix(["crowd15", "big"], pin=pin).blocks == 1
    new = data[::-1] if again == "striped" else b"small"
    assert a.put("big", new) == STORED
    assert bytes(a.get("big")) == new
    assert a.exists("big") is Presence.HIT
    assert a.put("big", new) == EXISTS
    if again == "small":  # what was left of the lost one went with its manifest
        pool.told()
        assert pool.total("objects") == 1 + sum(a.exists(f"crowd{i}") is Presence.HIT for i in range(16))


def test_a_striped_object_is_lost_with_a_node_that_has_stripes_of_it(pool: Pool) -> None:
    a, data = striped(pool)
    pool.nodes.pop("b").stop()
    assert a.exists("big") is not Presence.HIT
    assert a.longest_prefix(["big"]).blocks == 0
    assert a.put("big", data[: 3 * MIB]) == STORED
    assert bytes(a.get("big")) == data[: 3 * MIB]


def test_the_stripes_of_an_object_are_used_and_pinned_with_it(pool: Pool) -> None:
    a, data = striped(pool)
    crowd(a, "b", 8, "older")
    assert a.exists("big") is Presence.HIT
    crowd(a, "b", 8)  # the older ones go before it
    assert bytes(a.get("big")) == data
    present, pin = a.exists(["big"], pin=True)
    assert present == [Presence.HIT]
    crowd(a, "b", 24, "more")
    assert bytes(a.get("big")) == data
    assert pin is not None
    pin.release()
    prefix = a.longest_prefix(["big"])
    assert prefix.blocks == 1
    crowd(a, "b", 24, "again")
    assert bytes(a.get("big")) == data
    del prefix


def test_an_object_that_found_no_room_leaves_no_stripes(pool: Pool) -> None:
    pool.node("a"), pool.node("b")
    a, b = pool.store("a"), pool.store("b")
    pins = fill(a, "a", 12), fill(b, "b", 12)
    pool.told()
    before = pool.total("objects")
    put = a.put("big", bytes(9 * MIB))  # there is room for 8: the last stripes take the first ones' place
    assert (put.status, pool.total("objects")) == (PutStatus.REFUSED, before)
    assert "no room" in put.reason
    del pins


def lost(pool: Pool) -> tuple[Store, bytes]:
    """A store with an object of which the stripes at b were evicted, by 16 objects of 1 MiB."""
    a, data = striped(pool)
    crowd(a, "b", 16)
    pool.told()
    assert pool.nodes["a"].metrics()["objects"] > 0
    return a, data


FINDERS: dict[str, Callable[[Store], bool]] = {
    "get": lambda store: store.get("big") is None,
    "get into": lambda store: store.get("big", bytearray(9 * MIB)) is None,
    "exists": lambda store: store.exists("big") is Presence.MISS,
    "pin": lambda store: store.exists(["big"], pin=True) == ([Presence.MISS], None),
    "longest_prefix": lambda store: store.longest_prefix(["big"], pin=False).blocks == 0,
    "longest_prefix with a pin": lambda store: store.longest_prefix(["big"]).blocks == 0,
}


@pytest.mark.parametrize("finder", FINDERS)
def test_the_client_that_misses_a_stripe_frees_the_object(pool: Pool, finder: str) -> None:
    a, _ = lost(pool)
    assert FINDERS[finder](a)
    pool.told()
    assert pool.nodes["a"].metrics()["objects"] == 0
    assert a.stat("big") is None


def test_an_object_that_lost_a_stripe_has_no_size(pool: Pool) -> None:
    """stat() is no use of the object, and no reason to remove it."""
    a, _ = striped(pool)
    assert a.stat("big") is not None
    crowd(a, "b", 16)
    pool.told()
    assert a.stat("big") is None
    assert pool.nodes["a"].metrics()["objects"] > 0


def test_another_object_under_the_key_of_a_lost_one_stays(pool: Pool) -> None:
    """The copy of a client whose own node never had the lost one."""
    pool.node("c")
    a, _ = lost(pool)
    c = pool.store("c")
    assert c.put("big", b"of c") == STORED
    pool.told()
    assert bytes(a.get("big")) == b"of c"
    assert a.exists("big") is Presence.HIT
    assert pool.nodes["a"].metrics()["objects"] == 0
    assert bytes(c.get("big")) == b"of c"


def test_nothing_is_removed_while_a_node_is_away(pool: Pool) -> None:
    """It may have the stripes that the others have not."""
    pool.node("c")
    a, data = lost(pool)
    held = pool.nodes["a"].metrics()["objects"]
    pool.master.stop()  # so it is not known which nodes there are
    assert a.get("big") is None
    assert a.exists("big") is not Presence.HIT
    assert pool.nodes["a"].metrics()["objects"] == held
    assert a.put("big", data[:MIB]) == STORED
    assert bytes(a.get("big")) == data[:MIB]


def test_an_object_whose_manifest_was_evicted_can_be_put_again(pool: Pool) -> None:
    a, data = striped(pool)
    crowd(a, "a", 16)
    pool.told()
    assert a.exists("big") is Presence.MISS
    assert a.put("big", data) == STORED
    assert bytes(a.get("big")) == data


def test_a_lost_object_is_put_again_by_a_client_that_did_not_look(pool: Pool) -> None:
    a, _ = lost(pool)
    assert a.put("big", b"new") == STORED
    assert bytes(a.get("big")) == b"new"


def test_what_is_pinned_is_read_after_its_removal(pool: Pool) -> None:
    a, data = striped(pool)
    _, pin = a.exists(["big"], pin=True)
    assert pin is not None
    assert pool.total("objects_pinned") == 10  # the manifest and nine stripes
    assert a.put("big", b"new", replace=True) == STORED
    assert bytes(a.get("big")) == b"new"
    assert bytes(a.get("big", pin=pin)) == data
    into = bytearray(len(data))
    assert a.get("big", into, pin=pin, verify=True) == len(data)
    assert into == data
    with pytest.raises(InvalidArgument, match=str(len(data))):
        a.get("big", bytearray(50), pin=pin)
    pin.release()
    until(lambda: pool.total("objects_detached") == 0)
    assert (pool.total("objects"), pool.total("objects_pinned")) == (1, 0)


def test_pins_on_many_objects_of_which_one_lost_a_stripe(pool: Pool) -> None:
    for name in "ab":
        pool.node(name, 64, remote_pins_share_max=0.75)
    a = pool.store("a")
    names = ["lost", "x", "y"]
    data = [os.urandom(20 * MIB) for _ in names]
    assert a.put([*names, "small"], [*data, b"s"]) == [STORED] * 4
    pool.told()
    hits, pin = a.exists([*names, "no", "small"], pin=True)
    assert hits == [Presence.HIT] * 3 + [Presence.MISS, Presence.HIT]
    assert pin is not None
    assert [bytes(view) for view in a.get([*names, "small"], pin=pin)] == [*data, b"s"]
    pin.release()
    assert a.exists(["x", "y"]) == [Presence.HIT] * 2  # used after the other one
    crowd(a, "b", 45)
    pool.told()
    hits, pin = a.exists([*names, "no", "small"], pin=True)
    assert hits == [Presence.MISS, Presence.HIT, Presence.HIT, Presence.MISS, Presence.HIT]
    assert a.exists(names) == hits[:3]
    assert pin is not None
    assert [bytes(view) for view in a.get(names[1:], pin=pin)] == data[1:]
    pin.release()
    until(lambda: pool.total("objects_pinned") == 0)


def test_a_pin_holds_all_stripes_or_none(pool: Pool) -> None:
    """Pins of other hosts may hold a quarter of a node's memory, 4 MiB: at b there are 5 stripes."""
    pool.node("a"), pool.node("b")
    a = pool.store("a")
    data = os.urandom(11 * MIB)
    assert a.put("big", data) == STORED
    pool.told()
    assert a.exists("big") is Presence.HIT
    assert a.exists(["big"], pin=True) == ([Presence.MISS], None)
    prefix = a.longest_prefix(["big"])
    assert prefix.blocks == 0
    assert "pins hold" in prefix.why
    del prefix
    until(lambda: pool.total("objects_pinned") == 0)
    assert bytes(a.get("big")) == data


@pytest.mark.parametrize("gone", ["a", "b", "c"])
def test_each_stripe_has_copies_on_other_hosts(pool: Pool, gone: str) -> None:
    for name in "abc":
        pool.node(name, 32)
    a = pool.store("a")
    data = os.urandom(20 * MIB)
    put = a.put("big", data, replicas=2)
    assert (put.status, put.replicas, put.reason) == (PutStatus.STORED, 2, "")
    assert pool.total("object_bytes") == 2 * (20 * MIB + 96)
    pool.told()
    pool.nodes.pop(gone).stop()
    for name in pool.nodes:  # the others have all of it
        reader = pool.store(name)
        until(lambda reader=reader: reader.exists("big") is Presence.HIT)
        assert bytes(reader.get("big")) == data
        assert reader.longest_prefix(["big"], pin=False).blocks == 1


def test_more_copies_of_stripes_than_there_are_nodes(pool: Pool) -> None:
    pool.node("a", 32), pool.node("b", 32)
    a = pool.store("a")
    data = os.urandom(9 * MIB)
    put = a.put("big", data, replicas=3)
    assert (put.status, put.replicas) == (PutStatus.STORED, 2)
    assert "not enough other hosts" in put.reason
    # What is there already gets the copies that it lacks, if the bytes are these.
    assert a.put("other", data) == STORED
    pool.told()
    again = a.put("other", data, replicas=2)
    assert (again.status, again.replicas) == (PutStatus.EXISTS, 2)
    assert pool.total("object_bytes") == 4 * (9 * MIB + 96)
    wrong = a.put("other", data[::-1], replicas=2)
    assert (wrong.status, wrong.replicas) == (PutStatus.EXISTS, 1)
    assert "other bytes" in wrong.reason
    pool.told()
    assert a.remove(["big", "other"]) == [True, True]
    pool.told()
    assert pool.total("objects") == 0


def test_a_reader_that_is_overtaken_gets_one_object_or_the_other(pool: Pool) -> None:
    """Striped and small objects take each other's place; each is of one byte, so a mix would show."""
    for name in "ab":
        pool.node(name, 64)
    a = pool.store("a")
    sizes = (20 * MIB, 1000, 17 * MIB + 1, 18 * MIB, 10)

    def content(i: int) -> bytes:
        return bytes([i + 1]) * sizes[i % len(sizes)]

    assert a.put("big", content(0)) == STORED
    pool.told()
    over = threading.Event()
    wrong: list[str] = []
    reads = [0, 0]

    def read(reader: int, store: Store) -> None:
        into = bytearray(max(sizes))
        while not over.is_set():
            if reads[reader] % 2:
                size = store.get("big", into)
                got = None if size is None else bytes(into[:size])
            else:
                view = store.get("big")
                got = None if view is None else bytes(view)
            if got is None or got != content(got[0] - 1):
                wrong.append("a miss" if got is None else f"{len(got)} bytes, {set(got[:: MIB // 2])}")
            reads[reader] += 1

    threads = [threading.Thread(target=read, args=(i, pool.store(name))) for i, name in enumerate(("a", "b"))]
    for thread in threads:
        thread.start()
    try:
        for i in range(1, 40):
            assert a.put("big", content(i), replace=True) == STORED
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    print(f"{reads} reads while there were 39 replacements")
    assert wrong == []
    pool.told()
    assert pool.total("object_bytes") == sizes[39 % len(sizes)]


@pytest.mark.parametrize("then", ["remove", "put"])
def test_a_manifest_that_only_the_ssd_has(pool: Pool, tmp_path: Path, then: str) -> None:
    """A removal frees its stripes, and a put finds out that they are lost."""
    ssd = pool.node("a", ssd=str(tmp_path / "ssd"), ssd_segment_bytes=4 * MIB, ssd_clean_share=1.0)
    pool.node("b")
    a = pool.store("a")
    assert a.put("big", os.urandom(9 * MIB)) == STORED
    for i in range(20):
        assert a.put(f"crowd{i}", bytes(MIB), node="a") == STORED
        until(lambda: ssd.metrics()["ssd_writing"] == 0)  # else it is evicted before it is written
    # To ask for the object would bring its manifest back into memory.
    assert ssd.metrics()["evicted_total"] >= 6
    assert ssd.metrics()["ssd_lost_total"] == 0
    assert pool.nodes["b"].metrics()["objects"] == 4
    if then == "remove":
        assert a.remove("big")
        until(lambda: pool.nodes["b"].metrics()["objects"] == 0)
    else:
        crowd(a, "b", 16, "other")
        assert a.put("big", b"new") == STORED
        assert bytes(a.get("big")) == b"new"


def test_a_lost_object_at_the_node_that_a_put_is_sent_to(pool: Pool) -> None:
    lost(pool)
    b = pool.store("b")
    assert b.put("big", b"new", node="a") == STORED
    assert bytes(b.get("big")) == b"new"
