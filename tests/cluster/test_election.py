"""Masters that agree in a real etcd on which of them serves: kills, and an etcd that is away."""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.request
from typing import Any

import pytest

from moonpool.core.service.election import Ballot, Seat
from moonpool.core.service.etcd import Etcd

from ..core.store_bed import until
from .bed import JOIN_S, MASTER_PORT, Cluster, Node, master_metric
from .hosts import Host, Process, measured

SIZE = 1000
AGAIN_S = 1.5
ELECTED_S = 30.0  # 5 times what a lease and a look take


class Elected:
    """etcd and two masters, each in a host of its own, and two nodes. members: of etcd, on its host."""

    def __init__(self, cluster: Cluster, members: int = 1) -> None:
        self.cluster = cluster
        self._etcd_host = cluster.host("e")
        self._members = members
        self.etcd, *self._others = [self.start_etcd(member) for member in range(members)]
        self.hosts = [cluster.host("m"), cluster.host("s")]
        cluster.master_host, cluster.standby_host = self.hosts
        self.masters = [self.start_master(host) for host in self.hosts]
        until(lambda: self.owner() is not None and self.is_whole(), ELECTED_S)
        self.nodes: list[Node] = cluster.start("a", "b", master=False)
        for node in self.nodes:
            until(lambda node=node: node.metric("masters_joined") == 2, JOIN_S)
        cluster.wait_alive(2)

    def start_etcd(self, member: int = 0) -> Process:
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("etcd is not installed: apt install etcd-server")
        url = f"http://{self._etcd_client(member)}"
        peers = [f"http://127.0.0.1:{2380 + 10 * each}" for each in range(self._members)]
        command = [program, "--name", f"etcd{member}"]
        command += ["--data-dir", str(self._etcd_host.log_dir / f"etcd{member}"), "--listen-client-urls", url]
        command += ["--advertise-client-urls", url, "--listen-peer-urls", peers[member]]
        command += ["--initial-advertise-peer-urls", peers[member]]
        command += ["--initial-cluster", ",".join(f"etcd{each}={peer}" for each, peer in enumerate(peers))]
        return self._etcd_host.start(f"etcd{member}", command)

    def _etcd_client(self, member: int) -> str:
        return f"{self._etcd_host.address}:{2379 + 10 * member}"

    def kill_leader(self) -> None:
        """Of etcd's members the one through which all changes go."""
        for member, process in enumerate([self.etcd, *self._others]):
            status = urllib.request.Request(
                f"http://{self._etcd_client(member)}/v3/maintenance/status", b"{}"
            )
            with self.cluster.network.switch.entered(), urllib.request.urlopen(status, timeout=10) as page:
                answer = json.load(page)
            if answer["header"]["member_id"] == answer["leader"]:
                return process.kill()
        raise AssertionError("no member of etcd says that it leads")

    def start_master(self, host: Host) -> Process:
        etcd = f"etcd://{','.join(map(self._etcd_client, range(self._members)))}"
        process = host.moonpool("master", "--listen", f"{host.address}:{MASTER_PORT}", "--election", etcd)
        process.said("^moonpool master")
        return process

    def owner(self) -> int | None:
        """Which of them it is; None: none, or two for a moment."""
        owners = [i for i, host in enumerate(self.hosts) if master_metric(host, "is_owner")]
        return owners[0] if len(owners) == 1 else None

    def is_whole(self) -> bool:
        owner = self.owner()
        return owner is not None and bool(master_metric(self.hosts[owner], "standby_is_whole"))

    def add_master(self, name: str) -> None:
        """At an address that is in no node's and no client's list. It waits until it is needed."""
        self.hosts.append(self.cluster.host(name))
        self.masters.append(self.start_master(self.hosts[-1]))

    def names_as_standby(self, master: int) -> bool:
        """The key does so: that one, and no other, takes over when the owner is lost."""
        etcd = Etcd([self._etcd_client(0)], timeout_s=5.0)
        none = Seat("", "")
        with self.cluster.network.switch.entered():
            record = Ballot(etcd, "/moonpool/masters/default", none).read().record
        standby = (record and record.standby) or none
        return standby.address == f"{self.hosts[master].address}:{MASTER_PORT}"

    def removed(self, puppet: Any, key: str) -> bool:
        """Once it is acknowledged: a try that was not may have removed it."""
        return puppet.remove([key]) == [True] or puppet.exists([key]) == ["miss"]


@pytest.fixture
def elected(cluster: Cluster) -> Elected:
    return Elected(cluster)


