"""The node asks the master for the processes of its host: one connection of clients for each host, and a way
past the node for those whose node stands still, is gone, or does not relay."""

from __future__ import annotations

from ..core.store_bed import until
from .bed import Cluster, Node, master_metric
from .puppet import Puppet

SIZE = 1000
PROCESSES = 4
BACK_S = 30.0  # a process tries its node again 10 s after it went past it


def clients(cluster: Cluster) -> int:
    """Connections of clients that the master has, but for the test's own."""
    assert cluster.master_host is not None
    return master_metric(cluster.master_host, "connections_clients") - 1


def askers(cluster: Cluster, node: Node, names: list[str], **options: object) -> list[Puppet]:
    """Processes of the node's host that have asked the master."""
    puppets = [cluster.puppet(node.host, **options) for _ in range(PROCESSES)]
    for puppet in puppets:
        until(lambda puppet=puppet: puppet.has(names, SIZE, room=SIZE))
    return puppets


def test_processes_of_a_host_share_one_connection_to_the_master(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b", relay="always")
    cluster.puppet(b.host).put(["k"], SIZE)
    cluster.found(["k"])
    puppets = askers(cluster, a, ["k"])
    assert clients(cluster) == 1  # that of b put at its own node, and asked for nothing
    assert a.metric("relay_connections") == PROCESSES
    assert a.metric("relay_masters_connected") == 1
    for i, puppet in enumerate(puppets):
        assert puppet.put([f"own{i}"], SIZE, replicas=2)[0][0] == "stored"
        assert puppet.remove([f"own{i}"]) == [True]
        assert puppet.exists([f"own{i}", "k", "absent"]) == ["miss", "hit", "miss"]
    assert clients(cluster) == 1
    for puppet in puppets:
        puppet.close()
    until(lambda: a.metric("relay_connections") == 0)


def test_a_node_that_does_not_relay_leaves_each_process_its_own_connection(cluster: Cluster) -> None:
    """As one of the release before does not: neither says in WELCOME that it relays."""
    a, b = cluster.start("a", "b", relay="never")
    cluster.puppet(b.host).put(["k"], SIZE)
    cluster.found(["k"])
    askers(cluster, a, ["k"])
    assert clients(cluster) == PROCESSES
    assert "relay_connections" not in a.metrics()


def test_in_a_small_pool_each_process_has_its_own_connection(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    cluster.puppet(b.host).put(["k"], SIZE)
    cluster.found(["k"])
    askers(cluster, a, ["k"])
    assert clients(cluster) == PROCESSES
    assert a.metric("relay_connections") == 0


def test_after_the_masters_death_all_ask_its_successor_by_their_node(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b", relay="always")
    on_b = cluster.puppet(b.host)
    on_b.put(["k"], SIZE)
    cluster.found(["k"])
    puppets = askers(cluster, a, ["k"])
    assert cluster.master_process is not None
    cluster.master_process.kill()
    for puppet in puppets:
        assert puppet.exists(["unknown"]) == ["unknown"]
        assert puppet.seconds < 5
    cluster.start_master()
    on_b.put(["later"], SIZE)
    cluster.found(["k", "later"])
    for puppet in puppets:
        until(lambda puppet=puppet: puppet.has(["k", "later"], SIZE, room=SIZE))
    assert clients(cluster) == 1
    assert a.metric("relay_connections") == PROCESSES


def test_a_node_that_stands_still_keeps_its_processes_from_no_other_node(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b", relay="always")
    names = [f"k{i}" for i in range(10)]
    cluster.puppet(b.host).put(names, SIZE)
    cluster.found(names)
    puppets = askers(cluster, a, names[:1])
    a.process.stop()
    for i, puppet in enumerate(puppets):
        # What it has not asked for yet: only the master knows where that is.
        assert puppet.has([names[1 + i]], SIZE, room=SIZE)
    assert clients(cluster) >= PROCESSES
    a.process.resume()

    def all_by_the_node() -> bool:
        for puppet in puppets:
            puppet.exists(["absent"])
        return clients(cluster) == 1 and a.metric("relay_connections") == PROCESSES

    until(all_by_the_node, BACK_S)


def test_a_node_that_is_killed_keeps_its_processes_from_no_other_node(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b", relay="always")
    names = [f"k{i}" for i in range(10)]
    cluster.puppet(b.host).put(names, SIZE)
    cluster.found(names)
    puppets = askers(cluster, a, names[:1])
    a.kill()
    for i, puppet in enumerate(puppets):
        until(lambda i=i, puppet=puppet: puppet.has([names[1 + i]], SIZE, room=SIZE))


def test_the_nodes_connection_goes_to_the_standby_that_takes_over(cluster: Cluster) -> None:
    cluster.start_master()
    cluster.start_standby(take_over_after_s=0.5)
    a, b = cluster.start("a", "b", master=False, relay="always")
    for node in (a, b):
        until(lambda node=node: node.metric("masters_joined") == 2)
    cluster.wait_alive(2)
    on_b = cluster.puppet(b.host)
    on_b.put(["k", "other"], SIZE)
    cluster.found(["k", "other"])
    puppets = askers(cluster, a, ["k"])
    assert cluster.master_process is not None
    cluster.master_process.kill()
    for puppet in puppets:
        until(lambda puppet=puppet: puppet.has(["other"], SIZE, room=SIZE))
    until(lambda: puppets[0].remove(["other"]) == [True] or puppets[0].exists(["other"]) == ["miss"])
    assert on_b.get(["other"]) == [None]
    assert cluster.standby_host is not None
    assert master_metric(cluster.standby_host, "connections_clients") <= 3
    assert a.metric("relay_connections") == PROCESSES
