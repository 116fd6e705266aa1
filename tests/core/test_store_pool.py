"""One store over several nodes, in one process: what a client does when its own node is full or gone, and
that removals, replacements and copies reach every node. Hosts of their own, and what dies in between, are in
tests/cluster."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from moonpool import EXISTS, STORED, Presence, Store, Unsure, _native
from moonpool.core.config.native_settings import node_settings
from moonpool.core.errors import InvalidArgument, Unavailable
from moonpool.core.store.types import PutStatus

from .master_bed import MasterProcess
from .pool_bed import Pool, fill, pool
from .store_bed import MIB, TOKEN, stop_process, until

__all__ = ["pool"]


def test_every_verb_reaches_the_other_node(pool: Pool) -> None:
    pool.node("a"), pool.node("b")
    a, b = pool.store("a"), pool.store("b")
    data = os.urandom(MIB)
    assert a.put(["x", "y", "z"], [data, b"", b"zz"], parents=[None, "x", "y"]) == [STORED] * 3
    until(lambda: all(b.exists(["x", "y", "z"])))
    into = bytearray(MIB)
    assert b.get(["x", "z", "no"], [into, bytearray(2), bytearray(1)]) == [MIB, 2, None]
    assert into == data
    views = b.get(["x", "y", "no"])
    assert [None if view is None else bytes(view) for view in views] == [data, b"", None]
    with pytest.raises(InvalidArgument, match="holds 1 bytes, the object has 2"):
        b.get(["x", "z"], [into, bytearray(1)])
    prefix = b.longest_prefix(["x", "y", "z", "no"])
    assert (prefix.blocks, prefix.holders, prefix.why) == (3, ("a",) * 3, "")
    assert {entry.key for entry in b.list()} == {b"x", b"y", b"z"}
    assert b.remove(["x", "no"]) == [True, False]
    assert bytes(b.get("x", pin=prefix.pin)) == data  # pinned at its holder
    assert a.exists(["x", "y"]) == [Presence.MISS, Presence.HIT]
    assert pool.nodes["b"].metrics()["tcp_sent_bytes_total"] == 0
    assert pool.nodes["a"].metrics()["tcp_sent_bytes_total"] >= 3 * MIB


def test_copies_are_on_other_hosts_and_are_removed_with_the_first(pool: Pool) -> None:
    pool.node("a"), pool.node("b"), pool.node("c")
    a, b = pool.store("a"), pool.store("b")
    result = a.put("two", b"2", replicas=2)
    assert (result.status, result.replicas, result.reason) == (PutStatus.STORED, 2, "")
    result = a.put("four", b"4", replicas=4)
    assert (result.status, result.replicas) == (PutStatus.STORED, 3)
    assert "not enough other hosts" in result.reason
    # At once: the directory has not heard of the copies yet.
    for i in range(20):
        a.put(f"k{i}", b"old", replicas=2)
        a.remove(f"k{i}") if i % 2 else a.put(f"k{i}", b"new", replace=True)

    def is_new(i: int) -> bool:
        view = b.get(f"k{i}")
        return view is not None and bytes(view) == b"new"

    for i in range(0, 20, 2):
        until(lambda i=i: is_new(i))
    pool.told()  # no copy hides from the directory any more
    for i in range(1, 20, 2):
        assert b.get(f"k{i}") is None


def test_one_copy_is_removed_at_its_node(pool: Pool) -> None:
    pool.node("a"), pool.node("b"), pool.node("c")
    a, c = pool.store("a"), pool.store("c")
    data = os.urandom(1000)
    assert a.put(["k", "left"], [data, b"l"], replicas=2)[0].replicas == 2
    pool.told()
    (other,) = (name for name in "bc" if pool.nodes[name].metrics()["objects"] == 2)
    assert c.exists("k")
    view = a.get("k")
    _, pin = a.exists(["k"], pin=True)
    assert a.remove(["k", "none"], node="a") == [True, False]  # by name
    pool.told()
    assert pool.nodes["a"].metrics()["objects"] == 1
    assert pool.nodes[other].metrics()["objects"] == 2
    assert (bytes(view), bytes(a.get("k", pin=pin))) == (data, data)  # who reads the copy goes on
    assert bytes(a.get("k")) == data  # the other copy
    assert a.remove("k", node="a") is False
    assert a.remove("k", node=pool.nodes[other].addresses[0]) is True  # by address, of another host
    pool.told()
    assert a.get("k") is None
    assert bytes(c.get("left")) == b"l"
    assert a.put("k", b"new") == STORED  # nobody remembers the removals against it
    pool.told()
    assert bytes(c.get("k")) == b"new"


def test_a_removal_at_a_node_that_is_not_the_one(pool: Pool) -> None:
    pool.node("a", called="0"), pool.node("b", called="0")
    a = pool.store("a")
    a.put("k", b"x")
    for wrong, why in (("0", "several hosts"), ("", "host:port"), ("127.0.0.1:1", "knows none")):
        with pytest.raises(InvalidArgument, match=why):
            a.remove("k", node=wrong)
    assert a.remove("k", node=pool.nodes["b"].addresses[0]) is False
    gone = pool.nodes.pop("b")
    address = gone.addresses[0]
    gone.stop()
    with pytest.raises((Unavailable, InvalidArgument)):
        a.remove("k", node=address)
    assert bytes(a.get("k")) == b"x"
    pool.master.stop()
    assert a.remove("k", node=pool.nodes["a"].addresses[0]) is True  # the own node needs no master


def at(store: Store, key: str) -> list[str]:
    found = store.stat(key)
    return [] if found is None else sorted(copy.node for copy in found.copies)


def test_a_put_goes_where_it_is_wanted(pool: Pool) -> None:
    pool.node("a"), pool.node("b"), pool.node("c")
    a, c = pool.store("a"), pool.store("c")
    address = pool.nodes["b"].addresses[0]
    assert a.put("k", b"1", node=address) == STORED
    assert (at(a, "k"), bytes(a.get("k"))) == (["b"], b"1")
    pool.told()
    assert a.put("k", b"2", node=address) == EXISTS
    assert a.put("k", b"3", node="b", replace=True) == STORED
    assert at(a, "k") == ["b"]
    assert bytes(until(lambda: c.get("k"))) == b"3"
    # What the own node has already stays there, unless it is replaced.
    assert a.put("own", b"1") == STORED
    assert a.put("own", b"2", node="b") == EXISTS
    assert at(a, "own") == ["a"]
    assert a.put("own", b"3", node="b", replace=True) == STORED
    assert (at(a, "own"), bytes(a.get("own"))) == (["b"], b"3")
    # The copies go to the next ones, and so to the own node.
    assert a.put("two", b"1", node=["c", "nobody", "b"], replicas=2).replicas == 2
    assert at(a, "two") == ["b", "c"]
    assert a.put("back", b"1", node=["c", "a"], replicas=2).replicas == 2
    assert at(a, "back") == ["a", "c"]
    assert a.put("all", b"1", node="c", replicas=3).replicas == 3
    assert at(a, "all") == ["a", "b", "c"]


def test_copies_go_to_other_nodes_of_a_host_where_no_host_is_left(pool: Pool) -> None:
    """Two processes of one host: what one holds alone dies with it."""
    for name in "abc":
        pool.node(name, host="one host")
    pool.node("d")
    a = pool.store("a")
    assert a.put("two", b"2", replicas=2).replicas == 2
    assert at(a, "two") == ["a", "d"]  # another host first
    assert a.put("three", b"3", replicas=3).replicas == 3
    assert len(at(a, "three")) == 3
    assert {"a", "d"} <= set(at(a, "three"))
    five = a.put("five", b"5", replicas=5)
    assert (five.replicas, at(a, "five")) == (4, ["a", "b", "c", "d"])
    assert "not enough other hosts and nodes" in five.reason
    # Two of one host that are named, when there is no other host.
    pool.nodes.pop("d").stop()
    assert until(lambda: pool.master.metrics()["nodes_alive"] == 3)
    assert a.put("named", b"1", node=["c", "b"], replicas=2).replicas == 2
    assert at(a, "named") == ["b", "c"]
    assert all(result.replicas == 2 for result in a.put(["x", "y"], [b"1", b"2"], replicas=2))
    pool.nodes.pop("a").stop()
    b = pool.store("b")
    assert [bytes(until(lambda name=name: b.get(name))) for name in ("x", "y", "three")] == [b"1", b"2", b"3"]


def test_a_put_goes_elsewhere_when_the_wanted_node_is_full_or_gone(pool: Pool) -> None:
    pool.node("a", 64), pool.node("b")
    a, b = pool.store("a"), pool.store("b")
    pin = fill(b, "pinned", 15)
    assert all(a.put([f"k{i}" for i in range(4)], [bytes(MIB)] * 4, node="b"))
    assert {name for i in range(4) for name in at(a, f"k{i}")} >= {"a"}
    pool.nodes.pop("b").stop()
    assert a.put("x", b"x", node="b") == STORED
    assert a.put("y", b"y", node=["nobody", "a"]) == STORED
    assert bytes(a.get("x")) == b"x"
    del pin


def test_a_put_that_is_wanted_here_does_not_spill(pool: Pool) -> None:
    pool.node("a"), pool.node("b", 64)
    a = pool.store("a")
    for i in range(30):
        assert a.put(f"k{i}", bytes(MIB), node="a") == STORED
    assert pool.nodes["b"].metrics()["objects"] == 0


def test_copies_are_made_of_equal_bytes_only(pool: Pool) -> None:
    pool.node("a"), pool.node("b")
    a, b = pool.store("a"), pool.store("b")
    a.put("k", b"old")
    result = a.put("k", b"new", replicas=2)
    assert (result.status, result.replicas) == (PutStatus.EXISTS, 1)
    assert "other bytes" in result.reason
    assert a.put("k", b"old", replicas=2).replicas == 2
    assert bytes(b.get("k")) == b"old"


def test_a_full_node_spills_and_finds_what_it_spilled(pool: Pool) -> None:
    pool.node("a"), pool.node("b", 64)
    a = pool.store("a")
    pin = fill(a, "pinned", 15)
    data = os.urandom(MIB)
    assert a.put("spilled", data) == STORED
    assert bytes(a.get("spilled")) == data  # at once
    assert a.exists("spilled") is Presence.HIT
    assert pool.nodes["b"].metrics()["objects"] >= 1
    assert a.put("pinned0", bytes(MIB)) == EXISTS
    # What was replaced while it lay elsewhere is there, and new.
    assert a.put("spilled", b"new", replace=True) == STORED
    assert bytes(a.get("spilled")) == b"new"
    b = pool.store("b")
    until(lambda: b.exists("spilled"))
    assert bytes(b.get("spilled")) == b"new"
    del pin


@pytest.mark.parametrize("pin", [True, False])
def test_a_prefix_tells_nodes_of_one_name_apart(pool: Pool, pin: bool) -> None:
    """Names are the user's: each host may have its "0"."""
    pool.node("a", called="0"), pool.node("b", called="0")
    a, b = pool.store("a"), pool.store("b")
    chain = [f"block{i}" for i in range(6)]
    assert a.put(chain[:4], [b"x"] * 4) == [STORED] * 4
    assert b.put(chain[4:], [b"x"] * 2) == [STORED] * 2
    until(lambda: all(a.exists(chain)))
    prefix = a.longest_prefix(chain, width=2, pin=pin)
    assert (prefix.blocks, prefix.why) == (3, "")
    assert prefix.holders == ("0", "0", "0")
    assert prefix.hosts == ("host-a", "host-a", "host-b")


