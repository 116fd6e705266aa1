"""The master as a process, with nodes as processes: deaths, silence, partitions, strangers and a crowd."""

from __future__ import annotations

import os
import resource
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moonpool import Store, _native
from moonpool.core.errors import AuthError, Error, Unavailable

from . import master_wire as m
from . import wire_client as w
from .master_bed import MasterProcess, Relay, environment, found, hashes, hits
from .master_wire import Identity, Load, connect
from .store_bed import MIB, TOKEN, NodeProcess, until
from .wire_client import Closed, Wire

NodeMaker = Callable[..., NodeProcess]


@pytest.fixture
def master(runtime_dir: Path) -> Iterator[MasterProcess]:
    process = MasterProcess()
    yield process
    process.close()


@pytest.fixture
def make_node(runtime_dir: Path) -> Iterator[NodeMaker]:
    nodes: list[NodeProcess] = []

    def make(name: str, master: str, **options: Any) -> NodeProcess:
        given = {"name": name, "master": master, "host_id": f"host-{name}", "listen": ["127.0.0.1:0"]}
        nodes.append(NodeProcess(runtime_dir / f"{name}-{len(nodes)}.sock", **(given | options)))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def directory(master: MasterProcess) -> Iterator[_native.DirectoryClient]:
    client = _native.DirectoryClient(master.address, TOKEN, timeout_s=5.0)
    yield client
    client.close()


def put(node: NodeProcess, names: list[str], *, replicas: int = 1) -> None:
    with Store(str(node.socket_path), token=TOKEN) as store:
        results = store.put(names, [b"x" * 100] * len(names), replicas=replicas)
        assert all(result.replicas == replicas for result in results), results


def seconds_until(condition: Callable[[], Any], what: str, timeout_s: float) -> None:
    began_s = time.monotonic()
    until(condition, timeout_s)
    print(f"{what} after {time.monotonic() - began_s:.3f} s")


# ---- deaths


def test_a_killed_master_forgets_everything_and_hears_it_again(
    master: MasterProcess, make_node: NodeMaker, directory: _native.DirectoryClient
) -> None:
    nodes = [make_node(name, master.address) for name in "ab"]
    names = [f"key-{i}" for i in range(3000)]
    put(nodes[0], names[:2000])
    put(nodes[1], names[1000:])
    found(directory, names, 3000)
    master.kill()
    began_s = time.monotonic()
    with pytest.raises(Unavailable):
        directory.locate(hashes(names))
    for _ in range(100):
        with pytest.raises(Unavailable):
            directory.locate(hashes(names))
    assert time.monotonic() - began_s < 5 * 0.2
    assert len(directory.members()[1]) == 2  # as it was last known
    with Store(str(nodes[0].socket_path), token=TOKEN) as store:  # the own node goes on
        store.put("later", b"y")
        assert bytes(store.get("later") or b"") == b"y"
        assert bytes(store.get("key-5") or b"") == b"x" * 100
    again = MasterProcess(listen=master.address)
    try:
        seconds_until(lambda: hits(directory, [*names, "later"]) == 3001, "found again", 5 * 3.0)
        assert again.states() == {"a": "alive", "b": "alive"}
    finally:
        again.close()


def test_a_killed_node_is_suspected_and_no_longer_promised(
    master: MasterProcess, make_node: NodeMaker, directory: _native.DirectoryClient
) -> None:
    a, _b = make_node("a", master.address), make_node("b", master.address)
    until(lambda: master.states() == {"a": "alive", "b": "alive"})
    put(a, ["one"])
    put(a, ["both"], replicas=2)
    found(directory, ["one", "both"], 2)
    until(lambda: len(directory.locate(hashes(["both"]))[0]) == 2)
    a.kill()
    seconds_until(lambda: master.states() == {"a": "suspect", "b": "alive"}, "suspected", 5 * 1.0)
    assert hits(directory, ["one", "both"]) == 1
    assert len(directory.locate(hashes(["one", "both"]), prefix=True)) == 0
    (only,) = directory.place(1000, 2)
    assert {n.id: n.name for n in directory.members()[1]}[only] == "b"
    again = make_node("a", master.address)  # a new life under the old name, with nothing of the old
    until(lambda: master.states() == {"a": "alive", "b": "alive"})
    put(again, ["new"])
    found(directory, ["new"], 1)
    assert hits(directory, ["one", "both", "new"]) == 2
    assert len(directory.locate(hashes(["both"]), suspects=True)[0]) == 1


