"""kill -9 of nodes, writers and readers: who has a copy serves it, nobody waits long, memory comes back."""

from __future__ import annotations

import pytest

from ..core.store_bed import until
from .bed import MIB, Cluster
from .hosts import measured
from .puppet import checksum, unless_lost

SUSPECTED_S = 1.0  # the promise; waits are five times as long, and print what they measured


def test_a_dead_node_is_suspected_and_avoided(cluster: Cluster) -> None:
    a, b, c = cluster.start("a", "b", "c")
    writer, reader = cluster.puppet(b.host), cluster.puppet(a.host)
    names = [f"k{i}" for i in range(8)]
    writer.put(names, 10_000)
    cluster.found(names)
    assert reader.longest_prefix(names)["blocks"] == 8
    reader.release()
    b.kill()
    measured("suspected", lambda: cluster.states()[b.name] == "suspect", SUSPECTED_S)
    prefix = measured(
        "no longer promised",
        lambda: (p := reader.longest_prefix(names))["blocks"] == 0 and p,
        SUSPECTED_S,
    )
    print(f"longest_prefix says: {prefix['why']!r}")
    assert reader.get(names) == [None] * 8
    assert reader.seconds < 5 * SUSPECTED_S
    assert set(reader.exists(names)) <= {"miss", "unknown"}
    assert [row[0] for row in reader.put(names, 10_000, 1, replicas=2)] == ["stored"] * 8
    assert c.metric("objects") == 8
    assert reader.has(names, 10_000, 1)


def test_a_holder_that_stands_still_is_no_miss(cluster: Cluster) -> None:
    """It may answer again, and have it: also once the master no longer sends anybody there."""
    a, b = cluster.start("a", "b")
    # The master gets a quarter of the patience: what it does not say in time is unknown, too.
    on_a, on_b = cluster.puppet(a.host, timeout_s=20.0), cluster.puppet(b.host)
    on_b.put(["k"], 1000)
    cluster.found(["k"])
    b.process.stop()
    until(lambda: cluster.states()[b.name] == "suspect")
    assert on_a.exists(["k", "absent"]) == ["unknown", "miss"]
    assert "silent" in on_a.longest_prefix(["k"])["why"]
    b.process.resume()
    until(lambda: on_a.exists(["k"]) == ["hit"])
    until(lambda: on_a.longest_prefix(["k", "absent"])["why"] == "")


def test_with_a_replica_nothing_is_lost(cluster: Cluster) -> None:
    """The reader is in a third host, so each byte comes by TCP. No call sees the death."""
    a, b, c = cluster.start("a", "b", "c")
    writer, reader = cluster.puppet(a.host), cluster.puppet(c.host)
    names = [f"k{i}" for i in range(16)]
    assert [row[2] for row in writer.put(names, 50_000, replicas=2)] == [2] * 16
    cluster.found(names, 2)
    assert reader.has(names, 50_000)
    other = b if b.metric("objects") else c
    assert other.metric("objects") == 16
    a.kill()
    assert reader.has(names, 50_000)  # at once: the holder that is gone is followed by the next
    print(f"the first get after the death: {reader.seconds:.3f} s")
    assert reader.seconds < 5
    prefix = reader.longest_prefix(names)
    assert prefix["blocks"] == 16
    assert set(prefix["holders"]) == {other.name}


def test_puts_go_elsewhere_in_the_same_call(cluster: Cluster) -> None:
    """With the own node dead, and with the node dead that the master would choose for the second copy."""
    a, b, c = cluster.start("a", "b", "c")
    writer = cluster.puppet(a.host)
    writer.put(["warm"], 1000, replicas=3)
    cluster.found(["warm"], 3)
    b.kill()
    rows = writer.put([f"k{i}" for i in range(4)], 10_000, replicas=2)
    print(f"put beside a dead node: {writer.seconds:.3f} s, {rows[0]}")
    assert [row[0] for row in rows] == ["stored"] * 4
    assert [row[2] for row in rows] == [2] * 4
    assert writer.seconds < 5
    a.kill()
    rows = writer.put([f"k{i}" for i in range(4, 8)], 10_000)
    print(f"put with the own node dead: {writer.seconds:.3f} s")
    assert [row[0] for row in rows] == ["stored"] * 4
    assert writer.seconds < 5
    assert c.metric("objects") == 9
    cluster.found([f"k{i}" for i in range(8)])
    assert writer.has([f"k{i}" for i in range(8)], 10_000)


