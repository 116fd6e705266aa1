"""Objects that lie in stripes on several hosts, of which one is killed."""

from __future__ import annotations

import pytest

from ..core.store_bed import until
from .bed import MIB, Cluster
from .puppet import checksum, unless_lost

SIZE = 30 * MIB  # of nodes that take 16 MiB at most: eight stripes


def test_a_killed_node_takes_no_stripe_of_which_another_has_a_copy(cluster: Cluster) -> None:
    a, b, c = cluster.start("a", "b", "c")
    on_a, on_c = cluster.puppet(a.host), cluster.puppet(c.host)
    assert [row[0::2] for row in on_a.put(["k"], SIZE, replicas=2)] == [["stored", 2]]
    cluster.found(["k"], 2)
    assert on_c.has(["k"], SIZE)
    b.kill()
    for reader in (on_a, on_c):  # at once: the holder that is gone is followed by the next
        assert reader.exists(["k"]) == ["hit"]
        assert reader.has(["k"], SIZE)
        assert reader.longest_prefix(["k"], pin=False)["blocks"] == 1
        assert reader.has(["k"], SIZE, room=SIZE)


@pytest.mark.parametrize("again", [SIZE, 1000])
def test_an_object_that_lost_stripes_with_a_node_ends_with_it(cluster: Cluster, again: int) -> None:
    """While the node may come back the object is not there, and may be replaced; then its stripes go."""
    cluster.host("m").env |= {"MOONPOOL_MASTER_GONE_AFTER_S": "4s"}
    a, b, c = cluster.start("a", "b", "c")
    on_a, on_c = cluster.puppet(a.host), cluster.puppet(c.host)
    on_a.put(["k", "left"], SIZE)
    cluster.found(["k", "left"])
    assert on_c.has(["k", "left"], SIZE)
    b.kill()
    until(lambda: cluster.states().get(b.name) != "alive")
    for reader in (on_a, on_c):
        assert set(reader.exists(["k", "left"])) <= {"miss", "unknown"}
        assert unless_lost(lambda reader=reader: reader.get(["k"])) in ([None], None)
        for pin in (True, False):
            assert reader.longest_prefix(["k"], pin=pin)["blocks"] == 0
    assert [row[0] for row in on_a.put(["k"], again, 1)] == ["stored"]
    assert on_a.get(["k"]) == [[again, checksum("k", 1, again)]]
    until(lambda: on_c.get(["k"]) == [[again, checksum("k", 1, again)]])
    until(lambda: b.name not in cluster.states(), 20.0)
    until(lambda: on_c.exists(["left"]) == ["miss"])
    whole = on_a.get(["k"]) != [None]
    assert whole
    until(
        lambda: sum(node.metric("object_bytes") for node in (a, c)) == (again + 96 if again > MIB else again)
    )