def test_a_silent_node_is_suspected_and_taken_back(
    master: MasterProcess, make_node: NodeMaker, directory: _native.DirectoryClient
) -> None:
    node = make_node("a", master.address)
    put(node, ["one"])
    found(directory, ["one"], 1)
    began_s = time.monotonic()
    node.stop()
    until(lambda: master.states() == {"a": "suspect"}, 5 * 1.0)
    silent_s = time.monotonic() - began_s
    print(f"suspected after {silent_s:.3f} s")
    assert hits(directory, ["one"]) == 0
    node.resume()
    found(directory, ["one"], 1)
    assert master.states() == {"a": "alive"}


def test_two_processes_under_one_name_do_not_take_turns(
    master: MasterProcess, make_node: NodeMaker, directory: _native.DirectoryClient, runtime_dir: Path
) -> None:
    first = make_node("a", master.address)
    put(first, ["one"])
    found(directory, ["one"], 1)
    other = NodeProcess(runtime_dir / "other.sock", name="a", master=master.address, host_id="host-a")
    try:
        until(
            lambda: (
                other.metric("master_connect_failures_total")
                + master.page("/stat")["metrics"]["joins_refused_total"]
            )
        )
        assert hits(directory, ["one"]) == 1
        assert other.metric("master_joined") == 0
        first.kill()
        until(lambda: other.metric("master_joined") == 1)
    finally:
        other.close()


# ---- partitions


@pytest.mark.parametrize("given_up", [False, True], ids=["suspect", "given up"])
def test_what_was_removed_during_a_partition_does_not_come_back(
    runtime_dir: Path, make_node: NodeMaker, given_up: bool
) -> None:
    master = MasterProcess(gone_after_s=2 if given_up else 60)
    relay = Relay(master.address)
    directory = _native.DirectoryClient(master.address, TOKEN, timeout_s=5.0)
    try:
        away, here = make_node("a", relay.address), make_node("b", master.address)
        names = [f"key-{i}" for i in range(100)]
        until(lambda: master.states() == {"a": "alive", "b": "alive"})
        put(away, names[:50], replicas=2)
        put(away, names[50:])
        until(lambda: all(len(directory.locate(hashes([n]))[0]) == 2 for n in (names[0], names[49])))
        found(directory, names, 100)
        relay.cut()
        until(lambda: master.states().get("a") == (None if given_up else "suspect"), 5 * 3.0)
        assert hits(directory, names) == 50
        removed = names[:80]
        with Store(str(here.socket_path), token=TOKEN) as store:
            store.remove(removed)
        relay.heal()
        until(lambda: master.states() == {"a": "alive", "b": "alive"})
        found(directory, names, 20)
        until(lambda: away.metric("objects") == 20)
        assert hits(directory, removed) == 0
        assert away.is_sound()
    finally:
        directory.close()
        relay.close()
        master.close()


# ---- the wire, spoken by hand


