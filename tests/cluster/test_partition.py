"""Partitions: what cannot be reached is a miss in time, and after healing nobody serves what was removed or
replaced meanwhile."""

from __future__ import annotations

import pytest

from ..core.store_bed import until
from .bed import Cluster
from .hosts import measured
from .puppet import checksum, unless_lost

SUSPECTED_S, BACK_S = 1.0, 3.0


def test_a_node_cut_off_from_its_master(cluster: Cluster) -> None:
    """It is suspected, serves its own host all the time, and is used again when the cut heals."""
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_b.put(["k"], 1000)
    cluster.found(["k"])
    assert cluster.master_host is not None
    cluster.network.cut((b.host, cluster.master_host))
    measured("suspected", lambda: cluster.states()[b.name] == "suspect", SUSPECTED_S)
    assert on_b.has(["k"], 1000)
    assert on_b.put(["own"], 1000)[0][0] == "stored"
    assert on_b.seconds < 5
    assert on_b.has(["own"], 1000)
    assert on_a.get(["own"]) == [None]
    assert on_a.seconds < 5
    cluster.network.heal()
    measured("alive after healing", lambda: cluster.states()[b.name] == "alive", BACK_S)
    measured("what was put meanwhile is found", lambda: on_a.has(["k", "own"], 1000), BACK_S)


def test_what_was_removed_during_a_partition_stays_removed(cluster: Cluster) -> None:
    """b has a copy and is cut off from everybody while the key is removed and another replaced."""
    a, b, c = cluster.start("a", "b", "c")
    assert cluster.master_host is not None
    on_a, on_c = cluster.puppet(a.host), cluster.puppet(c.host)
    on_a.put(["removed", "replaced", "kept"], 1000, 0, replicas=3)
    cluster.found(["removed", "replaced", "kept"], 3)
    assert on_c.has(["removed", "replaced", "kept"], 1000)
    others = (cluster.master_host, a.host, c.host)
    cluster.network.cut(*((b.host, other) for other in others))
    until(lambda: cluster.states()[b.name] == "suspect")
    (unsure,) = on_a.remove(["removed"])
    assert f"node {b.name} on " in str(unsure)
    assert on_a.put(["replaced"], 1000, 7, replace=True)[0][0] == "stored"
    assert on_c.get(["removed"]) == [None]
    until(lambda: on_c.has(["replaced"], 1000, 7))
    cluster.network.heal()
    until(lambda: cluster.states()[b.name] == "alive" and b.metric("master_joined"))
    on_b = cluster.puppet(b.host)
    for reader in (on_a, on_b, on_c):
        measured("the removed key is gone", lambda r=reader: r.get(["removed"]) == [None], BACK_S)
        measured(
            "the replaced key is the new one",
            lambda r=reader: r.get(["replaced"]) == on_a.get(["replaced"]),
            BACK_S,
        )
        assert reader.has(["replaced"], 1000, 7)
        assert reader.has(["kept"], 1000)


def test_the_first_answer_after_healing_is_not_stale(cluster: Cluster) -> None:
    """As above, but a reader on the node that was away asks all the time."""
    a, b = cluster.start("a", "b")
    assert cluster.master_host is not None
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_a.put(["k"], 1000, 0, replicas=2)
    cluster.found(["k"], 2)
    cluster.network.cut((b.host, cluster.master_host), (b.host, a.host))
    until(lambda: cluster.states()[b.name] == "suspect")
    assert on_b.has(["k"], 1000, 0)  # cut off, it cannot know better: its copy was right when it was cut off
    (unsure,) = on_a.remove(["k"])
    assert f"node {b.name} on " in str(unsure)
    cluster.network.heal()
    until(lambda: b.metric("master_joined") and cluster.states()[b.name] == "alive")
    measured("dropped at b", lambda: b.metric("objects") == 0, BACK_S)
    assert on_b.get(["k"]) == [None]
    assert on_a.get(["k"]) == [None]


