"""Several masters, each with a range of the shards: what clients see when one of them dies."""

from __future__ import annotations

import json

from moonpool import _native

from ..core.store_bed import until
from .bed import MASTER_PORT, Cluster, Node, master_metric
from .hosts import Process
from .puppet import replaced_at_once

SIZE = 1000
COUNT = 2
SSD = '["/run/ssd:64MiB"]'  # of the host alone, for as long as it lives


def range_of(name: str) -> int:
    key: bytes = _native.key_hash("default", "default", b"", name.encode())
    return int.from_bytes(key[:8], "little") % 1024 * COUNT // 1024


def names_of(index: int, n: int, prefix: str = "k") -> list[str]:
    """The first n names of keys of that range."""
    names = (f"{prefix}{i}" for i in range(100 * n))
    return [name for name in names if range_of(name) == index][:n]


def start_range(cluster: Cluster, index: int, *more: str, host: str = "m") -> Process:
    """A master of that range, in a host of its own."""
    at = cluster.host(f"{host}{index}")
    listen = f"{at.address}:{MASTER_PORT}"
    process = at.moonpool("master", "--listen", listen, "--range", f"{index}/{COUNT}", *more)
    process.said("^moonpool master")
    return process


def start_ranges(cluster: Cluster) -> list[Process]:
    cluster.ranges = [f"{cluster.host(f'm{index}').address}:{MASTER_PORT}" for index in range(COUNT)]
    return [start_range(cluster, index) for index in range(COUNT)]


def start_nodes(cluster: Cluster, *names: str, masters: int = COUNT, **settings: object) -> list[Node]:
    nodes = [cluster.start_node(cluster.host(name), wait=False, **settings) for name in names]
    for node in nodes:
        node.process.said("^moonpool node")
    for node in nodes:
        until(lambda node=node: node.metric("masters_joined") == masters, 20)
    return nodes