def test_a_node_and_a_client_by_hand(master: MasterProcess) -> None:
    keys = [bytes([i]) * 16 for i in range(8)]
    me = Identity(
        b"me", os.urandom(16), b"host-me", b"127.0.0.1:1", b"/run/me.sock", b"tcp://h:1", b"tcp://h:2"
    )
    with (
        connect(master.address, TOKEN, b"member") as node,
        connect(master.address, TOKEN, b"directory") as client,
    ):
        body = node.ask(m.JOIN, m.join(me, Load(objects=3)) + b"\0of a later version").body
        number, resumed, _, beat_ms, rows_max, epoch = struct.unpack_from("<HBBIIQ", body)
        assert (resumed, beat_ms, rows_max) == (0, 200, 16384)
        assert body[20:33] == m.drops(0, [])
        (all_before, upto, first) = struct.unpack_from("<QQQ", body, 33)
        assert body[57:] == m.PACE
        assert (all_before, upto) == (0, first)
        node.send(m.DELTA, m.delta([(key, m.DRAM) for key in keys[:3]], flags=m.BEGIN), flags=w.ONE_WAY)
        node.send(m.DELTA, m.delta([(keys[0], m.SSD)], flags=m.END), flags=w.ONE_WAY)
        beat = node.ask(m.BEAT, m.beat(0, Load(objects=4))).body
        assert beat == struct.pack("<Q", epoch) + m.drops(0, []) + m.versions(first, []) + m.PACE
        newest = struct.pack("<Q", first)
        one = struct.pack("<BHB", 1, number, m.DRAM)
        two = struct.pack("<BHBHB", 2, number, m.DRAM, number, m.SSD)
        head = struct.pack("<QI", epoch, 4)
        assert client.ask(m.LOCATE, m.locate(keys[:4])).body == head + two + one + one + b"\0" + newest
        prefix = m.locate(keys, flags=m.PREFIX, width=2, holders_max=1)
        assert client.ask(m.LOCATE, prefix).body == struct.pack("<QI", epoch, 2) + one + one + newest
        members = client.ask(m.MEMBERS, struct.pack("<Q", 0)).body
        silent_ms = struct.unpack_from("<Q", members, 17)[0]
        rest = m.member(number, 0, silent_ms, me, Load(objects=4))
        assert members[8] == 3  # it has just started: somebody may have yet to tell what it holds
        assert members[:8] + members[9:] == struct.pack("<QI", epoch, 1) + rest + me.endpoints() + newest
        unchanged = client.ask(m.MEMBERS, struct.pack("<Q", epoch)).body
        assert (unchanged[:8], unchanged[8] & 1, len(unchanged)) == (struct.pack("<Q", epoch), 0, 17)
        assert client.ask(m.PLACE, m.place(100, 1, [], [])).body == struct.pack("<HH", 1, number) + newest
        assert client.ask(m.PLACE, m.place(100, 1, [], [b"host-me"])).body == struct.pack("<H", 0) + newest
        assert client.ask(m.PLACE, m.place(1 << 40, 1, [], [])).body == struct.pack("<H", 0) + newest
        node.send(m.DELTA, m.delta([(keys[1], m.DRAM | m.REMOVED)]), flags=w.ONE_WAY)
        node.ask(m.BEAT, m.beat(0, Load()))
        assert client.ask(m.LOCATE, m.locate([keys[1]])).body == struct.pack("<QIB", epoch, 1, 0) + newest
        # It could not be told that the first key is gone: the next beat tells it, until it says it knows.
        assert client.ask(m.FORGET, m.forget([keys[0]], [number])).body == struct.pack("<I", 1)
        for _ in range(2):
            told = node.ask(m.BEAT, m.beat(0, Load())).body
            assert told[8:] == m.drops(0, [keys[0]]) + m.versions(first + 1, [first + 1]) + m.PACE
        told = node.ask(m.BEAT, m.beat(1, Load())).body
        assert told[8:] == m.drops(1, []) + m.versions(first + 1, []) + m.PACE
        newest = struct.pack("<Q", first + 1)
        node.close()
        until(lambda: client.ask(m.LOCATE, m.locate([keys[2]])).body[8:] == struct.pack("<IB", 1, 0) + newest)
        changes = client.ask(m.MEMBERS, struct.pack("<QB", epoch, m.TAKES_CHANGES)).body
        assert changes[8] & ~m.FILLING == m.CHANGED | m.SINCE
        silent = changes[17:25]
        turned = struct.pack("<HHHBB", 0, 1, number, 1, 0) + silent + struct.pack("<I", 0)
        assert changes[9:] == turned + newest
        suspected = m.locate([keys[2]], flags=m.SUSPECTS)
        assert client.ask(m.LOCATE, suspected).body[8:] == struct.pack("<I", 1) + one + newest
        with connect(master.address, TOKEN, b"member") as again:
            assert again.ask(m.JOIN, m.join(me, Load(objects=3))).body[2] == 1  # resumed
            again.send(m.LEAVE, b"", flags=w.ONE_WAY)
            until(lambda: client.ask(m.LOCATE, suspected).body[8:] == struct.pack("<IB", 1, 0) + newest)
            assert again.ask(m.BEAT, m.beat(0, Load())).kind == w.ERROR
        assert master.states() == {}


