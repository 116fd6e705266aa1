"""put(unique=True): of a key at most one value is stored in the whole pool."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ..core.store_bed import until
from .bed import Cluster
from .puppet import Failed, checksum

SIZE = 1000


def test_of_two_hosts_that_put_a_key_at_once_one_stores_it(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    names = [f"k{i}" for i in range(40)]
    with ThreadPoolExecutor(2) as pool:
        # Each key by itself, so that the two meet at many of them.
        puts = [
            pool.submit(lambda on=on, seed=seed: [on.put([n], SIZE, seed, unique=True)[0][0] for n in names])
            for on, seed in ((on_a, 1), (on_b, 2))
        ]
        outcomes = list(zip(*(put.result() for put in puts), strict=True))
    assert [sorted(pair) for pair in outcomes] == [["exists", "stored"]] * len(names)
    expected = [
        [SIZE, checksum(name, 1 if pair[0] == "stored" else 2, SIZE)]
        for name, pair in zip(names, outcomes, strict=True)
    ]
    until(lambda: on_a.get(names) == expected)
    until(lambda: on_b.get(names) == expected)


def test_a_key_that_another_host_has_exists_and_one_that_was_removed_does_not(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    names = [f"k{i}" for i in range(20)]
    on_a.put(names, SIZE, 1)
    cluster.found(names)
    assert [row[0] for row in on_b.put(names, SIZE, 2, unique=True)] == ["exists"] * len(names)
    assert b.metric("objects") == 0
    assert [row[0] for row in on_b.put(names[:1], SIZE, 2)] == ["stored"]  # that is one node's word
    for name in names:
        assert on_b.remove([name]) == [True]
        assert on_b.put([name], SIZE, 3, unique=True)[0][0] == "stored"
    until(lambda: on_a.get(names) == [[SIZE, checksum(name, 3, SIZE)] for name in names])


def test_a_key_that_another_host_has_just_removed_is_stored_and_stays(cluster: Cluster) -> None:
    """Neither the node nor the client had heard of the removal: the copy counted as one from before it."""
    nodes = cluster.start("a", "b", "c")
    on_a, on_b, on_c = (cluster.puppet(node.host) for node in nodes)
    names = [f"k{i}" for i in range(40)]
    expected = [[SIZE, checksum(name, 2, SIZE)] for name in names]
    for name, other in zip(names, (on_a, on_c) * 20, strict=True):
        on_b.put([name], SIZE, 1)
        cluster.found([name])
        assert on_b.remove([name]) == [True]
        assert other.put([name], SIZE, 2, unique=True)[0][0] == "stored"
    until(lambda: on_b.get(names) == expected)
    beats = [node.metric("master_beats_total") for node in nodes]
    for node, before in zip(nodes, beats, strict=True):
        until(lambda node=node, before=before: node.metric("master_beats_total") > before + 3)
    assert on_b.get(names) == expected


def test_without_the_master_nothing_is_stored(cluster: Cluster) -> None:
    (a,) = cluster.start("a")
    on_a = cluster.puppet(a.host)
    on_a.put(["here"], SIZE)
    assert cluster.master_process is not None
    cluster.master_process.kill()
    assert on_a.put(["here"], SIZE, 1, unique=True)[0][0] == "exists"
    with pytest.raises(Failed, match=r"Unavailable.*master"):
        on_a.put(["k"], SIZE, 1, unique=True)
    assert on_a.get(["k"]) == [None]