def test_a_node_that_comes_back_is_used_again(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_b.put(["k"], 1000)
    cluster.found(["k"])
    assert on_a.has(["k"], 1000)
    b.kill()
    until(lambda: cluster.states()[b.name] == "suspect")
    cluster.start_node(b.host)
    measured("alive again", lambda: cluster.states()[b.name] == "alive", 3)
    assert on_a.get(["k"]) == [None]  # its memory is gone, and nobody promises otherwise
    assert on_a.exists(["k"]) == ["miss"]
    until(lambda: on_b.call("exists", names=["k"]) == ["miss"])  # its client connects again by itself
    on_b.put(["k"], 2000, 1)
    cluster.found(["k"])
    assert on_a.has(["k"], 2000, 1)


def test_views_and_pins_at_a_dead_node(cluster: Cluster) -> None:
    """What was read stays readable; what was only pinned is a miss or an error, never other bytes."""
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    names = ["k0", "k1"]
    on_b.put(names, 10_000)
    cluster.found(names)
    assert on_a.hold(names) == 2
    before = on_a.held()
    assert on_a.longest_prefix(names)["blocks"] == 2
    b.kill()
    assert on_a.held() == before
    assert unless_lost(lambda: on_a.pinned(names)) in (None, [None, None])
    assert on_a.seconds < 5
    on_a.release()


def test_a_reader_that_is_killed_lets_go_of_remote_pins(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b", dram="32MiB", remote_pins_share_max=0.75)
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    names = [f"p{i}" for i in range(20)]
    on_b.put(names, MIB)
    cluster.found(names)
    assert on_a.longest_prefix(names)["blocks"] == 20
    assert b.metric("objects_pinned") == 20
    on_b.remove(names)
    assert b.metric("objects_detached") == 20
    # Pinned by a process of another host: the memory is not used again, whatever is put.
    refused = on_b.put([f"fill{i}" for i in range(20)], MIB)
    assert on_a.pinned(names[:1]) == on_a.pinned(names[:1]) != [None]
    print([row[0] for row in refused])
    on_a.kill()
    measured("pins are gone", lambda: b.metric("pins") == 0, 1)
    assert b.metric("objects_detached") == 0
    assert [row[0] for row in on_b.put([f"after{i}" for i in range(10)], MIB)] == ["stored"] * 10


def test_a_reader_behind_a_dead_path_lets_go_of_its_pins(cluster: Cluster) -> None:
    """No FIN ever comes: keepalive or a failed send must notice."""
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_b.put(["p"], MIB)
    cluster.found(["p"])
    assert on_a.longest_prefix(["p"])["blocks"] == 1
    cluster.network.cut((a.host, b.host))
    on_a.kill()
    assert b.metric("pins") == 1
    measured("pins of a silent host are gone", lambda: b.metric("pins") == 0, 12)


def test_a_writer_killed_in_mid_put_over_tcp(cluster: Cluster) -> None:
    """Its own node is gone, so that it puts over TCP. Nothing of the broken put shows; its memory is back."""
    a, b = cluster.start("a", "b", dram="256MiB")
    for _ in range(3):
        writer = cluster.puppet(a.host, node=f"tcp://{b.address}")
        before = b.metrics()
        writer.begin("put_for_ever", names=["w0"], size=48 * MIB)
        until(lambda before=before: b.moved(before)[1] > 4 * MIB)
        writer.kill()
        measured("leases came back", lambda: b.metric("leased_bytes") == 0, 1)
        reader = cluster.puppet(a.host)
        for row in reader.get(["w0"]):
            assert row is None or row[0] == 48 * MIB
        reader.remove(["w0"])
        metrics = b.metrics()
        assert metrics["object_bytes"] == 0
        assert metrics["arena_free_bytes"] == metrics["arena_ready_bytes"]


def test_a_peer_killed_in_mid_transfer(cluster: Cluster) -> None:
    """A get of a large object, its holder killed while the bytes come: a miss or the other copy, in time."""
    a, b, c = cluster.start("a", "b", "c", dram="256MiB")
    writer, reader = cluster.puppet(a.host), cluster.puppet(c.host)
    writer.put(["one"], 60 * MIB)
    writer.put(["two"], 60 * MIB, replicas=2)
    cluster.found(["one"])
    cluster.found(["two"], 2)
    before = a.metrics()
    reader.begin("get", names=["one"], size=None, options={})
    until(lambda: a.process.is_running and a.metric("connections") > before["connections"] - 1)
    a.kill()
    rows = unless_lost(reader.end)
    assert rows in (None, [None], [[60 * MIB, checksum("one", 0, 60 * MIB)]])
    print(f"the get ended after {reader.seconds:.3f} s")
    assert reader.seconds < 10
    if b.metric("objects"):
        assert reader.has(["two"], 60 * MIB)


@pytest.mark.parametrize("signal", ["kill", "terminate"])
def test_a_node_without_replicas_costs_its_own_blocks_only(cluster: Cluster, signal: str) -> None:
    a, b, c = cluster.start("a", "b", "c")
    puppets = {node.name: cluster.puppet(node.host) for node in (a, b, c)}
    for node in (a, b, c):
        puppets[node.name].put([f"{node.name}-{i}" for i in range(4)], 1000)
        cluster.found([f"{node.name}-{i}" for i in range(4)])
    getattr(b.process, signal)()
    until(lambda: cluster.states().get(b.name) != "alive")
    for reader in (puppets[a.name], puppets[c.name]):
        for node in (a, c):
            assert reader.has([f"{node.name}-{i}" for i in range(4)], 1000)
        assert reader.get([f"{b.name}-0"]) == [None]
    rows = cluster.members()
    assert len([row for row in rows if row.state == "alive"]) == 2
