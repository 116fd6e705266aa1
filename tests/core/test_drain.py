"""Draining a node: what only it has is on another host before it stops; nothing else changes.

The first tests run the real commands; the others drain nodes of this process, to look at what they count.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonpool import Store, _native
from moonpool.cli import run
from moonpool.core.config import paths
from moonpool.core.errors import Timeout, Unavailable
from moonpool.core.service.drain import Drain, DrainProgress, DrainRequest
from moonpool.core.service.http_get import exchange
from tests.descriptors import speaks

from .master_bed import ADMIN_TOKEN, MasterProcess, Relay, environment
from .pool_bed import Pool, pool
from .store_bed import MIB, TOKEN, until

__all__ = ["pool"]
START_S = 60.0


class NodeCommand:
    """`moonpool node`, on a host of its own as far as the pool knows. env: more variables."""

    def __init__(self, name: str, *arguments: str, **env: str) -> None:
        command = [sys.executable, "-m", "moonpool", "node", "--name", name, "--dram", "16MiB"]
        command += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--host-id", f"host-{name}"]
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, env=environment() | env, text=True
        )
        assert self.process.stdout is not None
        assert speaks(self.process.stdout, START_S), "the node says nothing"
        line = self.process.stdout.readline()
        assert line.startswith("moonpool node "), line
        self.http = next(word for word in line.split(", ") if "/metrics" in word).removesuffix("/metrics")
        self.socket = str(paths.node_socket(name))

    def store(self, **space: Any) -> Store:
        return Store(self.socket, token=TOKEN, timeout_s=10.0, **space)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(START_S) == 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def cluster(*names: str, **env: str) -> Iterator[list[NodeCommand]]:
    """A master and nodes."""
    with ExitStack() as stack:
        master = MasterProcess()
        stack.callback(master.close)
        nodes = []
        for name in names:
            nodes.append(NodeCommand(name, "--master", master.address, **env))
            stack.callback(nodes[-1].close)
        yield nodes


@pytest.fixture
def admin(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_CLUSTER_ADMIN_TOKEN", ADMIN_TOKEN)


def drained(capsys: pytest.CaptureFixture[str], node: NodeCommand, *options: str) -> tuple[int, Any]:
    code = run(["drain", "--url", node.http, "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_a_node_that_was_drained_leaves_no_cold_cache(
    admin: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit_file = tmp_path / "audit.log"
    env = {"MOONPOOL_NODE_TENANTS": '{"other": "8MiB"}', "MOONPOOL_LOG_AUDIT_FILE": str(audit_file)}
    spaces: list[dict[str, Any]] = [
        {},
        {"namespace": "second", "fingerprint": b"\0model\xff"},
        {"tenant": "other"},
    ]
    values = {f"key{i}": os.urandom(20_000 + i) for i in range(12)}
    large = os.urandom(5 * MIB)  # more than a node takes in one piece: it is striped
    with cluster("a", "b", **env) as (a, b), ExitStack() as stack:
        on_a = [stack.enter_context(a.store(**space)) for space in spaces]
        on_b = [stack.enter_context(b.store(**space)) for space in spaces]
        for store in on_a:
            assert all(store.put(list(values), list(values.values()), node="a"))
        on_a[0].put("striped", large)
        on_a[0].put("both", b"x" * 1000, replicas=2)
        until(lambda: on_b[0].get("striped") is not None)
        before = on_a[0].stat()

        code, page = drained(capsys, a, "--leave")
        assert (code, page["state"], page["node"], page["why"]) == (0, "done", "a", "")
        assert page["left_objects"] == page["nowhere_objects"] == 0
        assert page["copied_objects"] + page["there_objects"] == page["objects"] == before["objects"]
        assert page["there_objects"] >= 1  # both
        assert page["copied_bytes"] > 36 * 20_000 + MIB
        after = on_a[0].stat()
        for name in ("objects", "object_bytes", "removed_total", "evicted_total", "pins", "served_total"):
            assert after[name] == before[name], name

        ready = exchange("GET", f"{a.http}/readyz", timeout_s=30.0)
        assert ready.status == 503
        assert json.loads(ready.body)["reasons"] == ["this node is drained, and will stop"]
        a.stop()
        for store in on_b:
            assert [bytes(view) for view in store.get(list(values), verify=True)] == list(values.values())
        assert bytes(on_b[0].get("striped")) == large
        assert on_b[0].get("both") is not None

    events = [json.loads(line) for line in audit_file.read_text().splitlines()]
    assert [event["event"] for event in events] == ["drain", "drain_ended"]
    assert events[0]["node"] == "a"
    assert events[0]["peer"] == "127.0.0.1"
    assert (events[1]["state"], events[1]["copied_bytes"]) == ("done", page["copied_bytes"])


def test_a_limit_of_time_or_ctrl_c_leaves_some_and_the_exit_code_says_so(
    admin: None, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"key{i}" for i in range(40)]
    with cluster("a", "b") as (a, b), a.store() as on_a, b.store() as on_b:
        on_a.put(keys, [os.urandom(50_000)] * len(keys), node="a")
        on_a.get("key7", bytearray(50_000))  # the most recently used one
        on_a.stat()
        code, page = drained(capsys, a, "--for", "5s", "--rate", "100KB/s")
        assert (code, page["state"], page["why"]) == (1, "incomplete", "its time was over")
        assert 0 < page["copied_objects"] < 40
        assert page["left_objects"] == 40 - page["copied_objects"]
        assert on_b.stat("key7", everywhere=True).copies[0].node == "b"

        command = [sys.executable, "-m", "moonpool", "drain", "--url", a.http, "--rate", "100KB/s"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True)
        until(lambda: on_b.stat()["objects"] > page["copied_objects"], START_S)
        assert run(["drain", "--url", a.http]) == 3
        assert "node a is being drained already" in capsys.readouterr().err
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=START_S)
        assert process.returncode == 130
        assert "it ended early: it was stopped" in out
        there = on_b.stat()["objects"]
        assert page["copied_objects"] < there < 40

        code, page = drained(capsys, a)
        assert (code, page["there_objects"], page["copied_objects"]) == (0, there, 40 - there)
        assert drained(capsys, a)[1]["there_objects"] == 40


def test_what_cannot_be_drained_is_one_sentence(admin: None, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> tuple[int, str]:
        code = run(["drain", *arguments])
        return code, capsys.readouterr().err.strip()

    with cluster("a") as (a,):
        code, text = refused("--url", a.http)
        assert code == 3
        assert text == (
            "moonpool: drain: node a cannot be drained, there is nowhere to copy to: "
            "the pool has no other node"
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOONPOOL_CLUSTER_ADMIN_TOKEN", "another token of sixteen bytes")
            code, text = refused("--url", a.http)
            assert (code, "another admin token" in text) == (2, True)
            patch.setenv("MOONPOOL_CLUSTER_ADMIN_TOKEN", ADMIN_TOKEN)
            patch.setenv("MOONPOOL_NODE_HTTP", a.http.removeprefix("http://"))
            code, text = refused("b")
            assert (code, "is called a, not b; give the HTTP address of b: --url" in text) == (2, True)
    alone = NodeCommand("alone")
    try:
        code, text = refused("--url", alone.http)
        assert (code, text.endswith("the node has no master, and so no other nodes")) == (3, True)
    finally:
        alone.close()
    code, text = refused("--url", alone.http)
    assert (code, "no node answers at" in text) == (3, True)
    assert refused("--rate", "fast")[0] == refused("--for", "soon")[0] == 2


@pytest.fixture(params=[1, 2], ids=["one range", "two ranges"])
def ranged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path, request.param)
    yield made
    assert all(server.check_integrity() for server in made.nodes.values())
    made.close()


def range_of(key: str, ranges: int) -> int:
    digest: bytes = _native.key_hash("default", "default", b"", key.encode())
    return int.from_bytes(digest[:8], "little") % 1024 * ranges // 1024


def keys_of_each_range(prefix: str, ranges: int, n: int = 3) -> list[str]:
    """n keys of each range."""
    keys = [f"{prefix}{i}" for i in range(100 * n)]
    return [
        key for index in range(ranges) for key in [key for key in keys if range_of(key, ranges) == index][:n]
    ]


@contextmanager
def native_client(pool: Pool, name: str, timeout_s: float = 30.0) -> Iterator[_native.Client]:
    client = _native.Client(str(pool.folder / f"{name}.sock"), TOKEN, timeout_s=timeout_s)
    client.connect()
    yield client
    client.close()


@contextmanager
def relays(pool: Pool) -> Iterator[list[Relay]]:
    """To the master of each range."""
    made = [Relay(master.addresses[0]) for master in pool.masters]
    yield made
    for relay in made:
        relay.close()


def drain_here(pool: Pool, name: str, **asked: Any) -> DrainProgress:
    """Drains a node of this process, to the end."""

    def client(tenant: str, namespace: str, fingerprint: bytes) -> _native.Client:
        path = str(pool.folder / f"{name}.sock")
        made = _native.Client(path, TOKEN, tenant, namespace, fingerprint, timeout_s=30.0)
        made.connect()
        return made

    drain = Drain(name, pool.nodes[name], client, DrainRequest(**asked))
    drain.start()
    until(lambda: not drain.is_running, 60.0)
    return drain.now()


def test_what_fits_nowhere_is_counted_and_evict_makes_room(pool: Pool) -> None:
    pool.node("a", 16), pool.node("b", 8)
    a, b = pool.store("a"), pool.store("b")
    a.put([f"key{i}" for i in range(12)], [bytes([i]) * MIB for i in range(12)], node="a")
    old = [f"old{i}" for i in range(5)]
    b.put(old, [b"old"] * 5, node="b")
    pool.told()
    done = drain_here(pool, "a")
    assert done.state == "incomplete"
    assert done.copied_objects + done.nowhere_objects == 12
    assert (done.left_objects, done.damaged_objects) == (0, 0)
    assert 3 <= done.copied_objects < 8
    assert done.why
    assert done.nowhere_bytes == done.nowhere_objects * MIB
    pool.told()
    assert pool.nodes["b"].metrics()["evicted_total"] == 0
    assert all(b.exists(old))
    assert b.stat("key11").copies[0].node == "b"  # the most recently used ones
    done = drain_here(pool, "a", evict=True)
    assert done.copied_objects > 0
    assert pool.nodes["a"].metrics()["evicted_total"] == 0
    assert pool.nodes["b"].metrics()["evicted_total"] > 0


def test_a_drain_is_no_use_and_brings_nothing_back(pool: Pool) -> None:
    pool.node("a", 16), pool.node("b", 64)
    a, b = pool.store("a"), pool.store("b")
    keys = [f"key{i}" for i in range(10)]
    a.put(keys, [os.urandom(MIB) for _ in keys], node="a")
    a.put(["page0", "page1"], [b"p", b"q"], groups=["page", "page"], soft_pin_s=60.0, node="a")
    pool.told()
    server = pool.nodes["a"]
    rows = server.holdings(0)[1]
    held = server.hold(rows[:40])
    assert held.space == b"default\0default\0"
    assert a.remove("key0") is True
    client = _native.Client(str(pool.folder / "a.sock"), TOKEN, timeout_s=30.0)
    client.connect()
    outcomes, _ = client.copy_out(held, False)  # of what was removed since
    assert outcomes == b"\3"
    del held
    assert client.copy_out(server.hold(rows[:40]), False)[0] == b"\4"
    client.close()
    pool.told()
    assert b.exists("key0").value == "miss"

    assert drain_here(pool, "a").copied_objects == 11
    pool.told()
    assert b.stat("page1").copies[0].grouped
    assert b.stat("page1").copies[0].soft_pinned
    for i in range(8):  # the one that was put first goes first, also after the drain
        a.put(f"new{i}", bytes(MIB), node="a")
    here = [bool(a.stat(key, everywhere=False).copies[0].node == "a") for key in keys[1:]]
    assert here == sorted(here)
    assert not here[0]
    assert here[-1]


def test_what_is_removed_or_replaced_after_it_was_listed_never_comes_back(ranged: Pool) -> None:
    ranged.node("a"), ranged.node("b")
    a, b = ranged.store("a"), ranged.store("b")
    n = len(ranged.masters)
    kept, removed = keys_of_each_range("kept", n), keys_of_each_range("removed", n)
    replaced, put_again = keys_of_each_range("replaced", n), keys_of_each_range("again", n)
    every = [*kept, *removed, *replaced, *put_again]
    a.put(every, [b"old"] * len(every), node="a")
    ranged.told()
    server = ranged.nodes["a"]
    held = server.hold(server.holdings(0)[1])
    assert b.remove([*removed, *put_again]) == [True] * len([*removed, *put_again])
    a.put(replaced, [b"new"] * len(replaced), replace=True, node="a")
    a.put(put_again, [b"new"] * len(put_again), node="a")
    with native_client(ranged, "a") as client:
        outcomes, _ = client.copy_out(held, False)
    assert len(outcomes) == len(every)
    assert set(outcomes) <= set(b"\0\3")  # b has heard of the removals, or the master has it drop the copy
    ranged.told()
    for store in (a, b):
        assert [store.exists(key).value for key in removed] == ["miss"] * len(removed)
        for key in (*replaced, *put_again):
            assert bytes(store.get(key)) == b"new"

    done = drain_here(ranged, "a")
    assert (done.state, done.left_objects, done.nowhere_objects) == ("done", 0, 0)
    ranged.told()
    left = [*kept, *replaced, *put_again]
    assert ranged.nodes["b"].metrics()["objects"] == len(left)
    ranged.nodes.pop("a").stop()
    assert [bytes(view) for view in b.get(left)] == [b"old"] * len(kept) + [b"new"] * (
        len(replaced) + len(put_again)
    )


def test_a_node_that_missed_the_removals_drops_the_copies_when_it_hears_of_them(ranged: Pool) -> None:
    n = len(ranged.masters)
    with relays(ranged) as to_masters:
        # A client tells two nodes of a removal: the holders, where there are two. The most room is at b.
        ranged.node("a"), ranged.node("holder")
        ranged.node("b", 64, masters=[relay.address for relay in to_masters])
        a = ranged.store("a")
        first = keys_of_each_range("first", n)
        a.put(first, [b"first"] * len(first), node="a")
        ranged.told()
        assert drain_here(ranged, "a").copied_objects == len(first)
        ranged.told()
        keys = keys_of_each_range("key", n)
        a.put(keys, [b"old"] * len(keys), node=["a", "holder"], replicas=2)
        ranged.told()
        assert ranged.nodes["holder"].metrics()["objects"] == len(keys)
        server = ranged.nodes["a"]
        for relay in to_masters:
            relay.cut()
        held = server.hold(server.holdings(0)[1])
        assert a.remove(keys) == [True] * len(keys)
        a.put(keys, [b"new"] * len(keys), node="a")
        with native_client(ranged, "a") as client:
            outcomes, _ = client.copy_out(held, False)
        assert outcomes.count(b"\1") == len(first)
        assert outcomes.count(b"\0") == len(keys)
        to_b = ranged.nodes["b"].metrics
        assert to_b()["objects"] == len(first) + len(keys)
        for relay in to_masters:
            relay.heal()
        until(lambda: to_b()["objects"] == len(first), 60.0)
        assert drain_here(ranged, "a").copied_objects == len(keys)
        b = ranged.store("b")
        until(lambda: [bytes(view) for view in b.get(keys)] == [b"new"] * len(keys))
        assert to_b()["objects"] == len(first) + len(keys)


def test_keys_of_a_range_whose_order_a_node_does_not_know_are_copied_later(tmp_path: Path) -> None:
    pool = Pool(tmp_path, 2)
    with relays(pool) as (_, to_second):
        to_second.cut()
        first, second = keys_of_each_range("key", 2)[:3], keys_of_each_range("key", 2)[3:]
        pool.node("b")
        pool.node("a", masters=[pool.masters[0].addresses[0], to_second.address], joins=1)
        server = pool.nodes["a"]
        with native_client(pool, "a", timeout_s=10.0) as client:
            client.put([*first, *second], [b"value"] * 6)
            outcomes, _ = client.copy_out(server.hold(server.holdings(0)[1]), True)
        assert sorted(outcomes) == [0, 0, 0, 3, 3, 3]
        assert pool.nodes["b"].metrics()["objects"] == 3
        to_second.heal()
        until(lambda: server.metrics()["masters_joined"] == 2, 60.0)
        done = drain_here(pool, "a")
        assert (done.state, done.copied_objects, done.there_objects) == ("done", 3, 3)
        pool.close()


def test_another_node_of_the_host_counts_where_there_is_no_other_host(pool: Pool) -> None:
    pool.node("a", host="one"), pool.node("b", host="one")
    a = pool.store("a")
    a.put("key", b"value", node="a")
    pool.told()
    assert drain_here(pool, "a").copied_objects == 1
    pool.told()
    assert drain_here(pool, "a").there_objects == 1
    pool.node("c", host="two")
    until(lambda: drain_here(pool, "a").copied_objects == 1)
    pool.told()
    assert {copy.node for copy in a.stat("key").copies} == {"a", "b", "c"}
    pool.nodes.pop("b").stop()
    pool.nodes.pop("c").stop()
    with pytest.raises(Unavailable, match="node a cannot be drained, there is nowhere to copy to"):
        until(lambda: drain_here(pool, "a").state == "")


class Listing:
    """A server that has one object, which it lists; its masters' beats are what the test says."""

    def __init__(self) -> None:
        self.beats = [(0, 0, True, 5), (1, 0, False, 0), (2, 1, True, 7)]
        self.held = self.asked = 0
        self.fails = False

    def holdings(self, cursor: int) -> tuple[int, bytes]:
        if self.fails:
            raise Timeout("the node's data plane did not answer", operation="drain")
        return 0, struct.pack("<IIQQQII", 0, 3, 1, 10, 1, 0, 0)

    def settled(self) -> list[tuple[int, int, bool, int]]:
        self.asked += 1
        return self.beats

    def hold(self, rows: bytes) -> Any:
        self.held += bool(rows)
        return SimpleNamespace(space=b"default\0default\0" if rows else b"")