def test_an_owner_that_dies_is_succeeded_and_comes_back_as_the_standby(elected: Elected) -> None:
    a, b = elected.nodes
    on_a, on_b = elected.cluster.puppet(a.host), elected.cluster.puppet(b.host)
    names = [f"k{i}" for i in range(50)]
    on_b.put(names, SIZE)
    elected.cluster.found(names)
    assert on_a.remove(["k0"]) == [True]
    before = {node.name: node.metric("master_inventories_total") for node in elected.nodes}
    for round_ in range(2):
        owner = elected.owner()
        assert owner is not None
        elected.masters[owner].kill()
        fresh = elected.cluster.puppet(a.host)
        measured("lookups answered again", lambda p=fresh: p.has(names[10:], SIZE, room=SIZE), AGAIN_S)
        until(lambda owner=owner: elected.owner() == 1 - owner, ELECTED_S)
        until(lambda r=round_: elected.removed(on_a, f"k{r + 1}"), ELECTED_S)
        assert on_b.get(["k0", f"k{round_ + 1}"]) == [None, None]
        if round_ == 0:
            after = {node.name: node.metric("master_inventories_total") for node in elected.nodes}
            assert after == before
        elected.masters[owner] = elected.start_master(elected.hosts[owner])
        until(elected.is_whole, ELECTED_S)
        for node in elected.nodes:
            until(lambda node=node: node.metric("masters_joined") == 2, JOIN_S)


def test_an_elected_owner_hands_over_and_follows_as_the_key_says(elected: Elected) -> None:
    a, b = elected.nodes
    on_a, on_b = elected.cluster.puppet(a.host), elected.cluster.puppet(b.host)
    on_b.put(["kept"], SIZE)
    elected.cluster.found(["kept"])
    owner = elected.owner()
    assert owner is not None
    heir = elected.hosts[1 - owner]
    asked = heir.moonpool("promote")
    removed = 0
    while asked.is_running or removed < 5:
        # A busy etcd takes longer than a client waits; tests/native has patient ones.
        on_b.put([f"r{removed}"], SIZE)
        until(lambda name=f"r{removed}": elected.removed(on_a, name), ELECTED_S)
        removed += 1
    assert asked.wait() == 0, asked.text()
    until(lambda: elected.owner() == 1 - owner, ELECTED_S)
    until(elected.is_whole, ELECTED_S)  # the former owner follows
    assert on_a.has(["kept"], SIZE, room=SIZE)
    until(lambda: on_a.remove(["kept"]) == [True])
    assert on_b.get(["kept"]) == [None]
    # Nothing but the key says so to a master that is started again.
    elected.masters[owner].kill()
    elected.masters[owner] = elected.start_master(elected.hosts[owner])
    until(elected.is_whole, ELECTED_S)
    assert elected.owner() == 1 - owner


def test_removals_go_on_when_the_standby_dies(elected: Elected) -> None:
    a, b = elected.nodes
    on_a, on_b = elected.cluster.puppet(a.host), elected.cluster.puppet(b.host)
    on_b.put(["k", "l"], SIZE)
    elected.cluster.found(["k", "l"])
    owner = elected.owner()
    assert owner is not None
    elected.masters[1 - owner].kill()
    until(lambda: elected.removed(on_a, "k"), ELECTED_S)
    elected.masters[1 - owner] = elected.start_master(elected.hosts[1 - owner])
    until(elected.is_whole, ELECTED_S)
    assert elected.owner() == owner
    until(lambda: elected.removed(on_a, "l"), ELECTED_S)
    assert on_b.get(["k", "l"]) == [None, None]


def test_a_leader_of_etcd_that_dies_takes_no_master_along(cluster: Cluster) -> None:
    elected = Elected(cluster, members=3)
    a, b = elected.nodes
    on_a, on_b = elected.cluster.puppet(a.host), elected.cluster.puppet(b.host)
    on_b.put(["k", "l"], SIZE)
    elected.cluster.found(["k", "l"])
    owner = elected.owner()
    assert owner is not None
    elected.kill_leader()
    until(lambda: elected.removed(on_a, "k"), ELECTED_S)
    assert elected.owner() == owner
    elected.masters[owner].kill()
    until(lambda: elected.owner() == 1 - owner, ELECTED_S)
    until(lambda: elected.removed(on_a, "l"), ELECTED_S)
    assert on_b.get(["k", "l"]) == [None, None]


def test_owner_and_standby_go_on_without_etcd_and_one_of_them_alone_removes_nothing(
    elected: Elected,
) -> None:
    a, b = elected.nodes
    on_a, on_b = elected.cluster.puppet(a.host), elected.cluster.puppet(b.host)
    on_b.put(["k", "l", "kept"], SIZE)
    elected.cluster.found(["k", "l", "kept"])
    owner = elected.owner()
    assert owner is not None
    elected.etcd.kill()
    assert on_a.remove(["k"]) == [True]
    assert on_b.get(["k"]) == [None]
    elected.masters[owner].kill()
    until(lambda: not master_metric(elected.hosts[1 - owner], "is_following"), ELECTED_S)
    until(lambda: on_a.has(["kept"], SIZE, room=SIZE), ELECTED_S)
    assert on_a.remove(["l"]) not in ([True], [False])
    assert not master_metric(elected.hosts[1 - owner], "is_owner")
    elected.etcd = elected.start_etcd()
    until(lambda: elected.owner() == 1 - owner, ELECTED_S)
    until(lambda: elected.removed(on_a, "l"), ELECTED_S)
    assert on_b.get(["l"]) == [None]


