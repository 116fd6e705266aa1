"""One pool of several hosts: what is put on one is read on the others, and which way its bytes went."""

from __future__ import annotations

from .bed import MIB, Cluster, until
from .puppet import checksum


def test_put_on_one_host_get_on_another(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    writer, reader = cluster.puppet(a.host), cluster.puppet(b.host)
    names = [f"k{i}" for i in range(8)]
    before = a.metrics(), b.metrics()
    assert [row[0] for row in writer.put(names, 100_000)] == ["stored"] * 8
    assert a.moved(before[0]) == (0, 0)  # local first, and by memory
    assert a.since(before[0])["stored_bytes_total"] == 800_000
    cluster.found(names)
    assert reader.has(names, 100_000)  # as views
    assert a.moved(before[0]) == (800_000, 0)
    assert b.moved(before[1]) == (0, 0)
    assert b.metric("objects") == 0  # a get makes no copy in the reader's node
    assert reader.has(names, 100_000, room=MIB)  # into buffers
    assert a.moved(before[0]) == (1_600_000, 0)
    assert writer.has(names, 100_000)
    assert a.moved(before[0]) == (1_600_000, 0)  # its own host reads by memory


def test_a_missing_key_is_a_miss_everywhere(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    writer, reader = cluster.puppet(a.host), cluster.puppet(b.host)
    assert reader.get(["absent"]) == [None]
    assert reader.exists(["absent"]) == ["miss"]
    writer.put(["k"], 10)
    cluster.found(["k"])
    assert reader.exists(["absent", "k"]) == ["miss", "hit"]
    assert reader.get(["absent", "k", "absent"], 10)[0::2] == [None, None]
    assert reader.remove(["k", "absent"]) == [True, False]
    assert writer.get(["k"]) == [None]
    assert a.metric("objects") == 0


def test_an_empty_and_a_large_object(cluster: Cluster) -> None:
    """The large one is bigger than a frame, the sockets' buffers and what a thread takes at a time."""
    a, b = cluster.start("a", "b", dram="256MiB")
    writer, reader = cluster.puppet(a.host), cluster.puppet(b.host)
    before = a.metrics()
    for name, size in (("empty", 0), ("large", 48 * MIB + 13)):
        writer.put([name], size)
        cluster.found([name])
        assert reader.has([name], size)
        assert reader.has([name], size, room=size)
    assert a.moved(before) == (2 * (48 * MIB + 13), 0)


def test_longest_prefix_spans_nodes(cluster: Cluster) -> None:
    a, b, c = cluster.start("a", "b", "c")
    chain = [f"block{i}" for i in range(30)]
    on_a, on_b, on_c = (cluster.puppet(node.host) for node in (a, b, c))
    on_a.put(chain[:10], 5000)
    on_b.put(chain[10:20], 5000)
    on_c.put([*chain[20:25], *chain[26:]], 5000)  # 25 is missing
    cluster.found([*chain[:25], *chain[26:]])
    before = [node.metrics() for node in (a, b, c)]
    prefix = on_a.longest_prefix(chain)
    assert (prefix["blocks"], prefix["why"]) == (25, "")
    assert prefix["holders"] == [a.name] * 10 + [b.name] * 10 + [c.name] * 5
    assert prefix["hosts"] == ["a"] * 10 + ["b"] * 10 + ["c"] * 5
    assert [node.metric("objects_pinned") for node in (a, b, c)] == [10, 10, 5]
    on_a.remove(chain)
    assert [node.metric("objects_detached") for node in (a, b, c)] == [10, 10, 5]
    rows = on_a.pinned(chain[:25])
    assert rows == [[5000, checksum(name, 0, 5000)] for name in chain[:25]]
    moved = [node.moved(was) for node, was in zip((a, b, c), before, strict=True)]
    assert moved == [(0, 0), (50_000, 0), (25_000, 0)]
    on_a.release()
    for node in (a, b, c):
        until(lambda node=node: node.metric("pins") == 0)
        assert node.metric("objects_detached") == 0


def test_replicas_lie_on_different_hosts(cluster: Cluster) -> None:
    nodes = cluster.start("a", "b", "c")
    a = nodes[0]
    writer = cluster.puppet(a.host)
    before = [node.metrics() for node in nodes]
    names = [f"k{i}" for i in range(4)]
    assert writer.put(names, 10_000, replicas=2) == [["stored", "", 2]] * 4
    holders = [node for node in nodes if node.metric("objects")]
    assert a in holders
    assert sum(node.metric("objects") for node in nodes) == 8
    received = [node.moved(was)[1] for node, was in zip(nodes, before, strict=True)]
    assert (received[0], sum(received)) == (0, 40_000)
    status, reason, copies = writer.put(["five"], 10, replicas=5)[0]
    assert (status, copies) == ("stored", 3)
    assert "not enough other hosts" in reason
    cluster.found(names, 2)
    assert writer.remove(names) == [True] * 4
    assert sum(node.metric("objects") for node in nodes) == 3


def test_two_nodes_of_one_host_hold_one_replica(cluster: Cluster) -> None:
    """They share fate, so a second copy goes to the other host."""
    (a,) = cluster.start("a")
    cluster.start_node(a.host, name="second", port=7720)
    b = cluster.start_node(cluster.host("b"))
    cluster.wait_alive(3)
    writer = cluster.puppet(a.host)
    assert writer.put(["k"], 10, replicas=2) == [["stored", "", 2]]
    assert b.metric("objects") == 1


def test_spill_when_the_own_arena_is_full(cluster: Cluster) -> None:
    """Views fill the own node: what no longer fits there goes to the other host, in the same call."""
    (a,) = cluster.start("a", dram="32MiB", pins_share_max=1.0)
    writer = cluster.puppet(a.host)
    full = [f"full{i}" for i in range(28)]
    writer.put(full, MIB)
    assert writer.hold(full) == 28
    until(lambda: cluster.free_bytes(a) < 5 * MIB)
    b = cluster.start_node(cluster.host("b"), dram="32MiB")
    cluster.wait_alive(2)
    before = b.metrics()
    more = [f"more{i}" for i in range(8)]
    assert {row[0] for row in writer.put(more, MIB)} == {"stored"}
    spilled = b.metric("objects")
    print(f"{spilled} of 8 objects were spilled")
    assert spilled >= 4
    assert b.moved(before)[1] > 0
    cluster.found(more)
    assert writer.has(more, MIB)
    assert writer.held() == [[MIB, checksum(name, 0, MIB)] for name in full]
    assert a.metric("evicted_total") == 0


def test_list_and_remove_fan_out(cluster: Cluster) -> None:
    nodes = cluster.start("a", "b", "c")
    puppets = [cluster.puppet(node.host) for node in nodes]
    for i, puppet in enumerate(puppets):
        puppet.put([f"x{i}", f"y{i}"], 100)
    cluster.found(["x0", "x1", "x2", "y0"])
    assert puppets[0].list("x") == ["x0", "x1", "x2"]
    assert puppets[2].list() == ["x0", "x1", "x2", "y0", "y1", "y2"]
    assert puppets[1].remove(["x0", "x1", "x2", "y0"]) == [True] * 4
    assert puppets[0].list() == ["y1", "y2"]


def test_replace_is_seen_from_every_host(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_a.put(["k"], 1000, 0)
    cluster.found(["k"])
    assert on_b.has(["k"], 1000, 0)
    assert on_a.put(["k"], 1000, 9, replace=True)[0][0] == "stored"
    until(lambda: on_b.has(["k"], 1000, 9))  # for some ms a miss, but never the old bytes
    assert on_b.put(["k"], 2000, 10, replace=True)[0][0] == "stored"
    until(lambda: on_a.has(["k"], 2000, 10))
    assert on_b.has(["k"], 2000, 10)