def test_without_a_master_the_own_node_goes_on_and_removals_reach_who_is_known(pool: Pool) -> None:
    pool.node("a"), pool.node("b")
    a, b = pool.store("a"), pool.store("b")
    assert a.put("both", b"1", replicas=2).replicas == 2
    a.put("here", b"2")
    until(lambda: b.exists("here"))
    assert bytes(b.get("here")) == b"2"
    pool.master.stop()
    assert a.put("more", b"3") == STORED
    assert a.exists(["more", "nowhere"]) == [Presence.HIT, Presence.UNKNOWN]
    assert b.get("here", bytearray(1)) == 1  # a known place
    assert a.longest_prefix(["here", "nowhere"]).why
    removed = a.remove("both")  # b is told; other holders are not known
    assert isinstance(removed, Unsure)
    assert "while the master is away" in removed.nodes
    assert not removed
    assert b.get("both") is None


def test_a_node_that_was_stopped_leaves_no_key_in_doubt(pool: Pool) -> None:
    """It says that it leaves; one that dies may come back with its keys, which are not known until then."""
    pool.node("a"), pool.node("b")
    a, b = pool.store("a"), pool.store("b")
    assert b.put("only there", b"1") == STORED
    assert until(lambda: a.exists("only there")) is Presence.HIT
    pool.nodes.pop("b").stop()
    until(lambda: a.exists("only there") is Presence.MISS)
    assert pool.master.metrics()["nodes_left_total"] == 1
    assert pool.master.metrics()["nodes_suspect"] == 0


