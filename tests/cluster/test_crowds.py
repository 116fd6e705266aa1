"""Many: clients of a node, nodes of a master, keys of a pool."""

from __future__ import annotations

import resource
import time

import pytest

from moonpool import Store

from .bed import TOKEN, Cluster, until
from .tcp_wire import TcpWire

CLIENTS = 1000
PEERS = 200
KEYS = 1_000_000


@pytest.fixture(autouse=True)
def _descriptors_enough() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 4 * CLIENTS:
        pytest.skip(f"needs {4 * CLIENTS} open files, and the limit is {most}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def test_a_thousand_clients_of_a_node_and_of_its_master(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b", remote_connections_max=CLIENTS + 100)
    assert cluster.master_process is not None
    on_a = cluster.puppet(a.host)
    on_a.put(["k"], 10_000)
    cluster.found(["k"])
    before = a.process.rss_bytes(), cluster.master_process.rss_bytes()
    place = cluster.network.switch
    clients, lookups = [], []
    for _ in range(CLIENTS):
        clients.append(TcpWire.store(place, a.address, TOKEN))
        lookups.append(TcpWire.call(place, cluster.master))
        lookups[-1].prove(TOKEN.encode(), b"directory")
    worst = 0.0
    for client in clients:
        began = time.monotonic()
        assert client.lookup([b"k", b"absent"])[1] == 1
        worst = max(worst, time.monotonic() - began)
    print(f"the slowest lookup beside {CLIENTS} clients: {worst:.3f} s")
    assert on_a.has(["k"], 10_000)
    assert cluster.puppet(b.host).has(["k"], 10_000)
    grown = a.process.rss_bytes() - before[0], cluster.master_process.rss_bytes() - before[1]
    print(f"the node grew by {grown[0] / CLIENTS:.0f} bytes a client, the master by {grown[1] / CLIENTS:.0f}")
    assert max(grown) < CLIENTS * 128 * 1024
    for wire in (*clients, *lookups):
        wire.close()
    until(lambda: a.metric("connections") < 20)
    until(lambda: set(cluster.states().values()) == {"alive"})


def test_more_clients_than_a_node_takes(cluster: Cluster) -> None:
    """The one too many is told so in one sentence; those who are in stay in."""
    (a,) = cluster.start("a", remote_connections_max=32)
    place = cluster.network.switch
    clients = []
    refused = 0
    for _ in range(40):
        try:
            clients.append(TcpWire.store(place, a.address, TOKEN))
        except (AssertionError, ConnectionError, OSError) as error:
            refused += 1
            last = error
    print(f"{len(clients)} are in; the next was told: {last}")
    assert 24 <= len(clients) <= 32
    assert refused == 40 - len(clients)
    assert all(client.stat()["connections"] == len(clients) for client in clients)
    for client in clients:
        client.close()
    until(lambda: a.metric("connections") < 10)
    TcpWire.store(place, a.address, TOKEN).close()


@pytest.mark.timeout(600)
def test_many_nodes_in_one_pool(cluster: Cluster) -> None:
    """All in one process of one host, each with an address and a host_id: a lookup over all of them."""
    cluster.start_master()
    host = cluster.host("crowd")
    crowd = cluster.puppet(host, open=False)
    crowd.begin("be_nodes", n=PEERS, address=host.address, master=cluster.master, token=TOKEN)
    crowd.end(300)
    began = time.monotonic()
    until(lambda: list(cluster.states().values()).count("alive") == PEERS, 60)
    print(f"{PEERS} nodes are alive after {time.monotonic() - began:.2f} s")
    names = [f"on node {i}" for i in range(PEERS)]
    crowd.call("put_on_each", names=names, size=1000)
    cluster.found(names)
    (a,) = cluster.start("a", master=False)
    cluster.wait_alive(PEERS + 1)
    reader = cluster.puppet(a.host, timeout_s=10)
    prefix = reader.longest_prefix(names)
    print(f"a prefix over {PEERS} nodes: {reader.seconds:.3f} s, {prefix['why']!r}")
    assert prefix["blocks"] == PEERS
    reader.release()
    assert reader.has(names, 1000)
    print(f"views from {PEERS} nodes: {reader.seconds:.3f} s")
    crowd.kill()
    until(lambda: list(cluster.states().values()).count("alive") == 1, 10)
    assert reader.longest_prefix(names)["blocks"] == 0


@pytest.mark.timeout(600)
def test_many_keys(cluster: Cluster) -> None:
    """Told to the master while they are stored, and told again after its restart."""
    a, b = cluster.start("a", "b", dram="512MiB", objects_max=KEYS + 10_000)
    assert cluster.master_process is not None
    small = cluster.master_process.rss_bytes()
    on_a, on_b = cluster.puppet(a.host, timeout_s=30), cluster.puppet(b.host, timeout_s=30)
    on_a.begin("put_many", prefix="key", n=KEYS, size=64)
    on_a.end(500)
    print(f"{KEYS} keys were put in {on_a.seconds:.2f} s")
    last = [f"key{i}" for i in range(KEYS - 1000, KEYS)]
    cluster.found([f"key{i}" for i in range(1000)])
    cluster.found(last)
    print(f"the master grew by {(cluster.master_process.rss_bytes() - small) / KEYS:.0f} bytes a key")
    assert on_b.longest_prefix(last)["blocks"] == 1000
    on_b.release()
    cluster.master_process.kill()
    cluster.start_master()
    began = time.monotonic()
    until(lambda: a.metric("master_joined"), 30)
    cluster.found(last)
    print(f"the directory is back {time.monotonic() - began:.2f} s after the master was (promised: 3 s)")
    assert time.monotonic() - began < 5 * 3
    until(lambda: on_b.longest_prefix(last)["blocks"] == 1000)
    until(lambda: cluster.states() == {a.name: "alive", b.name: "alive"})


def test_a_store_that_is_opened_and_closed_again_and_again(cluster: Cluster) -> None:
    (a,) = cluster.start("a")
    with a.host.namespace.entered():
        for i in range(100):
            with Store(f"tcp://{a.address}", token=TOKEN.encode()) as store:
                assert store.put(f"k{i}", b"x", ack=True)
    until(lambda: a.metric("connections") <= 1)
    assert a.metric("objects") == 100