def test_a_node_of_an_earlier_version_publishes_nowhere(master: MasterProcess) -> None:
    """Its JOIN ends before the endpoints."""
    old = Identity(b"old", os.urandom(16), b"host-old")
    with (
        connect(master.address, TOKEN, b"member") as node,
        connect(master.address, TOKEN, b"directory") as client,
    ):
        assert node.ask(m.JOIN, old.pack() + Load().pack()).kind == m.JOIN
        assert (
            client.ask(m.MEMBERS, struct.pack("<Q", 0))
            .body[:-8]
            .endswith(old.pack() + Load().pack() + bytes(4))
        )


def bad_frames() -> Iterator[tuple[str, bytes, bytes]]:
    """(what it is, the purpose, bytes after the handshake)"""
    yield "garbage", b"member", os.urandom(4096)
    yield "garbage", b"directory", bytes(4096)
    yield "another version", b"directory", w.frame(m.MEMBERS, bytes(8), version=9)
    yield "too long", b"directory", w.HEADER.pack(w.MAGIC, w.VERSION, m.LOCATE, 0, (8 << 20) + 1, 0, 1)
    yield "a handshake's kind", b"directory", w.frame(w.AUTH, bytes(64))
    yield "a store's kind", b"directory", w.frame(w.LOOKUP, bytes(64))
    yield (
        "a node's kind of a client",
        b"directory",
        w.frame(m.JOIN, m.join(Identity(b"x", bytes(16)), Load())),
    )
    yield "a client's kind of a node", b"member", w.frame(m.LOCATE, m.locate([]))
    yield "a beat before joining", b"member", w.frame(m.BEAT, m.beat(0, Load()))
    yield "leaving before joining", b"member", w.frame(m.LEAVE, b"", flags=w.ONE_WAY)
    yield "rows before joining", b"member", w.frame(m.DELTA, m.delta([]), flags=w.ONE_WAY)
    yield "a name of no bytes", b"member", w.frame(m.JOIN, m.join(Identity(b"", bytes(16)), Load()))
    yield "a long name", b"member", w.frame(m.JOIN, m.join(Identity(b"n" * 257, bytes(16)), Load()))
    yield "half a JOIN", b"member", w.frame(m.JOIN, m.join(Identity(b"x", bytes(16)), Load())[:-13])
    yield "half an endpoint", b"member", w.frame(m.JOIN, m.join(Identity(b"x", bytes(16)), Load())[:-9])
    yield "half a version", b"member", w.frame(m.JOIN, m.join(Identity(b"x", bytes(16)), Load())[:-1])
    yield "more keys than follow", b"directory", w.frame(m.LOCATE, m.locate([bytes(16)])[:-1])
    yield "more keys than allowed", b"directory", w.frame(m.LOCATE, m.locate([bytes(16)] * 16385))
    yield "more nodes than follow", b"directory", w.frame(m.PLACE, m.place(1, 1, [1, 2], [])[:-1])
    yield "a host that ends early", b"directory", w.frame(m.PLACE, m.place(1, 1, [], [b"host"])[:-1])
    yield "a removal that ends early", b"directory", w.frame(m.FORGET, m.forget([bytes(16)], [3])[:-1])
    ordered = m.ordered(1, 1, [bytes(16)], [1], [1], [0])
    yield "an order that ends early", b"directory", w.frame(m.ORDERED, ordered[:-1])
    yield (
        "an order of more keys than allowed",
        b"directory",
        w.frame(m.ORDERED, m.ordered(1, 1, [bytes(16)] * 16385, [], [0] * 16385, [0] * 16385)),
    )
    yield "removals before joining", b"member", w.frame(m.REMOVALS, m.removals(0, []), flags=w.ONE_WAY)
    join = w.frame(m.JOIN, m.join(Identity(b"x", bytes(16), b"strange"), Load()), request_id=1)
    yield "a second JOIN", b"member", join + join
    yield "an unknown tier", b"member", join + w.frame(m.DELTA, m.delta([(bytes(16), 2)]))
    yield (
        "more removals than follow",
        b"member",
        join + w.frame(m.REMOVALS, m.removals(0, [(bytes(16), 1)])[:-1]),
    )
    yield "more rows than follow", b"member", join + w.frame(m.DELTA, m.delta([(bytes(16), 0)])[:-1])