def test_puts_go_elsewhere_when_the_own_node_is_gone(pool: Pool) -> None:
    pool.node("a"), pool.node("b")
    a, b = pool.store("a"), pool.store("b")
    assert a.put("k", b"old") == STORED
    until(lambda: b.exists("k"))
    pool.nodes.pop("a").stop()
    assert a.put("new", b"1") == STORED
    assert bytes(b.get("new")) == b"1"
    replaced = a.put("k", b"new", replace=True)
    assert replaced
    assert replaced.reason == "an older value may still be on this host's node"
    assert bytes(b.get("k")) == b"new"
    with pytest.raises(Unavailable):
        a.get("never")


def test_each_replacement_has_its_copies(pool: Pool) -> None:
    for name in "ab":
        pool.node(name)
    a, b = pool.store("a"), pool.store("b")
    for i in range(4):
        assert a.put("k", b"%d" % i, replace=True, replicas=2).replicas == 2
        assert b.get("k") == b"%d" % i


def test_who_waits_longer_for_a_node_waits_longer_for_the_master(tmp_path: Path) -> None:
    """Of a call's timeout a silent master gets a quarter: here 20 s, not the half second of a user."""
    with ExitStack() as stack:
        master = MasterProcess(suspect_after_s="60s", gone_after_s="120s")
        stack.callback(master.close)
        node = _native.Server(
            str(tmp_path / "a.sock"),
            [("default", 16 * MIB)],
            TOKEN,
            node_settings(),
            name="a",
            master=master.address,
        )
        node.start()
        stack.callback(node.stop)
        until(lambda: node.metrics()["master_joined"] == 1)
        store = Store(str(tmp_path / "a.sock"), token=TOKEN, timeout_s=80.0)
        stack.callback(store.close)
        assert store.exists("nothing") is Presence.MISS
        answers: list[Presence] = []
        stop_process(master.process.pid)
        asking = threading.Thread(target=lambda: answers.append(store.exists("nothing")))
        asking.start()
        asking.join(1.0)
        assert asking.is_alive(), answers
        master.process.send_signal(signal.SIGCONT)
        asking.join(60)
        assert answers == [Presence.MISS]
