"""The proxy finds the nodes of its pool by itself, and says so when it cannot: real nodes, real streams."""

from __future__ import annotations

import array
import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import moonpool
from moonpool.core.config.config import load
from moonpool.core.service.listen_addresses import host_id
from moonpool.core.service.node import Node
from moonpool.core.store.keys import Ranges, block_digests, block_name
from moonpool.disagg_proxy.events import pool_discovery
from moonpool.disagg_proxy.events.pool_discovery import PoolDiscovery
from moonpool.disagg_proxy.events.pool_search import FoundNodes, PoolSearch
from moonpool.disagg_proxy.events.settings import EventSource, PoolSettings
from moonpool.disagg_proxy.events.subscribed_streams import SubscribedStreams
from moonpool.disagg_proxy.from_config import proxy_settings
from tests.core.master_bed import MasterProcess
from tests.core.store_bed import MIB, TOKEN
from tests.core.store_bed import until as wait_until
from tests.descriptors import speaks
from tests.disagg_proxy.harness import Bed, bed, until, with_deadline

BLOCK = 64  # of the index of engines that have told nothing yet
FINGERPRINT = b"f" * 32


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_discovery, "LOOK_EVERY_S", 0.02)


@pytest.fixture
def elsewhere(runtime: Path) -> dict[str, str]:
    """The environment of processes of another host: another runtime folder than that of this test."""
    folder = runtime / "other"
    folder.mkdir(mode=0o700)
    return {**os.environ, "MOONPOOL_RUNTIME_DIR": str(folder), "MOONPOOL_CLUSTER_TOKEN": TOKEN.decode()}


@asynccontextmanager
async def node(name: str = "a", **settings: object) -> AsyncIterator[Node]:
    arguments = {"name": name, "dram": 8 * MIB, "http": "off", "listen": "off", **settings}
    made = Node(load(arguments={f"node.{key}": value for key, value in arguments.items()}, env={}))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


class NodeProcess:
    """`moonpool node`, to be killed."""

    def __init__(self, name: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        command = [
            sys.executable,
            "-m",
            "moonpool",
            "node",
            "--name",
            name,
            "--dram",
            "8MiB",
            "--http",
            "off",
        ]
        self.process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, env=env, text=True)
        assert self.process.stdout is not None
        assert speaks(self.process.stdout, 60.0), "the node says nothing"
        line = self.process.stdout.readline()
        assert line.startswith("moonpool node "), line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def tokens(first: int, blocks: int = 4) -> list[int]:
    return list(range(first, first + blocks * BLOCK))


async def put(socket: Path, prompt: list[int], token: bytes | None = None) -> None:
    def call() -> None:
        names = [block_name(digest, Ranges(0, 0, 1, 0, 1)) for digest in block_digests(prompt, BLOCK)]
        with moonpool.Store(str(socket), token=token, fingerprint=FINGERPRINT) as store:
            store.put(names, [bytes(1024)] * len(names))

    await asyncio.to_thread(call)


def in_pool(b: Bed, prompt: list[int]) -> int:
    """Tokens of the prompt that the proxy knows to be in the pool."""
    return b.proxy._locator.find(array.array("I", prompt).tobytes(), b"").pool


async def master_rows(b: Bed) -> list[dict[str, Any]]:
    """What the page at /ui says of the pool's masters."""
    found = json.loads((await b.ask("GET", "/ui/data")).body)["masters"]
    assert isinstance(found, list)
    return found


async def pool_rows(b: Bed) -> dict[str, str]:
    page = json.loads((await b.ask("GET", "/engines")).body)
    return {row["name"]: row["state"] for row in page.get("pool", [])}


def without_options(**arguments: object) -> dict[str, Any]:
    """What `moonpool proxy --engine URL --engine URL` looks for, and how it chooses."""
    made = proxy_settings(
        load(arguments={"proxy.engines": ["http://h:1", "http://h:2"], **arguments}, env={})
    )
    assert made.pool is not None
    return {"pool": made.pool, "policy": made.policy, "tokenizer": ("none",)}