def test_bad_frames_end_their_connection_alone(
    master: MasterProcess, make_node: NodeMaker, directory: _native.DirectoryClient
) -> None:
    node = make_node("a", master.address)
    put(node, ["one"])
    found(directory, ["one"], 1)
    for what, purpose, data in bad_frames():
        with connect(master.address, TOKEN, purpose) as wire:
            with suppress(ConnectionError):
                wire.socket.sendall(data)
            with suppress(Closed, ConnectionError):  # a reset where more was sent than it read
                while (answer := wire.receive()).kind != w.ERROR:
                    assert answer.kind == m.JOIN, what
                assert answer.request_id == 0, what
                assert wire.is_closed(), what
        assert hits(directory, ["one"]) == 1, what
    with pytest.raises(AuthError):
        _native.DirectoryClient(master.address, b"another token").members(fresh=True)
    metrics = master.page("/stat")["metrics"]
    assert metrics["protocol_errors_total"] >= 15
    assert metrics["auth_failures_total"] == 1


def test_strangers_and_replays(master: MasterProcess, make_node: NodeMaker) -> None:
    host, _, port = master.address.rpartition(":")

    def stranger() -> Wire:
        return Wire(socket.create_connection((host, int(port)), 10))

    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(2000), w.frame(m.LOCATE, m.locate([bytes(16)]))):
        with stranger() as wire:
            assert wire.receive().kind == w.CHALLENGE
            with suppress(ConnectionError):
                wire.socket.sendall(data)
            with suppress(Closed, ConnectionError):
                assert wire.receive().kind == w.ERROR
    # A proof that was heard once opens nothing.
    with stranger() as wire:
        greeting = wire.receive()
        own = os.urandom(32)
        proved = b"default\0directory"
        proof = w.mac(b"client", TOKEN, greeting.body[:32], own, greeting.body[32:48], proved)
        heard = w.frame(w.AUTH, w.auth(b"default", own, proof) + w.text16(b"directory"), request_id=1)
        wire.socket.sendall(heard)
        assert wire.receive().kind == w.WELCOME
    with stranger() as wire:
        wire.receive()
        wire.socket.sendall(heard)
        answer = wire.receive()
        assert (answer.kind, answer.error[0]) == (w.ERROR, 2)
    # Idle strangers keep nobody out.
    idle = [stranger() for _ in range(80)]
    with connect(master.address, TOKEN, b"directory") as wire:
        assert wire.ask(m.LOCATE, m.locate([])).kind == m.LOCATE
    for wire in idle:
        wire.close()


def test_a_slow_reader_costs_the_master_little(
    master: MasterProcess, directory: _native.DirectoryClient
) -> None:
    def master_bytes() -> int:
        for line in Path(f"/proc/{master.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")

    directory.members(fresh=True)
    before = master_bytes()
    with connect(master.address, TOKEN, b"directory") as wire:
        question = w.frame(m.LOCATE, m.locate([bytes(16)] * 16384), request_id=1)
        wire.socket.settimeout(0.5)
        with suppress(TimeoutError):
            for _ in range(2000):  # half a gigabyte of questions, whose answers nobody reads
                wire.socket.sendall(question)
        assert master_bytes() - before < 32 * MIB
        directory.members(fresh=True)


# ---- a crowd


@pytest.fixture
def patient(runtime_dir: Path) -> Iterator[MasterProcess]:
    """A master that suspects no node which was silent while its test was busy elsewhere."""
    process = MasterProcess(suspect_after_s=60, gone_after_s=120)
    yield process
    process.close()


