"""kill -9 of the master: nothing on a host stops, nothing is lost, and its successor knows all within 3 s."""

from __future__ import annotations

import time
from itertools import chain

from ..core.store_bed import until
from .bed import MIB, Cluster
from .hosts import measured

BACK_S = 3.0  # lookups after the master's return; waits are five times as long, and print what they measured


def test_local_operations_go_on_without_a_master(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_a.put(["a"], 1000)
    on_b.put(["known", "unknown"], 1000)
    cluster.found(["a", "known", "unknown"])
    assert on_a.has(["known"], 1000, room=1000)
    assert cluster.master_process is not None
    cluster.master_process.kill()
    longest = 0.0
    for i in range(50):
        assert on_a.put([f"new{i}"], 1000)[0][0] == "stored"
        longest = max(longest, on_a.seconds)
        assert on_a.has([f"new{i}", "a"], 1000)
        longest = max(longest, on_a.seconds)
        assert on_a.longest_prefix([f"new{i}", "a"])["blocks"] == 2
        on_a.release()
        assert "while the master is away" in str(on_a.remove([f"new{i}"])[0])
        longest = max(longest, on_a.seconds)
    print(f"the longest local call without a master: {longest:.3f} s")
    assert longest < 1.0 * 5
    assert on_a.has(["known"], 1000, room=1000)  # a place that it knows
    began = time.monotonic()
    assert on_a.exists(["unknown", "a"]) == ["unknown", "hit"]
    assert on_a.get(["unknown"]) == [None]
    assert on_a.longest_prefix(["unknown"])["why"] != ""
    print(f"three lookups elsewhere without a master: {time.monotonic() - began:.3f} s")
    assert on_a.put(["two"], 1000, replicas=2)[0][0] == "stored"


def test_the_master_comes_back_and_knows_all(cluster: Cluster) -> None:
    a, b, c = cluster.start("a", "b", "c")
    puppets = [cluster.puppet(node.host) for node in (a, b, c)]
    names = [[f"{i}-{j}" for j in range(200)] for i in range(3)]
    for puppet, own in zip(puppets, names, strict=True):
        puppet.put(own, 1000)
    cluster.found([*chain.from_iterable(names)])
    for _ in range(2):
        assert cluster.master_process is not None
        cluster.master_process.kill()
        for i, puppet in enumerate(puppets):
            puppet.remove([names[i].pop()])
            puppet.put([f"{i}-new{len(names[i])}"], 1000)
            names[i].append(f"{i}-new{len(names[i])}")
        cluster.start_master()
        measured(
            "lookups are back after the master's return",
            lambda: puppets[0].longest_prefix(names[2])["blocks"] == 200,
            BACK_S,
        )
        cluster.found([*chain.from_iterable(names)])
        for puppet in puppets:  # each dials the master again in its own time
            until(lambda puppet=puppet: puppet.has([*chain.from_iterable(names)], 1000))
            assert puppet.get(["0-199", "1-199", "2-199"]) == [None] * 3


def test_what_a_new_master_has_yet_to_hear_is_not_called_a_miss(cluster: Cluster) -> None:
    """b is cut off from the new master alone. Its known places go on, of the rest nobody can say; then it is
    back, and what nobody has is a miss again."""
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    known = [f"known{i}" for i in range(32)]
    on_b.put([*known, "other"], 1000)
    cluster.found([*known, "other"])
    assert on_a.has(known, 1000, room=1000)
    assert cluster.master_host is not None
    assert cluster.master_process is not None
    cluster.master_process.kill()
    cluster.network.cut((b.host, cluster.master_host))
    cluster.start_master()
    cluster.wait_alive(1)
    until(
        lambda: (
            a.metric("master_joined")
            and on_a.longest_prefix(["other"])["why"].startswith("the master has just")
        )
    )
    assert on_a.has(known, 1000, room=1000)
    assert on_a.has(known, 1000)  # by a pin
    assert on_a.exists([known[0], "other", "absent"]) == ["hit", "unknown", "unknown"]
    cluster.network.heal()
    measured("found", lambda: on_a.has(["other"], 1000), BACK_S)
    until(lambda: on_a.exists(["other", "absent"]) == ["hit", "miss"])
    assert on_a.longest_prefix([*known, "absent"])["why"] == ""


def test_nodes_may_start_before_the_master(cluster: Cluster) -> None:
    cluster.master_host = cluster.host("m")
    a, b = cluster.start("a", "b", master=False)
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_b.put(["k"], 1000)
    assert on_a.get(["k"]) == [None]
    cluster.start_master()
    measured("found after the master's first start", lambda: on_a.has(["k"], 1000), BACK_S)


def test_a_master_that_stands_still(cluster: Cluster) -> None:
    """SIGSTOP: connections stay open, nobody answers. Local work goes on; then nobody is suspected for it."""
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_b.put(["k"], 1000)
    cluster.found(["k"])
    assert cluster.master_process is not None
    cluster.master_process.stop()
    assert on_a.put(["local"], 1000)[0][0] == "stored"
    assert on_a.seconds < 5
    print(f"put with a master that stands still: {on_a.seconds:.3f} s")
    assert on_a.exists(["k", "local"])[1] == "hit"
    assert on_a.seconds < 5
    print(f"exists with a master that stands still: {on_a.seconds:.3f} s")
    cluster.master_process.resume()
    measured("found after it went on", lambda: on_a.has(["k"], 1000), BACK_S)
    until(lambda: set(cluster.states().values()) == {"alive"})


def test_traffic_does_not_notice_the_master(cluster: Cluster) -> None:
    """Gets of known places from another host, while the master dies and comes back: no error, no long wait,
    no miss, also while the new master has not heard of the holder."""
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    names = [f"k{i}" for i in range(32)]
    on_b.put(names, 10_000)
    cluster.found(names)
    assert on_a.has(names, 10_000, room=MIB)
    before = b.metrics()
    on_a.begin("get_for", names=names, size=10_000, seconds=4.0)
    until(lambda: b.moved(before)[0] > 0)
    assert cluster.master_process is not None
    cluster.master_process.kill()
    cluster.start_master()
    counts = on_a.end()
    print(counts)
    assert counts["wrong"] == 0
    assert counts["failed"] == {}
    assert (counts["hit"] > 0, counts["miss"]) == (True, 0)
    assert counts["longest_s"] < 5
    until(lambda: on_a.has(names, 10_000))