LATER: dict[str, Any] = {"pool": PoolSettings(), "policy": "conductor", "tokenizer": ("none",)}


@with_deadline
async def test_without_an_option_the_node_of_the_host_is_heard(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert without_options()["policy"] == "round_robin"  # without a pool there is nothing to look at
    async with node() as a:
        await put(a.socket, tokens(0))
        found = without_options()
        assert found["policy"] == "conductor"
        async with bed(1, **found) as b:
            await until(lambda: in_pool(b, tokens(0)) == len(tokens(0)))
            await put(a.socket, tokens(1000))
            await until(lambda: in_pool(b, tokens(1000)) == len(tokens(1000)))
            assert await pool_rows(b) == {"node:a": "live"}
            assert f"the KV events of node:a at ipc://{a.socket}.pub are followed" in caplog.text
            (shown,) = json.loads((await b.ask("GET", "/ui/data")).body)["pool"]
            assert shown == {"name": "node:a", "endpoint": f"ipc://{a.socket}.pub", "state": "live"}
            metrics = (await b.ask("GET", "/metrics")).body.decode()
            assert 'moonpool_proxy_events_heard{stream="node:a"} 1.0' in metrics
            assert "events" not in json.loads((await b.ask("GET", "/health")).body)


@with_deadline
async def test_a_proxy_that_began_without_a_pool_says_what_to_do(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By its default it takes turns, which cannot change while it runs."""
    settings = without_options()
    assert settings["policy"] == "round_robin"
    async with bed(1, **settings) as b, node() as a:
        await until(lambda: f"node:a at ipc://{a.socket}.pub is a node of a pool" in caplog.text)
        assert "start it again, or with --policy conductor" in caplog.text
        assert await pool_rows(b) == {}
        discovery = b.proxy._pool_discovery
        assert discovery is not None
        assert discovery._task is not None
        await discovery._task  # it looks no more
    named = {"proxy.engines": ["http://h:1"], "proxy.policy": "least_load"}
    assert proxy_settings(load(arguments=named, env={})).pool is None


@with_deadline
async def test_nodes_that_come_restart_and_go(runtime: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with bed(1, **LATER) as b:
        assert await pool_rows(b) == {}
        async with node("a") as a, node("b") as other:
            await put(a.socket, tokens(0))
            await put(other.socket, tokens(1000))
            await until(lambda: in_pool(b, tokens(0)) == in_pool(b, tokens(1000)) == 4 * BLOCK)
            assert await pool_rows(b) == {"node:a": "live", "node:b": "live"}
            await a.stop()
            await until(lambda: in_pool(b, tokens(0)) == 0)
            assert in_pool(b, tokens(1000)) == 4 * BLOCK
            assert (
                f"the KV events of node:a at ipc://{runtime}/node-a.sock.pub: the node is gone" in caplog.text
            )
            async with node("a") as again:
                await put(again.socket, tokens(2000))
                await until(lambda: in_pool(b, tokens(2000)) == 4 * BLOCK)
                assert in_pool(b, tokens(0)) == 0


@with_deadline
async def test_a_node_that_is_killed_is_dropped(runtime: Path) -> None:
    made = await asyncio.to_thread(NodeProcess, "a", "--listen", "off")
    socket = runtime / "node-a.sock"
    try:
        async with bed(1, **LATER) as b:
            await put(socket, tokens(0))
            await until(lambda: in_pool(b, tokens(0)) == 4 * BLOCK)
            made.kill()
            assert (runtime / "node-a.sock.events").exists()  # left behind, and of no node
            await until(lambda: in_pool(b, tokens(0)) == 0)
            assert await pool_rows(b) == {}
    finally:
        made.kill()


@with_deadline
async def test_a_stream_by_hand_wins(runtime: Path) -> None:
    async with node() as a:
        (endpoint, replay), by_hand = a.stat()["events"], "mine"  # type: ignore[misc]
        assert list(PoolSearch(PoolSettings()).look().sources) == ["node:a"]
        assert not PoolSearch(PoolSettings(), [endpoint]).look().sources
        events = (EventSource(by_hand, endpoint, replay, pool=True),)
        async with bed(1, events=events, **LATER) as b:
            await put(a.socket, tokens(0))
            await until(lambda: in_pool(b, tokens(0)) == 4 * BLOCK)
            assert await pool_rows(b) == {"mine": "live"}


@with_deadline
async def test_a_folder_that_is_absent_or_open_to_others(
    runtime: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runtime / "none"
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(folder))
    assert without_options()["policy"] == "round_robin"
    async with bed(1, **LATER) as b:
        discovery = b.proxy._pool_discovery
        assert discovery is not None
        await until(lambda: str(folder) in discovery.remedy())
        assert f"it found no node in {folder}: run it as the nodes' user" in discovery.remedy()
        assert str(folder) not in caplog.text
        folder.mkdir(mode=0o755)
        await until(lambda: "chmod 700" in caplog.text)
        assert "chmod 700" in discovery.remedy()
        folder.chmod(0o700)
        await until(lambda: "chmod" not in discovery.remedy())
        assert caplog.text.count("chmod 700") == 1
        async with node() as a:
            await put(a.socket, tokens(0))
            await until(lambda: in_pool(b, tokens(0)) == 4 * BLOCK)


@with_deadline
async def test_nodes_of_other_hosts_come_from_the_master(
    runtime: Path, elsewhere: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """One listens beyond loopback, where its events need the token; the other publishes by hand."""
    master = await asyncio.to_thread(MasterProcess, env=elsewhere)
    folder = Path(elsewhere["MOONPOOL_RUNTIME_DIR"])
    nodes: list[NodeProcess] = []
    more = {"cluster.master": master.address}
    secret = runtime / "secret"
    secret.touch(0o600)
    secret.write_bytes(TOKEN)
    try:
        for name, *arguments in (
            ("far", "--listen", "0.0.0.0:0"),
            ("hand", "--listen", "127.0.0.1:0", "--events", "tcp://127.0.0.1:0"),
            ("mute", "--listen", "127.0.0.1:0", "--events", "none"),
        ):
            arguments += ["--master", master.address]
            nodes.append(await asyncio.to_thread(NodeProcess, name, *arguments, env=elsewhere))
        settings = without_options(**more, **{"cluster.token_file": str(secret)})
        assert settings["policy"] == "conductor"
        async with bed(1, **settings) as b:
            for at, name in enumerate(("far", "hand")):
                await put(folder / f"node-{name}.sock", tokens(1000 * at), TOKEN)
                await until(lambda at=at: in_pool(b, tokens(1000 * at)) == 4 * BLOCK)
            assert [row.partition("@")[0] for row in await pool_rows(b)] == ["node:far", "node:hand"]
            (row,) = await master_rows(b)
            assert (row["address"], row["role"], row["why"]) == (master.address, "owner", "")
            while (await master_rows(b))[0]["nodes"] != 3:  # the last one joined a moment ago
                await asyncio.sleep(0.05)
            nodes[0].process.terminate()
            await until(lambda: in_pool(b, tokens(0)) == 0)
            master.close()  # the nodes that it had last stay
            await until(lambda: f"looked for at the master {master.address}" in caplog.text)
            assert in_pool(b, tokens(1000)) == 4 * BLOCK
            while not (await master_rows(b))[0]["why"]:
                await asyncio.sleep(0.05)
    finally:
        for made in nodes:
            made.kill()
        master.close()


def test_a_proxy_beside_a_node_learns_of_its_master(elsewhere: dict[str, str], runtime: Path) -> None:
    """And of the token, without a setting; a node that both name is followed by its socket."""
    master = MasterProcess(env=elsewhere)
    nodes = []
    try:
        here = {**elsewhere, "MOONPOOL_RUNTIME_DIR": str(runtime)}
        for name, env in (("near", here), ("far", elsewhere)):
            more = ("--listen", "0.0.0.0:0", "--master", master.address, "--host-id", name)
            nodes.append(NodeProcess(name, *more, env=env))
        search = PoolSearch(PoolSettings())
        found = wait_until(lambda: len((look := search.look()).sources) == 2 and look, 30.0)
        near, far = found.sources.values()
        assert (near.name, near.endpoint) == ("node:near", f"ipc://{runtime}/node-near.sock.pub")
        assert far.name.startswith("node:far@")
        assert far.endpoint.startswith("tcp://")
        assert far.token == TOKEN
        assert found.places == (f"in {runtime}", f"at the master {master.address}")
        search.close()
        wrong = PoolSearch(PoolSettings(master.address, b"another token of these tests"))
        found = wrong.look()
        assert list(found.sources) == ["node:near"]
        assert "token" in found.problems[f"at the master {master.address}"]
        wrong.close()
    finally:
        for made in nodes:
            made.kill()
        master.close()


def test_what_is_no_endpoint_is_passed_over(runtime: Path) -> None:
    """A file of a later version, or of a node whose disk was full."""
    with moonpool_socket(runtime / "node-x.sock"):
        for text in ('{"events": "udp://h:1"}', '{"events": 7}', "", "[]", '{"events": "ipc:///x"}'):
            (runtime / "node-x.sock.events").write_text(text)
            assert bool(PoolSearch(PoolSettings()).look().sources) is (text == '{"events": "ipc:///x"}')
    assert not PoolSearch(PoolSettings()).look().sources  # nothing serves its socket


class Told(NamedTuple):
    """What a master tells of a node."""

    name: str = "x"
    address: str = "10.0.0.1:7710"
    host_id: str = "another"
    socket_path: str = ""
    events: str = ""
    events_replay: str = ""


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (Told(events="ipc:///var/run/docker.sock"), "only tcp://host:port is taken"),
        (Told(events="tcp://10.0.0.1:1", events_replay="ipc:///var/run/docker.sock"), "only tcp://host:port"),
        (Told(events="inproc://x"), "only tcp://host:port"),
        (Told(events="tcp://127.0.0.1:1"), "loopback of another host"),
        (Told(events="tcp://10.0.0.1:1", events_replay="tcp://127.0.0.1:1"), "loopback of another host"),
        (Told(events="tcp://10.0.0.1:x"), "an event stream is at tcp://host:port"),
        (Told(), "--pool-events NAME=ENDPOINT"),  # of an earlier version
        (Told(events="tcp://10.0.0.1:1", events_replay="tcp://10.0.0.1:2"), ""),
        (Told(events="tcp://127.0.0.1:1", host_id=host_id()), ""),
    ],
)
def test_of_a_master_only_addresses_that_can_be_meant_are_taken(
    runtime: Path, told: Told, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A master, or a node that joins it, may tell anything; what is not taken is said once."""
    search = PoolSearch(PoolSettings("10.0.0.9:7700", TOKEN))
    search.look_here()
    search._masters["10.0.0.9:7700"].members = [told]  # type: ignore[list-item]
    search._masters["10.0.0.9:7700"].token = TOKEN
    found = search.found()
    if why:
        assert not found.sources
        assert why in found.unfollowed["node:x@10.0.0.1:7710"]
        discovery = PoolDiscovery(search, NoRoom(1))
        for _ in range(3):
            discovery.apply(found)
        assert [message for message in caplog.messages if why in message] == caplog.messages
        assert len(caplog.messages) == 1
        assert why in discovery.remedy()
    else:
        assert not found.unfollowed
        (source,) = found.sources.values()
        assert source.token == (b"" if "127.0.0.1" in told.events else TOKEN)


def test_the_token_for_members_is_that_of_their_master(runtime: Path) -> None:
    """The node beside it may stop at any moment, and its file is gone then."""
    search = PoolSearch(PoolSettings("10.0.0.9:7700"))
    search.look_here()
    search._masters["10.0.0.9:7700"].members = [Told(events="tcp://10.0.0.1:1")]  # type: ignore[list-item]
    search._masters["10.0.0.9:7700"].token = TOKEN
    (source,) = search.found().sources.values()
    assert source.token == TOKEN


@with_deadline
async def test_a_node_at_all_addresses_is_followed_by_a_proxy_of_its_host(
    runtime: Path, tmp_path: Path
) -> None:
    """It asks for the token there, although the proxy connects to a loopback."""
    secret = tmp_path / "token"
    secret.touch(0o600)
    secret.write_bytes(TOKEN)
    arguments = {"node.events": "tcp://0.0.0.0:0", "node.events_replay": "tcp://0.0.0.0:0"}
    arguments |= {"cluster.token_file": str(secret), "node.name": "a", "node.listen": "off"}
    arguments |= {"node.dram": 8 * MIB, "node.http": "off"}  # type: ignore[dict-item]
    made = Node(load(arguments=arguments, env={}))
    await made.start()
    try:
        async with bed(1, **LATER) as b:
            await put(made.socket, tokens(0), TOKEN)
            await until(lambda: in_pool(b, tokens(0)) == 4 * BLOCK)
            assert await pool_rows(b) == {"node:a": "live"}
    finally:
        await made.stop()


@with_deadline
async def test_a_runtime_folder_with_a_space_and_a_comma(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runtime / "a b,c"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(folder))
    async with node() as a, bed(1, **LATER) as b:
        await put(a.socket, tokens(0))
        await until(lambda: in_pool(b, tokens(0)) == 4 * BLOCK)


def test_a_master_that_starts_again_keeps_its_nodes(elsewhere: dict[str, str], runtime: Path) -> None:
    """Its first answers lack the nodes that have not joined it yet."""
    master = MasterProcess(env=elsewhere)
    port = master.address
    search = PoolSearch(PoolSettings(port, TOKEN))
    nodes = []
    try:
        for name in ("a", "b"):
            more = ("--listen", "0.0.0.0:0", "--master", port, "--host-id", name)
            nodes.append(NodeProcess(name, *more, env=elsewhere))
        wait_until(lambda: len(search.look().sources) == 2, 30.0)
        nodes[1].process.send_signal(signal.SIGSTOP)  # it does not join again, yet
        master.close()
        assert len(search.look().sources) == 2
        master = MasterProcess(env=elsewhere, listen=port)
        few = set()

        def answered() -> bool:
            found = search.look()
            assert len(found.sources) == 2
            few.add(len(search._masters[port].client.members(fresh=True)[1]) if not found.problems else 0)  # type: ignore[union-attr]
            return 1 in few

        wait_until(answered, 30.0)
        nodes[1].process.send_signal(signal.SIGCONT)
    finally:
        search.close()
        for made in nodes:
            made.kill()
        master.close()


@with_deadline
async def test_a_master_that_answers_late_delays_no_node_of_the_host(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    asked: list[str] = []

    def ask(self: PoolSearch, address: str, master: object) -> None:
        asked.append(address)
        go_on.wait()

    monkeypatch.setattr(PoolSearch, "_ask", ask)
    search = PoolSearch(PoolSettings("10.0.0.9:7700", TOKEN))
    discovery = PoolDiscovery(search, NoRoom(9))
    discovery.start()
    try:
        for name in "ab":  # the second one while the master is being asked
            async with node(name):
                await until(lambda name=name: f"node:{name}" in discovery._followed)
                await until(lambda: bool(asked))
        assert len(asked) == 1
    finally:
        go_on.set()
        await discovery.close()


def test_a_search_that_ends_asks_no_further_master(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    search = PoolSearch(PoolSettings("10.0.0.9:7700", TOKEN))

    def ask(self: PoolSearch, address: str, master: object) -> None:
        asked.append(address)
        search.stop_soon()

    monkeypatch.setattr(PoolSearch, "_ask", ask)
    (runtime / "node-x.sock.events").write_text('{"events": "ipc:///x", "master": "10.0.0.8:7700"}')
    with moonpool_socket(runtime / "node-x.sock"):
        found = search.look()
    assert found.places[1:] == ("at the master 10.0.0.9:7700", "at the master 10.0.0.8:7700")
    assert asked == ["10.0.0.9:7700"]


def test_what_breaks_at_one_master_or_node_leaves_the_others(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file for TLS that is cut off, a token that vanishes."""
    (runtime / "node-x.sock.tls").write_text('{"tls_con')
    (runtime / "node-x.sock.events").write_text('{"events": "ipc:///x", "master": "10.0.0.9:7700"}')
    (runtime / "node-y.sock.events").write_text('{"events": "ipc:///y", "token": true}')

    def token(socket: Path) -> bytes:
        if "node-y" in str(socket):
            raise FileNotFoundError("node-y.sock.token")
        return TOKEN

    monkeypatch.setattr("moonpool.core.config.paths.client_token", token)
    with moonpool_socket(runtime / "node-x.sock"), moonpool_socket(runtime / "node-y.sock"):
        discovery = PoolDiscovery(search := PoolSearch(PoolSettings()), NoRoom(9))
        for _ in range(3):
            found = search.look()
            discovery.apply(found)
    assert list(found.sources) == ["node:x"]
    assert "JSONDecodeError" in found.problems["at the master 10.0.0.9:7700"]
    assert "FileNotFoundError" in found.unfollowed["node:y"]
    assert len(caplog.messages) == 2, caplog.messages


def test_the_remedy_may_be_asked_for_while_nodes_come_and_go() -> None:
    """The policy asks on a thread of its own."""
    discovery = PoolDiscovery(PoolSearch(PoolSettings()), NoRoom(9))

    class Leaves:
        @property
        def endpoint(self) -> str:
            discovery._followed.pop("a", None)  # as the event loop does meanwhile
            return "tcp://h:1"

    discovery._followed = {name: (Leaves(), 0) for name in "ab"}  # type: ignore[misc]
    assert "(a at tcp://h:1, b at tcp://h:1)" in discovery.remedy()


class moonpool_socket:  # noqa: N801
    """Something that accepts connections at this path."""

    def __init__(self, path: Path) -> None:
        import socket

        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(16)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *of: object) -> None:
        self._socket.close()


class NoRoom(SubscribedStreams):
    """Places for a number of streams, and no subscriber."""

    def __init__(self, count: int) -> None:
        super().__init__(None, 0, count)

    def follow(self, name: str, source: EventSource) -> int | None:
        return self._free.pop() if self._free else None


def test_more_nodes_than_places_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    discovery = PoolDiscovery(PoolSearch(PoolSettings()), NoRoom(1))
    sources = {name: EventSource(name, f"tcp://h:{at}", pool=True) for at, name in enumerate("ab")}
    for _ in range(3):
        discovery.apply(FoundNodes(sources, ("here",), {}))
    assert [message.split(": there is no room")[0] for message in caplog.messages] == [
        "the KV events of a at tcp://h:0 are followed",
        "the KV events of b at tcp://h:1 are not followed",
    ]
    discovery.apply(FoundNodes({"b": sources["b"]}, ("here",), {}))
    assert caplog.messages[2:] == [
        "the KV events of a at tcp://h:0: the node is gone",
        "the KV events of b at tcp://h:1 are followed",
    ]
    assert "none of the nodes that it found (b at tcp://h:1) has told of a block" in discovery.remedy()