def test_nodes_that_cannot_see_each_other_but_the_master(cluster: Cluster) -> None:
    """What one has is a miss for the other, after at most the deadline; the third host reaches both."""
    a, b, c = cluster.start("a", "b", "c")
    on_a, on_b, on_c = (cluster.puppet(node.host, timeout_s=1.0) for node in (a, b, c))
    on_a.put(["a"], 1000)
    on_b.put(["b"], 1000)
    cluster.found(["a", "b"])
    assert on_a.has(["b"], 1000)
    cluster.network.cut((a.host, b.host))
    for _ in range(2):
        assert unless_lost(lambda: on_a.get(["b"])) in (None, [None])
        print(f"get over the cut: {on_a.seconds:.3f} s")
        assert on_a.seconds < 1.0 * 2 * 5
    prefix = on_a.longest_prefix(["a", "b"])
    assert prefix["blocks"] == 1
    assert prefix["why"] != ""
    print(f"longest_prefix over the cut: {on_a.seconds:.3f} s, {prefix['why']!r}")
    assert on_a.put(["more"], 1000, replicas=2)[0][2] == 2  # at c
    assert on_a.seconds < 10
    assert on_c.has(["a", "b"], 1000)
    until(lambda: set(cluster.states().values()) == {"alive"})
    on_b.put(["b"], 1000, 5, replace=True)
    cluster.network.heal()
    measured("found again", lambda: on_a.has(["b"], 1000, 5), BACK_S)


def test_one_replica_behind_the_cut(cluster: Cluster) -> None:
    """Two holders, one of them out of reach: the other one answers within the call."""
    a, b, c = cluster.start("a", "b", "c")
    writer, reader = cluster.puppet(a.host), cluster.puppet(c.host, timeout_s=1.0)
    names = [f"k{i}" for i in range(32)]
    writer.put(names, 1000, replicas=2)
    cluster.found(names, 2)
    if c.metric("objects"):
        reader = cluster.puppet(b.host, timeout_s=1.0)
    cluster.network.cut((reader.host, a.host))
    assert reader.has(names, 1000)
    print(f"32 objects with one holder out of reach: {reader.seconds:.3f} s")
    assert reader.seconds < 1.0 * 2 * 5


def test_an_unplugged_host_comes_back(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_b.put(["k"], 1000)
    cluster.found(["k"])
    cluster.network.unplug(b.host)
    measured("suspected", lambda: cluster.states()[b.name] == "suspect", SUSPECTED_S)
    assert on_a.get(["k"]) == [None]
    cluster.network.plug(b.host)
    measured("alive again", lambda: cluster.states()[b.name] == "alive", BACK_S)
    measured("found again", lambda: on_a.has(["k"], 1000), BACK_S)


@pytest.mark.parametrize("verb", ["remove", "replace"])
def test_copies_elsewhere_while_there_is_no_master(cluster: Cluster, verb: str) -> None:
    """A client that cannot ask where the other copies are, and they can be reached: after the master's return
    nobody may read the old bytes."""
    a, b, c = cluster.start("a", "b", "c")
    on_a, on_c = cluster.puppet(a.host), cluster.puppet(c.host)
    on_a.put(["k"], 1000, 0, replicas=3)
    cluster.found(["k"], 3)
    assert cluster.master_process is not None
    cluster.master_process.kill()
    if verb == "remove":
        (unsure,) = on_a.remove(["k"])
        assert "while the master is away" in str(unsure)
    else:
        assert on_a.put(["k"], 1000, 7, replace=True)[0][0] == "stored"
    cluster.start_master()
    cluster.wait_alive(3)
    for node in (a, b, c):
        until(lambda node=node: node.metric("master_joined"))
    expected = [None] if verb == "remove" else [[1000, checksum("k", 7, 1000)]]
    measured("the old bytes are gone", lambda: on_c.get(["k"]) == expected, BACK_S)
    assert on_a.get(["k"]) == expected


def test_a_partition_while_the_master_restarts(cluster: Cluster) -> None:
    """The new master has never heard of the removal. The node that was away must not bring the key back."""
    a, b = cluster.start("a", "b")
    assert cluster.master_host is not None
    on_a = cluster.puppet(a.host)
    on_a.put(["k", "kept"], 1000, 0, replicas=2)
    cluster.found(["k", "kept"], 2)
    cluster.network.cut((b.host, cluster.master_host), (b.host, a.host))
    until(lambda: cluster.states()[b.name] == "suspect")
    (unsure,) = on_a.remove(["k"])
    assert f"node {b.name} on " in str(unsure)
    assert cluster.master_process is not None
    cluster.master_process.kill()
    cluster.start_master()
    cluster.wait_alive(1)
    assert on_a.get(["k"]) == [None]
    cluster.network.heal()
    cluster.wait_alive(2)
    until(lambda: b.metric("master_joined"))
    cluster.found(["kept"], 2)  # b has told what it holds
    found = on_a.get(["k"])
    print(f"the removed key after the master's restart: {found}")
    assert found == [None]
