"""A master's host dies for good, and another one takes its place at an address that no node and no client was
given: all that run find it, and nothing is restarted."""

from __future__ import annotations

import json

import pytest

from ..core.store_bed import until
from .bed import JOIN_S, MASTER_PORT, Cluster, Node, master_metric
from .hosts import Host, Process
from .puppet import Puppet

SIZE = 1000


def start_pair(cluster: Cluster, relay: str) -> tuple[Process, Process, list[Node]]:
    """Owner and standby, which all are given, and two nodes."""
    owner = cluster.start_master()
    standby = cluster.start_standby()
    nodes = cluster.start("a", "b", master=False, relay=relay)
    for node in nodes:
        until(lambda node=node: node.metric("masters_joined") == 2)
    cluster.wait_alive(2)
    return owner, standby, nodes


def start_third(cluster: Cluster, owner: Host, name: str = "third") -> tuple[Host, Process]:
    """A standby of that owner, which knows all, at an address in no list."""
    host = cluster.host(name)
    process = host.moonpool(
        "master",
        "--listen",
        f"{host.address}:{MASTER_PORT}",
        "--standby-of",
        f"{owner.address}:{MASTER_PORT}",
    )
    process.said("^moonpool master")
    until(lambda: master_metric(owner, "standby_is_whole"), JOIN_S)
    return host, process


def promote(host: Host) -> None:
    asked = host.moonpool("promote")
    assert asked.wait() == 0, asked.text()


def every_verb(here: Puppet, there: Puppet, kept: list[str], prefix: str) -> None:
    """Put, get, replace and remove, and what was put before."""
    names = [f"{prefix}{i}" for i in range(10)]
    assert here.put(names, SIZE)[0][0] == "stored"
    until(lambda: there.has(names, SIZE, room=SIZE))
    assert there.has(kept, SIZE, room=SIZE)
    assert there.put(names[:1], SIZE, 1, replace=True)[0][0] == "stored"
    until(lambda: here.has(names[:1], SIZE, 1, room=SIZE))
    assert there.remove(names) == [True] * len(names)
    assert here.get(names) == [None] * len(names)
    # A master that started less than 5 s ago says of no key yet that it is nowhere.
    until(lambda: here.exists([*names[:1], *kept[:1]]) == ["miss", "hit"], JOIN_S)


@pytest.mark.parametrize("relay", ["never", "always"])
def test_both_masters_of_the_list_die_and_the_third_is_promoted(cluster: Cluster, relay: str) -> None:
    owner, standby, (a, b) = start_pair(cluster, relay)
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    kept = [f"k{i}" for i in range(20)]
    on_b.put(kept, SIZE)
    cluster.found(kept)
    assert on_a.has(kept, SIZE, room=SIZE)
    assert cluster.master_host is not None
    standby.kill()
    until(lambda: not master_metric(cluster.master_host, "standby_attached"))
    third, _ = start_third(cluster, cluster.master_host)
    for node in (a, b):
        until(lambda node=node: node.metric("masters_learned") == 1)
        until(lambda node=node: node.metric("masters_joined") == 2, JOIN_S)
    # Its word is waited for again; a try that fails may have removed the key.
    until(lambda: on_a.remove(["k19"]) in ([True], [False]) and on_b.get(["k19"]) == [None])
    on_a.exists(["absent"])  # as any question, it reads what the master has told since the last one
    on_b.exists(["absent"])
    owner.kill()
    until(lambda: not master_metric(third, "is_following"))
    promote(third)
    until(lambda: on_a.exists(kept[:1]) == ["hit"])
    until(lambda: on_b.exists(kept[:1]) == ["hit"])
    every_verb(on_a, on_b, kept[:19], "later")
    assert on_b.get(["k19"]) == [None]
    fresh = cluster.puppet(a.host)  # of a process that starts now: its node tells it
    until(lambda: fresh.exists([kept[1], "absent"]) == ["hit", "miss"], JOIN_S)


def test_status_says_which_masters_are_learned(cluster: Cluster) -> None:
    _, standby, _ = start_pair(cluster, "auto")
    assert cluster.master_host is not None
    standby.kill()
    until(lambda: not master_metric(cluster.master_host, "standby_attached"))
    third, _ = start_third(cluster, cluster.master_host)
    asked = cluster.master_host.moonpool("status", "--json", "--master", cluster.masters)
    assert asked.wait() in (0, 3), asked.text()
    rows = {row["address"]: row for row in json.loads(asked.text())["masters"]}
    assert {address: row["learned"] for address, row in rows.items()} == {
        cluster.master: False,
        cluster.masters.partition(",")[2]: False,
        f"{third.address}:{MASTER_PORT}": True,
    }
    shown = cluster.master_host.moonpool("status", "--once", "--master", cluster.masters)
    assert shown.wait() in (0, 3)
    assert "(learned)" in shown.text()


def test_a_node_that_starts_with_the_old_list_finds_the_owner_by_the_standby(cluster: Cluster) -> None:
    """The owner moved to a host that is in no list; what is listed is a standby by now, or does not run."""
    owner, standby, (a, b) = start_pair(cluster, "auto")
    on_b = cluster.puppet(b.host)
    on_b.put(["k"], SIZE)
    cluster.found(["k"])
    assert cluster.master_host is not None
    assert cluster.standby_host is not None
    standby.kill()
    until(lambda: not master_metric(cluster.master_host, "standby_attached"))
    third, _ = start_third(cluster, cluster.master_host)
    for node in (a, b):
        until(lambda node=node: node.metric("masters_joined") == 2, JOIN_S)
    owner.kill()
    until(lambda: not master_metric(third, "is_following"))
    promote(third)
    listed = cluster.standby_host
    cluster.master_host = third  # whose standby the listed one is from now on
    cluster.start_standby()
    a.process.terminate()
    until(lambda: not a.process.is_running)
    cluster.master_host = cluster.host("m")
    again = cluster.start_node(a.host, name=a.name)
    until(lambda: again.metric("masters_joined") == 2, JOIN_S)
    assert again.metric("masters_learned") == 1
    on_again = cluster.puppet(a.host)
    until(lambda: on_again.has(["k"], SIZE, room=SIZE))
    assert on_again.remove(["k"]) == [True]
    assert on_b.get(["k"]) == [None]
    assert not master_metric(listed, "is_owner")


def test_an_owner_hands_over_to_a_master_in_no_list_and_no_call_fails(cluster: Cluster) -> None:
    cluster.start_master()
    a, b = cluster.start("a", "b", master=False, clients_master_timeout_s=10.0)
    cluster.wait_alive(2)
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_b.put(["kept"], SIZE)
    cluster.found(["kept"])
    assert cluster.master_host is not None
    third, _ = start_third(cluster, cluster.master_host)
    for node in (a, b):
        until(lambda node=node: node.metric("masters_joined") == 2, JOIN_S)
    asked = third.moonpool("promote", "--graceful")
    removed = 0
    while asked.is_running or removed < 5:
        name = f"r{removed}"
        assert on_b.put([name], SIZE, replace=True)[0][0] == "stored"
        assert on_a.remove([name]) == [True], name
        assert on_b.exists([name]) == ["miss"]
        removed += 1
    assert asked.wait() == 0, asked.text()
    assert master_metric(third, "is_owner")
    assert not master_metric(cluster.master_host, "is_owner")
    assert on_a.has(["kept"], SIZE, room=SIZE)
    # What is listed refuses from now on, and names the owner.
    fresh = cluster.puppet(b.host)
    assert fresh.remove(["kept"]) == [True]
    assert on_a.get(["kept"]) == [None]
