"""A master and its standby, in hosts of their own: what clients see when one of them dies or stands still."""

from __future__ import annotations

import json
import os
import signal
import time

from ..core.store_bed import until
from .bed import JOIN_S, Cluster, Node, master_metric
from .hosts import Process, measured

SIZE = 1000
AGAIN_S = 1.5  # lookups after the owner's death; waits are five times as long, and print what they measured


def with_a_standby(
    cluster: Cluster, patience_s: float = 0.5, **settings: object
) -> tuple[list[Node], Process]:
    """Two nodes, whose clients wait so long for a master; standby_host is known before they start."""
    cluster.start_master()
    standby = cluster.start_standby(**settings)
    nodes = cluster.start("a", "b", master=False, clients_master_timeout_s=patience_s)
    for node in nodes:
        until(lambda node=node: node.metric("masters_joined") == 2)
    cluster.wait_alive(2)
    return nodes, standby


def promote(cluster: Cluster) -> None:
    assert cluster.standby_host is not None
    asked = cluster.standby_host.moonpool("promote")
    assert asked.wait() == 0, asked.text()
    assert "taken over" in asked.text()


def masters_of(cluster: Cluster) -> dict[str, dict[str, object]]:
    """What `moonpool status` says of each master, by address."""
    assert cluster.master_host is not None
    assert cluster.standby_host is not None
    both = f"{cluster.master},{cluster.standby_host.address}:{cluster.master.rpartition(':')[2]}"
    asked = cluster.master_host.moonpool("status", "--json", "--master", both)
    assert asked.wait() in (0, 3), asked.text()
    return {row["address"]: row for row in json.loads(asked.text())["masters"]}


def test_status_says_which_master_serves_and_how_far_its_standby_is(cluster: Cluster) -> None:
    with_a_standby(cluster)
    assert cluster.standby_host is not None
    owner, standby = masters_of(cluster).values()
    assert (owner["role"], owner["attached"], owner["is_whole"], owner["nodes"]) == ("owner", True, True, 2)
    assert (standby["role"], standby["other"], standby["is_whole"]) == ("standby", cluster.master, True)
    assert cluster.master_process is not None
    cluster.master_process.kill()
    until(lambda: not master_metric(cluster.standby_host, "is_following"))
    promote(cluster)
    dead, serving = masters_of(cluster).values()
    assert dead["role"] == ""
    assert cluster.master in str(dead["why"])
    assert (serving["role"], serving["attached"]) == ("owner", False)


def test_a_standby_answers_at_once_and_orders_removals_once_it_is_promoted(cluster: Cluster) -> None:
    (a, b), _ = with_a_standby(cluster)
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    names = [f"k{i}" for i in range(50)]
    on_b.put(names, SIZE)
    cluster.found(names)
    assert on_a.remove(["k0"]) == [True]
    before = {node.name: node.metric("master_inventories_total") for node in (a, b)}
    assert cluster.master_process is not None
    cluster.master_process.kill()
    # A process that has looked up none of these yet.
    fresh = cluster.puppet(a.host)
    measured("lookups answered by the standby", lambda: fresh.has(names[1:], SIZE, room=SIZE), AGAIN_S)
    assert fresh.get(["k0"]) == [None]
    refused = str(on_a.remove(["k1"])[0])
    assert refused not in ("True", "False")
    promote(cluster)
    assert on_a.put(["k2"], SIZE, 1, replace=True)[0][0] == "stored"
    until(lambda: on_a.remove(["k3"]) == [True])
    assert on_b.get(["k3"]) == [None]
    until(lambda: on_b.has(["k2"], SIZE, 1, room=SIZE))  # the new bytes are told some milliseconds later
    after = {node.name: node.metric("master_inventories_total") for node in (a, b)}
    assert after == before


