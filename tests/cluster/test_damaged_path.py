"""The way between two nodes goes bad: bits flip, the cable is cut for a while or for ever, the line is slow.

The relay stands between the reader's host and the holder's. Whatever it does, a read gives the right bytes, a
miss or an error, in time, and the holder is none the worse for it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from moonpool import Error, Store

from ..core.store_bed import until
from .bed import MIB, NODE_PORT, TOKEN, Cluster, Node
from .hosts import measured
from .puppet import Failed, Puppet, checksum, contents, unless_lost
from .relay import DOWN, UP, Relay, flip_bit, flip_in

EVERY = 1 << 30


@pytest.fixture
def nodes(cluster: Cluster) -> list[Node]:
    return cluster.start("a", "b", "c", dram="256MiB")


@pytest.fixture
def relay(cluster: Cluster, nodes: list[Node]) -> Iterator[Relay]:
    """On the way from a's host to b's node; c is reached directly by both."""
    relay = Relay(cluster.network, nodes[0].host, nodes[1].host, NODE_PORT)
    yield relay
    relay.close()


@pytest.fixture
def reader(cluster: Cluster, nodes: list[Node], relay: Relay) -> Puppet:
    return cluster.puppet(nodes[0].host, timeout_s=1.0)


def store_at_b(cluster: Cluster, nodes: list[Node], names: list[str], size: int) -> Puppet:
    writer = cluster.puppet(nodes[1].host)
    assert [row[0] for row in writer.put(names, size)] == ["stored"] * len(names)
    cluster.found(names)
    return writer


def mark_of(name: str) -> bytes:
    return contents(name, 0, 4096)[1000:1040]


def ends_well(reader: Puppet, names: list[str], size: int, limit_s: float) -> str:
    """Gets them; right bytes, a miss or an error of ours are all well, wrong bytes and long waits are not."""
    try:
        outcome = "hit" if reader.has(names, size) else "miss"
    except Failed as failed:
        if failed.name not in ("Timeout", "Unavailable", "CorruptObject", "ProtocolError"):
            raise
        outcome = failed.name
    print(f"{outcome} after {reader.seconds:.3f} s")
    assert reader.seconds < limit_s
    return outcome


# ---- bits


def test_a_bit_flips_once(cluster: Cluster, nodes: list[Node], relay: Relay, reader: Puppet) -> None:
    store_at_b(cluster, nodes, ["k", "l"], 100_000)
    relay.spoil = flip_in(DOWN, mark_of("k"))
    assert reader.has(["k", "l"], 100_000)  # asked for once more
    relay.spoil = flip_in(DOWN, mark_of("k"))
    assert reader.has(["k", "l"], 100_000, room=100_000)


def test_bits_flip_each_time(cluster: Cluster, nodes: list[Node], relay: Relay, reader: Puppet) -> None:
    """Then nobody has it whole: a miss or an error, and never the wrong bytes; other objects are not hurt."""
    store_at_b(cluster, nodes, ["bad", "good"], 100_000)
    relay.spoil = flip_in(DOWN, mark_of("bad"), EVERY)
    assert ends_well(reader, ["bad"], 100_000, 5) != "hit"
    for options in ({}, {"room": 100_000}):
        assert reader.has(["good"], 100_000, **options)
    relay.spoil = None
    assert reader.has(["bad"], 100_000)


def test_another_copy_is_read_instead(
    cluster: Cluster, nodes: list[Node], relay: Relay, reader: Puppet
) -> None:
    c = nodes[2]
    writer = store_at_b(cluster, nodes, ["k"], 100_000)
    on_c = cluster.puppet(c.host)
    on_c.put(["k"], 100_000)
    cluster.found(["k"], 2)
    relay.spoil = flip_in(DOWN, mark_of("k"), EVERY)
    before = c.metrics()
    for _ in range(4):  # whichever is asked first
        assert reader.has(["k"], 100_000)
        assert reader.has(["k"], 100_000, room=100_000)
    assert c.moved(before)[0] >= 100_000
    assert writer.has(["k"], 100_000)


def test_a_put_that_is_damaged_on_its_way(
    cluster: Cluster, nodes: list[Node], relay: Relay, reader: Puppet
) -> None:
    """The node compares the checksum before anybody can see the object; the client may store it elsewhere."""
    a, b, c = nodes
    direct = cluster.puppet(a.host, node=f"tcp://{b.address}")
    relay.spoil = flip_in(UP, mark_of("k"), EVERY)
    try:
        status = direct.put(["k"], 100_000)[0]
        print(status)
        assert (a.metric("objects") + c.metric("objects") == 1) == (status[0] == "stored")
    except Failed as failed:
        print(failed)
    assert b.metric("tcp_damaged_total") >= 1
    relay.spoil = None
    assert b.metric("objects") == 0
    assert b.metric("leased_bytes") == 0
    assert direct.put(["k"], 100_000)[0][0] == "stored"
    assert direct.has(["k"], 100_000)


def test_any_bit_of_a_conversation(
    cluster: Cluster, nodes: list[Node], relay: Relay, rng: random.Random
) -> None:
    """Single bits of handshake, headers and bodies, in both directions: of each conversation another one."""
    a, b, _ = nodes
    store_at_b(cluster, nodes, ["k"], 3000)
    expected = contents("k", 0, 3000)
    outcomes: dict[str, int] = {}
    for _ in range(60):
        relay.spoil = flip_bit(rng.choice((UP, DOWN)), int(3000 ** rng.random()), rng.randrange(8))
        try:
            with (
                a.host.namespace.entered(),
                Store(f"tcp://{b.address}", token=TOKEN.encode(), timeout_s=0.3) as store,
            ):
                view = store.get("k")
                assert view is None or view == expected
                outcome = "hit" if view is not None else "miss"
        except Error as error:
            outcome = type(error).__name__
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print(outcomes)
    relay.spoil = None
    assert b.process.is_running
    with a.host.namespace.entered(), Store(f"tcp://{b.address}", token=TOKEN.encode()) as store:
        assert store.get("k") == expected
    assert b.metric("objects") == 1
    until(lambda: b.metric("pins") == 0)


def test_an_object_that_is_larger_than_it_was_said_to_be(
    cluster: Cluster, nodes: list[Node], relay: Relay
) -> None:
    """By a flipped bit here; by one that replaced it meanwhile elsewhere."""
    a, b, _ = nodes
    store_at_b(cluster, nodes, ["k"], 3000)
    said: list[int] = []

    def spoil(passing: str, _: int, data: bytearray) -> None:
        at = data.find((3000).to_bytes(8, "little"))
        if passing == DOWN and at >= 0 and not said:
            data[at + 1] ^= 8
            said.append(int.from_bytes(data[at : at + 8], "little"))

    relay.spoil = spoil
    with a.host.namespace.entered(), Store(f"tcp://{b.address}", token=TOKEN.encode()) as store:
        assert store.get("k") == contents("k", 0, 3000)
    assert said == [952]


# ---- cables


def test_a_cable_that_is_cut_for_three_seconds(cluster: Cluster, nodes: list[Node], relay: Relay) -> None:
    """In the middle of a large object. A client that is patient enough gets it whole."""
    store_at_b(cluster, nodes, ["k"], 32 * MIB)
    reader = cluster.puppet(nodes[0].host, timeout_s=8.0)
    relay.bytes_per_s = 40e6
    reader.begin("get", names=["k"], size=32 * MIB, options={})
    until(lambda: relay.passed[DOWN] > 4 * MIB)
    relay.hold()
    relay.bytes_per_s = 0
    timer = threading.Timer(3.0, relay.flow)  # the cable is plugged in again
    timer.start()
    row = reader.end()[0]
    timer.join()
    print(f"{reader.seconds:.3f} s")
    assert row is not None
    assert row[0] == 32 * MIB
    assert relay.accepted >= 1


def test_a_cable_that_is_cut_for_ever(
    cluster: Cluster, nodes: list[Node], relay: Relay, reader: Puppet
) -> None:
    """With a patience of one second: an answer within five, and the next ones fail faster or go elsewhere."""
    _, b, c = nodes
    store_at_b(cluster, nodes, ["k"], 32 * MIB)
    relay.bytes_per_s = 10e6  # whole after three seconds
    reader.begin("get", names=["k"], size=32 * MIB, options={})
    until(lambda: relay.passed[DOWN] > 4 * MIB)
    relay.hold()
    assert unless_lost(reader.end) in (None, [None])
    print(f"{reader.seconds:.3f} s")
    assert reader.seconds < 5 * 1.0
    assert ends_well(reader, ["k"], 32 * MIB, 5) != "hit"
    assert reader.put(["mine"], 1000, replicas=2)[0][0] == "stored"
    print(f"put with a copy: {reader.seconds:.3f} s")
    assert reader.seconds < 10
    # The node's end: nobody reads its answer, so it lets go after 10 s without progress.
    measured("the node ended the stalled connection", lambda: b.metric("objects_pinned") == 0, 12)
    assert cluster.puppet(c.host).has(["k"], 32 * MIB)


def test_a_connection_that_is_reset_in_the_middle(
    cluster: Cluster, nodes: list[Node], relay: Relay, reader: Puppet
) -> None:
    store_at_b(cluster, nodes, ["k"], 32 * MIB)
    relay.bytes_per_s = 40e6
    reader.begin("get", names=["k"], size=32 * MIB, options={})
    until(lambda: relay.passed[DOWN] > 4 * MIB)
    relay.bytes_per_s = 0
    relay.cut()
    rows = unless_lost(reader.end)
    assert rows in (None, [None], [[32 * MIB, checksum("k", 0, 32 * MIB)]])
    assert reader.seconds < 5
    until(lambda: reader.has(["k"], 32 * MIB))  # the next one connects again


def test_a_slow_line_is_no_timeout(cluster: Cluster, nodes: list[Node], relay: Relay) -> None:
    """4 MiB in about two seconds, with a patience of one: deadlines count from the last progress."""
    store_at_b(cluster, nodes, ["k"], 4 * MIB)
    reader = cluster.puppet(nodes[0].host, timeout_s=1.0)
    relay.bytes_per_s = 2 * MIB
    assert reader.has(["k"], 4 * MIB, room=4 * MIB)
    print(f"{reader.seconds:.3f} s")
    assert reader.seconds > 1.0
    assert reader.has(["k"], 4 * MIB)


def test_a_far_away_host_costs_round_trips_and_not_one_for_each_key(
    cluster: Cluster, nodes: list[Node], relay: Relay, reader: Puppet
) -> None:
    names = [f"k{i}" for i in range(200)]
    store_at_b(cluster, nodes, names, 1000)
    relay.delay_s = 0.05  # each way
    assert reader.has(names, 1000)
    print(f"views: {reader.seconds:.3f} s")
    assert reader.seconds < 200 * 0.1 / 4
    assert reader.has(names, 1000, room=1000)
    print(f"into buffers: {reader.seconds:.3f} s")
    assert reader.seconds < 200 * 0.1 / 4
    assert reader.longest_prefix(names)["blocks"] == 200
    assert reader.seconds < 200 * 0.1 / 4


def test_the_path_between_a_node_and_its_master_is_damaged(cluster: Cluster) -> None:
    """Bits of deltas and beats flip: the node joins anew, and the directory ends up right."""
    a, b = cluster.start("a", "b")
    assert cluster.master_host is not None
    relay = Relay(cluster.network, b.host, cluster.master_host, 7700)
    try:
        cluster.network.cut((b.host, cluster.master_host))  # ends what goes past the relay
        until(lambda: cluster.states()[b.name] == "suspect")
        cluster.network.heal()
        until(lambda: cluster.states()[b.name] == "alive" and relay.accepted)
        on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
        for i in range(12):
            relay.spoil = flip_bit(UP, relay.passed[UP] + 30 * i, i % 8)
            on_b.put([f"k{i}-{j}" for j in range(10)], 100)
            until(lambda: b.metric("master_rows_waiting") == 0)
        relay.spoil = None
        relay.cut()  # as its keepalive would one day: the inventory is told anew
        names = [f"k{i}-{j}" for i in range(12) for j in range(10)]
        measured("all found", lambda: on_a.has(names, 100), 3)
        until(lambda: cluster.states()[b.name] == "alive")
        assert cluster.master_process is not None
        assert cluster.master_process.is_running
    finally:
        relay.close()
