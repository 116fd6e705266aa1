"""One order of removals and replacements: two hosts at a time, nodes that restart, masters that come anew."""

from __future__ import annotations

import os
import signal

import pytest

from ..core.store_bed import until
from .bed import Cluster, Node
from .puppet import checksum, replaced_at_once

SIZE = 1000
SSD = '["/run/ssd:64MiB"]'  # of the host alone, for as long as it lives


def with_ssd(cluster: Cluster) -> list[Node]:
    """Three nodes, of which the last has an SSD."""
    a, b = cluster.start("a", "b")
    return [a, b, cluster.start_node(cluster.host("c"), ssd=SSD)]


def test_two_hosts_that_replace_a_key_at_once_read_the_same_value(cluster: Cluster) -> None:
    a, b, c = cluster.start("a", "b", "c")
    on_a, on_b, on_c = (cluster.puppet(node.host) for node in (a, b, c))
    names = [f"k{i}" for i in range(40)]
    values = replaced_at_once(on_a, on_b, names, SIZE)
    until(lambda: on_b.get(names) == values)  # a miss for a moment, never another value
    until(lambda: on_c.get(names) == values)


def test_a_holder_that_is_back_within_a_removal_does_not_bring_the_key_back(
    cluster: Cluster,
) -> None:
    """Another holder stands still, so the removal is under way while this one restarts with its SSD."""
    a, b, c = with_ssd(cluster)
    on_a = cluster.puppet(a.host)
    on_a.put(["k", "kept"], SIZE, 0, replicas=3)
    cluster.found(["k", "kept"], 3)
    os.kill(b.process.pid, signal.SIGSTOP)
    try:
        on_a.begin("remove", names=["k"])
        c.process.terminate()
        again = cluster.start_node(c.host, ssd=SSD, name=c.name)
        on_a.end()
    finally:
        os.kill(b.process.pid, signal.SIGCONT)
    until(lambda: cluster.states()[b.name] == "alive")
    until(lambda: again.metric("ssd_objects") == 1)
    assert cluster.puppet(c.host).get(["k"]) == [None]
    until(lambda: on_a.get(["k"]) == [None])


@pytest.mark.parametrize("name", ["c", "renamed"])
def test_a_node_that_was_rebooted_loses_what_was_removed_and_no_more(cluster: Cluster, name: str) -> None:
    """It comes back under another host id, to a master that was restarted meanwhile."""
    a, _, c = with_ssd(cluster)
    names = [f"k{i}" for i in range(20)]
    on_a, on_c = cluster.puppet(a.host), cluster.puppet(c.host)
    on_c.put(names, SIZE)
    on_a.put(["unrelated"], SIZE)
    cluster.found([*names, "unrelated"])
    c.process.terminate()
    until(lambda: cluster.states().get(c.name) != "alive")
    assert on_a.remove(["unrelated", names[0]]) == [True, False]
    assert cluster.master_process is not None
    cluster.master_process.kill()
    cluster.start_master()
    cluster.wait_alive(2)
    for node in cluster.nodes[:2]:
        until(lambda node=node: node.metric("master_joined"))
    on_a.put(["another"], SIZE)
    on_a.remove(["another"])
    again = cluster.start_node(c.host, ssd=SSD, name=name, host_id="c-boot-2")
    until(lambda: again.metric("ssd_objects") == len(names) - 1)
    cluster.found(names[1:])
    assert on_a.has(names[1:], SIZE)
    assert on_a.get(names[:1]) == [None]


def test_a_node_that_was_away_keeps_what_nobody_removed(cluster: Cluster) -> None:
    """It is out of touch while the master restarts and an unrelated key is removed."""
    a, b = cluster.start("a", "b")
    assert cluster.master_host is not None
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    names = [f"k{i}" for i in range(100)]
    on_b.put(names, SIZE)
    cluster.found(names)
    cluster.network.cut((b.host, cluster.master_host), (b.host, a.host))
    until(lambda: cluster.states()[b.name] == "suspect")
    on_a.put(["unrelated"], SIZE)
    assert on_a.remove(["unrelated"]) == [True]
    assert cluster.master_process is not None
    cluster.master_process.kill()
    cluster.start_master()
    cluster.wait_alive(1)
    on_a.put(["unrelated"], SIZE)
    on_a.remove(["unrelated"])
    cluster.network.heal()
    cluster.wait_alive(2)
    cluster.found(names)
    assert on_a.has(names, SIZE)
    assert b.metric("objects") == len(names)


def test_a_replacement_says_which_node_may_still_have_the_older_value(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    on_a = cluster.puppet(a.host)
    on_a.put(["k", "alone"], SIZE, 0)
    cluster.puppet(b.host).put(["k"], SIZE, 1, replace=True)
    cluster.found(["k", "alone"])
    b.process.stop()
    try:
        status, reason, _ = on_a.put(["k"], SIZE, 2, replace=True)[0]
        assert status == "stored"
        assert "older value" in reason
        assert b.name in reason
        assert on_a.put(["alone"], SIZE, 2, replace=True)[0][:2] == ["stored", ""]
    finally:
        b.process.resume()
    until(lambda: cluster.states()[b.name] == "alive")
    until(lambda: cluster.puppet(b.host).get(["k"]) == [[SIZE, checksum("k", 2, SIZE)]])