def drain_of(listing: Listing, **asked: Any) -> Drain:
    copies = SimpleNamespace(copy_out=lambda held, evict: (b"\0" * bool(held.space), ""), close=lambda: None)
    return Drain("a", cast("_native.Server", listing), lambda *_: copies, DrainRequest(**asked))


def test_nothing_is_copied_before_the_masters_have_compared_what_was_listed() -> None:
    """An object that was removed before its master knew of it here has gone then: else its copy would come
    back under the version up to which the node is right."""
    listing = Listing()
    drain = drain_of(listing)
    drain.start()
    for beats in (
        [(0, 0, True, 6), (1, 0, False, 0), (2, 1, True, 9)],
        [(0, 0, True, 6), (1, 0, True, 1), (2, 1, True, 9)],
        [(0, 0, True, 7), (1, 0, True, 2), (3, 1, True, 9), (2, 1, True, 9)],  # a learned one
    ):
        listing.beats, asked = beats, listing.asked
        until(lambda asked=asked: listing.asked > asked + 2, 60.0)
        assert listing.held == 0
    listing.beats = [(0, 0, True, 7), (1, 0, True, 2), (3, 1, True, 11), (2, 1, True, 9)]
    until(lambda: not drain.is_running, 60.0)
    assert (drain.now().state, drain.now().copied_objects, listing.held) == ("done", 1, 1)


def test_a_drain_that_could_not_list_or_settle_is_incomplete() -> None:
    listing = Listing()
    drain = drain_of(listing)
    listing.fails = True
    drain.start()
    until(lambda: not drain.is_running, 60.0)
    assert drain.now().state == "incomplete"
    assert "data plane did not answer" in drain.now().why
    listing = Listing()
    drain = drain_of(listing, for_s=0.2)  # the masters answer no more
    drain.start()
    until(lambda: not drain.is_running, 60.0)
    assert (drain.now().state, drain.now().why, listing.held) == ("incomplete", "its time was over", 0)