def test_an_owner_hands_over_while_clients_remove_and_read_and_then_follows(cluster: Cluster) -> None:
    """And back, so that each of the two can be stopped and upgraded; every call is answered as before."""
    (a, b), _ = with_a_standby(cluster, patience_s=10.0)
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    names = [f"k{i}" for i in range(40)]
    on_b.put(names, SIZE)
    cluster.found(names)
    assert on_a.has(names, SIZE, room=SIZE)
    before = {node.name: node.metric("master_inventories_total") for node in (a, b)}
    assert cluster.master_host is not None
    assert cluster.standby_host is not None
    hosts = [cluster.master_host, cluster.standby_host]
    for round_, heir in enumerate((hosts[1], hosts[0])):
        other = hosts[round_]
        asked = heir.moonpool("promote")
        removed = 0
        while asked.is_running or removed < 5:
            name = f"r{round_}-{removed}"
            assert on_b.put([name], SIZE, replace=True)[0][0] == "stored"
            assert on_a.remove([name]) == [True], name
            assert on_b.exists([name]) == ["miss"]
            removed += 1
        assert asked.wait() == 0, asked.text()
        assert "taken over" in asked.text()
        assert master_metric(heir, "is_owner")
        assert not master_metric(other, "is_owner")
        assert on_a.remove([names[round_]]) == [True]
        assert on_b.get([names[round_]]) == [None]
        assert on_a.has(names[2:], SIZE, room=SIZE)
        if round_ == 0:
            after = {node.name: node.metric("master_inventories_total") for node in (a, b)}
            assert after[a.name] <= before[a.name] + 1  # that of the former owner alone, as a standby
        until(lambda heir=heir: master_metric(heir, "standby_is_whole"), JOIN_S)
        for node in (a, b):
            until(lambda node=node: node.metric("masters_joined") == 2, JOIN_S)


def test_a_standby_that_nodes_have_yet_to_join_is_not_handed_to(cluster: Cluster) -> None:
    cluster.start_master()
    [a] = cluster.start("a", master=False)
    cluster.network.cut((a.host, cluster.host("s")))  # the node learns of it, and does not reach it
    cluster.start_standby()
    assert cluster.standby_host is not None
    asked = cluster.standby_host.moonpool("promote")
    assert asked.wait() != 0
    assert "of 1 nodes 0 have told the standby what they hold" in asked.text()
    assert cluster.master_host is not None
    assert master_metric(cluster.master_host, "is_owner")
    on_a = cluster.puppet(a.host)
    on_a.put(["k"], SIZE)
    assert on_a.remove(["k"]) == [True]


def test_an_owner_that_stands_still_and_is_back_after_a_takeover_serves_no_longer(cluster: Cluster) -> None:
    (a, b), _ = with_a_standby(cluster)
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_b.put(["old", "kept"], SIZE)
    cluster.found(["old", "kept"])
    assert cluster.master_process is not None
    assert cluster.master_host is not None
    owner = cluster.master_process.pid
    os.kill(owner, signal.SIGSTOP)
    try:
        assert cluster.standby_host is not None
        standby = cluster.standby_host
        until(lambda: not master_metric(standby, "is_following"))
        promote(cluster)
        until(lambda: on_a.remove(["old"]) == [True] or on_a.exists(["old"]) == ["miss"])
    finally:
        os.kill(owner, signal.SIGCONT)
    until(lambda: not master_metric(cluster.master_host, "is_owner"), 20)
    until(lambda: on_a.has(["kept"], SIZE, room=SIZE))
    assert on_b.get(["old"]) == [None]
    assert on_a.remove(["kept"]) == [True]


def test_without_its_standby_an_owner_removes_nothing_until_the_standby_is_back(cluster: Cluster) -> None:
    (a, b), standby = with_a_standby(cluster)
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_b.put(["k", "other"], SIZE)
    cluster.found(["k", "other"])
    standby.kill()
    assert cluster.master_host is not None
    owner = cluster.master_host
    until(lambda: not master_metric(owner, "standby_attached"))
    began_s = time.monotonic()
    assert on_a.remove(["k"]) not in ([True], [False])
    print(f"refused after {time.monotonic() - began_s:.3f} s")
    assert on_a.has(["other"], SIZE, room=SIZE)
    cluster.start_standby()
    until(lambda: on_a.remove(["other"]) == [True])
    assert on_b.get(["other"]) == [None]


def test_a_standby_that_is_stopped_leaves_the_owner_alone(cluster: Cluster) -> None:
    (a, b), standby = with_a_standby(cluster)
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_b.put(["k"], SIZE)
    cluster.found(["k"])
    assert standby.terminate() == 0
    assert cluster.master_host is not None
    owner = cluster.master_host
    until(lambda: not master_metric(owner, "standby_attached"))
    assert on_a.remove(["k"]) == [True]
    assert on_b.get(["k"]) == [None]


def test_a_standby_takes_over_by_itself_where_it_is_told_to(cluster: Cluster) -> None:
    (a, b), _ = with_a_standby(cluster, take_over_after_s=0.5)
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_b.put(["k"], SIZE)
    cluster.found(["k"])
    assert cluster.master_process is not None
    cluster.master_process.kill()
    until(lambda: on_a.remove(["k"]) == [True] or on_a.exists(["k"]) == ["miss"])
    assert on_b.get(["k"]) == [None]
    assert on_a.put(["k"], SIZE, 1, replicas=2)[0][0] == "stored"
    until(lambda: on_b.has(["k"], SIZE, 1))