def test_two_hundred_nodes_and_a_thousand_clients(patient: MasterProcess) -> None:
    master = patient
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip(f"needs 3,000 open files; the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    wires: list[Wire] = []
    try:
        nodes = [connect(master.address, TOKEN, b"member") for _ in range(200)]
        wires += nodes
        keys = []
        for i, node in enumerate(nodes):
            who = Identity(f"n{i}".encode(), os.urandom(16), f"h{i}".encode())
            assert node.ask(m.JOIN, m.join(who, Load())).kind == m.JOIN
            keys.append(os.urandom(16))
            node.send(m.DELTA, m.delta([(keys[-1], 0)], flags=m.BEGIN | m.END), flags=w.ONE_WAY)
        clients = [connect(master.address, TOKEN, b"directory") for _ in range(1000)]
        wires += clients
        for node in nodes:
            assert node.ask(m.BEAT, m.beat(0, Load())).kind == m.BEAT
        question = w.frame(m.LOCATE, m.locate(keys), request_id=7)
        began_s = time.monotonic()
        for client in clients:
            client.socket.sendall(question)
        for client in clients:
            body = client.receive().body
            assert struct.unpack_from("<I", body, 8) == (200,)
            assert len(body) == 12 + 200 * 4 + 8
        print(f"1,000 clients asked for 200 keys each in {time.monotonic() - began_s:.3f} s")
        assert sum(state == "alive" for state in master.states().values()) == 200
    finally:
        for wire in wires:
            wire.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    until(lambda: "alive" not in master.states().values(), 5 * 1.0)


# ---- the admin pages and the command


def test_pages_need_the_admin_token(master: MasterProcess, make_node: NodeMaker) -> None:
    node = make_node("a", master.address)
    put(node, ["blue", "black", "red"])
    until(lambda: master.states() == {"a": "alive"})
    assert master.health()["status"] == "ok"
    with urllib.request.urlopen(f"{master.http}/metrics", timeout=10) as response:
        assert "moonpool_master_nodes_alive 1.0" in response.read().decode()
    for path in ("/nodes", "/keys", "/stat"):
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic x"}):
            request = urllib.request.Request(master.http + path, headers=headers)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=10)
            assert refused.value.code == 401
            refused.value.close()
    until(lambda: master.page("/nodes")["nodes"][0]["keys"] == 3)
    listed = master.page("/keys?prefix=bl&limit=10")["keys"]
    assert sorted(row["key"] for row in listed) == ["black", "blue"]
    assert len(master.page("/keys?limit=2")["keys"]) == 2
    assert master.page("/keys?namespace=other")["keys"] == []
    with pytest.raises(urllib.error.HTTPError) as refused:
        master.page("/keys?limit=0")
    assert refused.value.code == 400
    refused.value.close()
    assert master.page("/stat")["metrics"]["directory_rows"] == 3


def moonpool(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moonpool", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment() | more,
    )


def test_status_shows_the_cluster(master: MasterProcess, make_node: NodeMaker) -> None:
    node, other = make_node("a", master.address), make_node("b", master.address)
    put(node, ["one"])
    until(lambda: master.states() == {"a": "alive", "b": "alive"})
    other.kill()
    until(lambda: master.states() == {"a": "alive", "b": "suspect"})
    until(lambda: master.page("/nodes")["nodes"][0]["objects"] == 1)
    shown = moonpool("status", "--once", "--master", master.address)
    assert shown.returncode == 0, shown.stderr
    assert "1 alive, 1 suspect" in shown.stdout
    told = moonpool("status", "--json", "--master", master.address)
    assert '"state": "suspect"' in told.stdout
    lost = moonpool("status", "--once", "--master", "127.0.0.1:1")
    assert "the master at 127.0.0.1:1 does not answer" in " ".join(lost.stdout.split())


def test_sigterm_ends_it_cleanly(master: MasterProcess, make_node: NodeMaker) -> None:
    node = make_node("a", master.address)
    until(lambda: node.metric("master_joined") == 1)
    assert master.terminate() == 0
    until(lambda: node.metric("master_joined") == 0)


def test_a_port_beyond_loopback_needs_a_token(runtime_dir: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_CLUSTER")}
    for option, key in (("--listen", "master.listen"), ("--http", "master.http")):
        refused = subprocess.run(
            [sys.executable, "-m", "moonpool", "master", option, "0.0.0.0:0"],
            capture_output=True,
            text=True,
            timeout=60,
            env=env,
        )
        assert refused.returncode == 2
        assert f"{key} = 0.0.0.0:0 can be reached from other hosts" in refused.stderr


def test_a_port_that_is_taken_is_named(master: MasterProcess) -> None:
    refused = moonpool("master", "--listen", master.address, "--http", "off")
    assert refused.returncode in (2, 3)
    assert master.address in refused.stderr
    assert "in use" in refused.stderr


def test_a_client_after_close_and_without_a_master() -> None:
    client = _native.DirectoryClient("127.0.0.1:1", TOKEN)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        client.members()
    client.close()
    for call in (
        client.members,
        lambda: client.place(1),
        lambda: client.locate(b""),
        lambda: client.forget(b""),
    ):
        with pytest.raises(Error, match="closed"):
            call()