def test_an_owner_that_stood_still_follows_the_one_that_took_over(elected: Elected) -> None:
    a, b = elected.nodes
    on_a, on_b = elected.cluster.puppet(a.host), elected.cluster.puppet(b.host)
    on_b.put(["k", "kept"], SIZE)
    elected.cluster.found(["k", "kept"])
    owner = elected.owner()
    assert owner is not None
    os.kill(elected.masters[owner].pid, signal.SIGSTOP)
    try:
        until(lambda: master_metric(elected.hosts[1 - owner], "is_owner"), ELECTED_S)
        until(lambda: elected.removed(on_a, "k"), ELECTED_S)
    finally:
        os.kill(elected.masters[owner].pid, signal.SIGCONT)
    until(lambda: elected.owner() == 1 - owner and elected.is_whole(), ELECTED_S)
    assert on_b.get(["k"]) == [None]
    assert on_a.has(["kept"], SIZE, room=SIZE)


def test_both_masters_that_die_are_succeeded_by_those_at_their_addresses(elected: Elected) -> None:
    a, b = elected.nodes
    on_a, on_b = elected.cluster.puppet(a.host), elected.cluster.puppet(b.host)
    on_b.put(["k", "kept"], SIZE)
    elected.cluster.found(["k", "kept"])
    assert on_a.remove(["k"]) == [True]
    for process in elected.masters:
        process.kill()
    elected.masters = [elected.start_master(host) for host in elected.hosts]
    until(lambda: elected.owner() is not None and elected.is_whole(), ELECTED_S)
    until(lambda: on_a.has(["kept"], SIZE, room=SIZE), ELECTED_S)
    assert on_b.get(["k"]) == [None]
    until(lambda: elected.removed(on_a, "kept"), ELECTED_S)


def test_a_third_master_at_an_address_in_no_list_is_elected(elected: Elected) -> None:
    a, b = elected.nodes
    on_a, on_b = elected.cluster.puppet(a.host), elected.cluster.puppet(b.host)
    names = [f"k{i}" for i in range(20)]
    on_b.put(names, SIZE)
    elected.cluster.found(names)
    first = elected.owner()
    assert first is not None
    elected.add_master("third")
    third = 2
    assert [node.metric("masters_learned") for node in elected.nodes] == [0, 0]
    elected.masters[1 - first].kill()
    until(elected.is_whole, ELECTED_S)
    until(lambda: elected.names_as_standby(third), ELECTED_S)
    for node in elected.nodes:
        until(lambda node=node: node.metric("masters_learned") == 1, JOIN_S)
        until(lambda node=node: node.metric("masters_joined") == 2, JOIN_S)
    until(lambda: elected.removed(on_a, "k0"), ELECTED_S)
    for puppet in (on_a, on_b):
        puppet.exists(["absent"])  # as any question, it reads what the master has told since the last one
    elected.masters[first].kill()
    until(lambda: on_a.has(names[2:], SIZE, room=SIZE), ELECTED_S)
    until(lambda: elected.owner() == third, ELECTED_S)
    until(lambda: elected.removed(on_a, "k1"), ELECTED_S)
    assert on_b.get(["k0", "k1"]) == [None, None]
    # One of the list comes back as its standby, and names it to those that start with the list.
    elected.masters[first] = elected.start_master(elected.hosts[first])
    until(elected.is_whole, ELECTED_S)
    a.process.terminate()
    until(lambda: not a.process.is_running, ELECTED_S)
    again = elected.cluster.start_node(a.host, name=a.name, wait=False)
    again.process.said("^moonpool node")
    until(lambda: again.metric("masters_joined") == 2, JOIN_S)
    assert again.metric("masters_learned") == 1
    on_again = elected.cluster.puppet(a.host)
    until(lambda: on_again.has(names[2:], SIZE, room=SIZE), JOIN_S)
    until(lambda: elected.removed(on_again, "k2"), ELECTED_S)
    assert on_b.get(["k2"]) == [None]


def test_an_owner_acknowledges_no_removal_by_a_standby_that_the_key_does_not_name(elected: Elected) -> None:
    a, b = elected.nodes
    on_a, on_b = elected.cluster.puppet(a.host), elected.cluster.puppet(b.host)
    on_b.put(["k"], SIZE)
    elected.cluster.found(["k"])
    elected.add_master("t")
    owner = elected.owner()
    assert owner is not None
    until(lambda: elected.names_as_standby(1 - owner), ELECTED_S)
    elected.masters[2].said("this master has a standby already")  # it has read the key
    os.kill(elected.etcd.pid, signal.SIGSTOP)
    elected.masters[1 - owner].kill()  # if it were cut off instead, it could take over once etcd goes on
    until(lambda: master_metric(elected.hosts[owner], "standbys_lost_total") == 1, ELECTED_S)
    until(lambda: bool(master_metric(elected.hosts[owner], "standby_is_whole")), ELECTED_S)
    assert on_a.remove(["k"]) != [True]
    os.kill(elected.etcd.pid, signal.SIGCONT)
    until(lambda: elected.names_as_standby(2), ELECTED_S)
    until(lambda: elected.removed(on_a, "k"), ELECTED_S)