def test_every_verb_works_on_keys_of_all_ranges(cluster: Cluster) -> None:
    start_ranges(cluster)
    a, b = start_nodes(cluster, "a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    names = [f"k{i}" for i in range(40)]
    assert {range_of(name) for name in names} == set(range(COUNT))
    on_a.put(names, SIZE)
    cluster.found(names)
    for index in range(COUNT):  # each master has the rows of its own keys, and no others
        rows = sum(range_of(name) == index for name in names)
        assert master_metric(cluster.host(f"m{index}"), "directory_rows") == rows
    assert on_b.has(names, SIZE, room=SIZE)
    assert on_b.exists([*names, "absent"]) == ["hit"] * len(names) + ["miss"]
    values = replaced_at_once(on_a, on_b, names, SIZE)  # in each range
    until(lambda: on_b.get(names) == values)
    assert on_b.remove(names) == [True] * len(names)
    assert on_a.get(names) == [None] * len(names)
    assert on_a.put(names, SIZE, 3)[0][0] == "stored"
    until(lambda: on_b.has(names, SIZE, 3, room=SIZE))
    asked = cluster.host("m0").moonpool("status", "--json", "--master", cluster.masters)
    assert asked.wait() in (0, 3), asked.text()
    page = json.loads(asked.text())
    assert [row["range"] for row in page["masters"]] == ["0/2", "1/2"]
    assert all(row["term"] > 0 for row in page["masters"])
    assert {node["name"]: node["state"] for node in page["cluster"]["nodes"]} == {
        a.name: "alive",
        b.name: "alive",
    }


def test_a_range_whose_master_dies_takes_no_other_range_along(cluster: Cluster) -> None:
    _, second = start_ranges(cluster)
    a, b = start_nodes(cluster, "a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    first_names, second_names = names_of(0, 20), names_of(1, 20)
    on_a.put([*first_names, *second_names], SIZE)
    cluster.found([*first_names, *second_names])
    assert on_b.has(second_names[:5], SIZE, room=SIZE)  # it knows where these are
    second.kill()
    until(lambda: on_b.exists(second_names[10:]) == ["unknown"] * 10)
    assert on_b.exists([*first_names, "absent" if range_of("absent") == 0 else names_of(0, 21)[20]]) == [
        *["hit"] * 20,
        "miss",
    ]
    assert on_b.has(first_names, SIZE, room=SIZE)
    assert on_b.has(second_names[:5], SIZE, room=SIZE)
    assert on_b.put(first_names, SIZE, 1, replace=True)[0][0] == "stored"
    until(lambda: on_a.has(first_names, SIZE, 1, room=SIZE))
    removed = on_b.remove([first_names[0], second_names[0]])
    assert removed[0] is True
    assert "away" in str(removed[1])  # and which nodes may still have it
    start_range(cluster, 1)
    until(lambda: a.metric("masters_joined") == COUNT, 20)
    until(lambda: on_b.exists(second_names[10:]) == ["hit"] * 10, 30)
    until(lambda: on_b.remove([second_names[10]]) == [True])
    assert on_a.get([second_names[10], first_names[0]]) == [None, None]


def test_the_standby_of_a_range_takes_over_that_range(cluster: Cluster) -> None:
    first, _ = start_ranges(cluster)
    start_range(cluster, 0, "--standby-of", cluster.ranges[0], host="s")
    standby = cluster.host("s0")
    until(lambda: master_metric(standby, "is_following"), 20)
    cluster.ranges[0] += f",{standby.address}:{MASTER_PORT}"
    a, b = start_nodes(cluster, "a", "b", masters=COUNT + 1)
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    names = [*names_of(0, 10), *names_of(1, 10)]
    on_b.put(names, SIZE)
    cluster.found(names)
    first.kill()
    until(lambda: on_a.has(names, SIZE, room=SIZE))
    until(lambda: not master_metric(standby, "is_following"))
    asked = standby.moonpool("promote")
    assert asked.wait() == 0, asked.text()
    until(lambda: on_a.remove([names[0]]) in ([True], [False]))
    assert on_a.remove([names[10]]) == [True]
    assert on_b.get([names[0], names[10]]) == [None, None]
    assert on_b.has(names[1:10], SIZE, room=SIZE)


def test_a_node_that_was_away_loses_what_was_removed_in_each_range_and_no_more(cluster: Cluster) -> None:
    start_ranges(cluster)
    a, b, c = start_nodes(cluster, "a", "b", "c", ssd=SSD)
    on_a, on_c = cluster.puppet(a.host), cluster.puppet(c.host)
    names = [*names_of(0, 10), *names_of(1, 10)]
    on_c.put(names, SIZE)
    cluster.found(names)
    assert on_a.remove(names_of(0, 1, "x") + names_of(1, 1, "x")) == [False, False]  # a version of each range
    c.process.terminate()
    until(lambda: cluster.states().get(c.name) != "alive")
    assert on_a.remove([names[0], names[10]]) == [False, False]
    (again,) = start_nodes(cluster, "c", ssd=SSD)
    until(lambda: cluster.states()[c.name] == "alive")
    cluster.found([name for name in names if name not in (names[0], names[10])])
    again_on_c = cluster.puppet(c.host)
    assert again_on_c.get([names[0], names[10]]) == [None, None]
    assert again_on_c.has([*names[1:10], *names[11:]], SIZE, room=SIZE)
    assert on_a.has([*names[1:10], *names[11:]], SIZE, room=SIZE)
    assert again.metric("ssd_objects") == len(names) - 2
    assert b.metric("masters_joined") == COUNT


def test_a_process_that_expects_another_range_is_refused_and_told_the_remedy(cluster: Cluster) -> None:
    start_ranges(cluster)
    first, second = cluster.ranges
    cluster.ranges = [first]  # as a node that knows no ranges
    alone = cluster.start_node(cluster.host("a"), wait=False)
    alone.process.said("^moonpool node.* NOT JOINED")
    until(lambda: "this master has range 0/2 of the shards" in alone.process.text())
    cluster.ranges = [second, first]
    swapped = cluster.start_node(cluster.host("b"), wait=False)
    swapped.process.said("^moonpool node")
    until(lambda: "has range 1/2 of the shards, and range 0/2 is expected there" in swapped.process.text())
    wrong = cluster.host("m0").moonpool(
        "master", "--listen", "127.0.0.1:0", "--http", "off", "--range", "2/2"
    )
    assert wrong.wait() == 2
    assert "master.range = '2/2' must be INDEX/COUNT" in wrong.text()
    node = cluster.host("b").moonpool(
        "node", "--dram", "64MiB", "--name", "x", "--master", f"{first};;{second}"
    )
    assert node.wait() == 2
    assert "has a range without a master" in node.text()
    metrics = [master_metric(cluster.host(f"m{index}"), "range_index") for index in range(COUNT)]
    assert metrics == [0, 1]
