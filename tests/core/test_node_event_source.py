"""A node's stream of KV events, over real sockets: what it stores, evicts and writes to an SSD, as the
proxy's index and as any subscriber to vLLM's events sees it."""

from __future__ import annotations

import array
import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

import moonpool
from moonpool import _native
from moonpool.core.config.config import Config, load
from moonpool.core.config.native_settings import node_settings
from moonpool.core.errors import ConfigError
from moonpool.core.service import kv_event_publisher, node_event_source
from moonpool.core.service.kv_event_publisher import AllBlocksCleared, BlockStored, KvEventPublisher
from moonpool.core.service.node import Node
from moonpool.core.service.node_event_source import NodeEventSource, published_by, publisher_of_node
from moonpool.core.service.published_events import PublishedEvents, local_nodes
from moonpool.core.store.keys import Ranges, block_digests, block_name
from moonpool.disagg_proxy.events.prefix_indexes import PrefixIndexes
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.events.subscriber import Subscriber
from tests.core.store_bed import MIB, TOKEN, until
from tests.disagg_proxy.harness import with_deadline

BLOCK = 16
FINGERPRINT = b"f" * 32
OBJECTS = [Ranges(0, head, 1, 0, 4) for head in range(2)]


class TheirBlockStored(msgspec.Struct, tag="BlockStored"):
    """The fields that a vLLM subscriber demands (vllm/distributed/kv_events.py, 0.32)."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Bed:
    """A node with a publisher, a client of it, and an index that follows."""

    def __init__(
        self,
        runtime: Path,
        *,
        buffer_batches: int = 1000,
        ssd: str = "",
        only_followed: bool = False,
        arena: int = 4 * MIB,
    ) -> None:
        path = runtime / "node.sock"
        directories = [(ssd, 64 * MIB)] if ssd else []
        self.server = _native.Server(
            str(path),
            [("default", arena)],
            TOKEN,
            node_settings(ssd_clean_share=1.0),
            events=True,
            ssd=directories,
        )
        self.server.start()
        self.publisher = KvEventPublisher(
            NodeEventSource(self.server),
            "tcp://127.0.0.1:0",
            replay="tcp://127.0.0.1:0",
            buffer_batches=buffer_batches,
            only_followed=only_followed,
        )
        self.store = moonpool.Store(str(path), token=TOKEN, fingerprint=FINGERPRINT)
        self.indexes = PrefixIndexes(blocks_max=100_000)
        index = self.indexes.obtain(BLOCK)
        assert index is not None
        self.index = index
        self.subscriber: Subscriber | None = None

    def follow(self, *, replay: bool = True) -> None:
        where = self.publisher.replay if replay else ""
        source = EventSource("node", self.publisher.endpoint, where, pool=True)
        self.subscriber = Subscriber((source,), self.indexes, {"node": 5})
        self.subscriber.start()

    def put(self, tokens: list[int], objects: list[Ranges] = OBJECTS, size: int = 1024) -> None:
        names = [block_name(d, o) for d in block_digests(tokens, BLOCK) for o in objects]
        self.store.put(names, [bytes(size)] * len(names))

    def remove(self, tokens: list[int]) -> None:
        self.store.remove([block_name(d, OBJECTS[0]) for d in block_digests(tokens, BLOCK)])

    def match(self, tokens: list[int]) -> tuple[int, int]:
        found = self.index.match(self.index.keys(array.array("I", tokens)))
        return found.pool_host, found.pool_blocks

    def inventory(self, medium: str) -> set[int | bytes]:
        events = NodeEventSource(self.server).inventory()
        stored = (each for each in events if isinstance(each, BlockStored) and each.medium == medium)
        return {digest for event in stored for digest in event.block_hashes}

    def close(self) -> None:
        if self.subscriber is not None:
            self.subscriber.stop()
        self.store.close()
        self.publisher.close()
        assert self.server.check_integrity()
        self.server.stop()


@pytest.fixture
def bed(runtime: Path) -> Iterator[Bed]:
    made = Bed(runtime)
    yield made
    made.close()


def tokens(first: int, blocks: int) -> list[int]:
    return list(range(first, first + blocks * BLOCK))


def test_blocks_come_and_go(bed: Bed) -> None:
    bed.put(tokens(0, 5))
    bed.follow()
    until(lambda: bed.match(tokens(0, 5)) == (5, 5))
    bed.put(tokens(5000, 3))
    until(lambda: bed.match(tokens(5000, 3)) == (3, 3))
    bed.put(tokens(9000, 3), OBJECTS[:1])  # half of each block
    bed.remove(tokens(0, 3)[2 * BLOCK :])
    bed.remove(tokens(5000, 3))
    until(lambda: bed.match(tokens(5000, 3)) == (0, 0))
    assert bed.match(tokens(9000, 3)) == (0, 0)
    assert bed.index.check_integrity()


def test_evicted_blocks_are_told(bed: Bed) -> None:
    bed.follow()
    for family in range(60):
        bed.put(tokens(10_000 * family, 4), size=32 << 10)
    evicted = bed.server.metrics()["evicted_total"]
    assert evicted > 0

    def known() -> int:
        return sum(bed.match(tokens(10_000 * family, 4))[0] for family in range(60))

    def are_told() -> bool:  # of one moment: a node evicts in the background, too
        metrics = bed.server.metrics()
        return known() == metrics["objects"] // 2 <= metrics["events_blocks"]

    until(are_told)


def test_whoever_comes_late_gets_an_inventory(runtime: Path) -> None:
    bed = Bed(runtime, buffer_batches=2)
    try:
        for family in range(12):
            bed.put(tokens(1000 * family, 4))
            until(lambda family=family: bed.publisher.published > family)
        bed.remove(tokens(0, 4))
        bed.follow()
        until(lambda: bed.match(tokens(11_000, 4)) == (4, 4))
        for family in range(1, 12):
            until(lambda family=family: bed.match(tokens(1000 * family, 4)) == (4, 4))
        assert bed.match(tokens(0, 4)) == (0, 0)
    finally:
        bed.close()


def test_an_index_that_is_made_later_learns_the_pool_too(bed: Bed) -> None:
    """Blocks of another size, as soon as an engine with such blocks is known."""
    bed.follow()
    prompt = tokens(0, 8)
    names = [block_name(d, o) for d in block_digests(prompt, 2 * BLOCK) for o in OBJECTS]
    bed.store.put(names, [b"x"] * len(names))
    until(lambda: bed.publisher.published > 0)
    other = bed.indexes.obtain(2 * BLOCK)
    assert other is not None
    keys = other.keys(array.array("I", prompt))
    until(lambda: other.match(keys).pool_host == 4)


def test_without_a_replay_a_later_index_costs_the_others_nothing(bed: Bed) -> None:
    bed.follow(replay=False)
    follower = bed.subscriber
    assert follower is not None
    until(lambda: follower.stats()["node"]["connected"] == 1)
    # Connected is not yet subscribed: what is told before the publisher knows of it is lost.
    firsts = itertools.count(100_000, BLOCK)

    def hears() -> bool:
        bed.put(tokens(next(firsts), 1))
        return follower.stats()["node"]["taken_total"] > 0

    until(hears)
    bed.put(tokens(0, 5))
    until(lambda: bed.match(tokens(0, 5)) == (5, 5))
    other = bed.indexes.obtain(2 * BLOCK)
    assert other is not None
    later = tokens(5000, 4)
    bed.put(later)
    names = [block_name(d, o) for d in block_digests(later, 2 * BLOCK) for o in OBJECTS]
    bed.store.put(names, [b"x"] * len(names))
    until(lambda: other.match(other.keys(array.array("I", later))).pool_host == 2)
    until(lambda: bed.match(later) == (4, 4))
    assert bed.match(tokens(0, 5)) == (5, 5)
    assert follower.stats()["node"]["forgets_total"] == 0


def test_an_inventory_tells_tier_by_tier(runtime: Path) -> None:
    """Blocks that are in memory and on a disk as well: two events, not one for each block and tier."""
    (runtime / "ssd").mkdir()
    bed = Bed(runtime, ssd=str(runtime / "ssd"))
    try:
        bed.put(tokens(0, 12))
        digests = set(block_digests(tokens(0, 12), BLOCK))
        until(lambda: bed.inventory("DISK") == digests)
        events = NodeEventSource(bed.server).inventory()
        assert [type(event) for event in events] == [AllBlocksCleared, BlockStored, BlockStored]
        assert bed.inventory("CPU") == digests
    finally:
        bed.close()


def test_what_is_on_disk(runtime: Path) -> None:
    (runtime / "ssd").mkdir()
    bed = Bed(runtime, ssd=str(runtime / "ssd"))
    try:
        bed.follow()
        for family in range(10):
            bed.put(tokens(10_000 * family, 4), size=32 << 10)
        until(lambda: len(bed.inventory("DISK")) == 40)
        for family in range(10, 30):  # drives the first out of memory
            bed.put(tokens(10_000 * family, 4), size=32 << 10)
        until(lambda: any(bed.match(tokens(10_000 * f, 4)) == (0, 4) for f in range(10)))
    finally:
        bed.close()


def test_a_foreign_subscriber_reads_vllms_form(bed: Bed) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        ask = context.socket(zmq.DEALER)
        ask.connect(bed.publisher.replay)
        bed.put(tokens(0, 1), OBJECTS[:1])
        until(lambda: bed.publisher.published > 0)
        ask.send_multipart((b"", (0).to_bytes(8, "big")))
        assert ask.poll(10_000)
        empty, topic, number, payload = ask.recv_multipart()
        assert (empty, topic, number) == (b"", b"kv", bytes(8))
        sent_s, events, rank = msgspec.msgpack.decode(payload)
        assert sent_s > 1e9
        assert rank == 0
        assert events[0]["type"] == "BlockStored"
        assert events[0]["medium"] == "CPU"
        assert events[0]["block_hashes"] == block_digests(tokens(0, 1), BLOCK)
        assert events[0]["parent_block_hash"] is None
        assert events[0]["token_ids"] == []
        assert events[0]["block_size"] == 0
        assert events[0]["fingerprint"] == FINGERPRINT
        theirs = msgspec.msgpack.decode(payload, type=tuple[float, list[TheirBlockStored], int])
        assert theirs[1][0].medium == "CPU"
        last = ask.recv_multipart()
        while last[2] != b"\xff" * 8:
            assert ask.poll(10_000)
            last = ask.recv_multipart()
    finally:
        context.destroy(linger=0)


def node_config(**settings: object) -> Config:
    arguments = {"dram": 4 * MIB, "http": "off", "listen": "off", **settings}
    return load(arguments={f"node.{name}": value for name, value in arguments.items()}, env={})


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Node]:
    node = Node(config)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


@with_deadline
async def test_the_node_publishes_where_it_is_told_to(runtime: Path) -> None:
    config = node_config(events=f"ipc://{runtime}/events", events_replay=f"ipc://{runtime}/replay")
    async with running(config) as node:
        assert node.stat()["events"] == [config.node.events, config.node.events_replay]
        assert "events_blocks" in node.stat()["metrics"]  # type: ignore[operator]
        (found,) = local_nodes()
        assert (found.name, found.published.events) == ("default", config.node.events)
    assert local_nodes() == []


@with_deadline
async def test_by_default_it_publishes_beside_its_socket_for_its_user_alone(runtime: Path) -> None:
    async with running(node_config()) as node:
        (found,) = local_nodes()
        assert found.published == PublishedEvents(f"ipc://{node.socket}.pub", f"ipc://{node.socket}.replay")
        assert node.stat()["events"] == [found.published.events, found.published.replay]
        assert node.stat()["events_far"] == []
        for name in ("node-default.sock.pub", "node-default.sock.replay", "node-default.sock.events"):
            assert (runtime / name).stat().st_mode & 0o777 == 0o600, name
    assert not [path for path in runtime.iterdir() if path.name.startswith("node-default.sock.")]


@pytest.mark.parametrize("events", ["none", ""])
@with_deadline
async def test_it_publishes_nothing_where_it_is_told_so(runtime: Path, events: str) -> None:
    async with running(node_config(events=events)) as node:
        assert node.stat()["events"] is None
        assert "events_blocks" not in node.stat()["metrics"]  # type: ignore[operator]
        assert local_nodes() == []


@with_deadline
async def test_a_node_that_cannot_publish_beside_its_socket_serves_all_the_same(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = runtime / ("d" * (100 - len(str(runtime)) - len("/n.sock")))
    folder.mkdir()
    async with running(node_config(socket=str(folder / "n.sock"))) as node:
        assert node.stat()["events"] is None
        assert "KV events are not published, so a proxy does not know what this node has" in caplog.text


@with_deadline
async def test_beyond_loopback_it_publishes_twice_and_asks_for_the_token_there(
    runtime: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "token"
    secret.touch(0o600)
    secret.write_bytes(TOKEN)
    arguments = {"cluster.token_file": str(secret), "node.advertise": "10.20.30.40:7710"}
    arguments |= {"node.dram": 4 * MIB, "node.http": "off", "node.listen": "0.0.0.0:0"}  # type: ignore[dict-item]
    async with running(load(arguments=arguments, env={})) as node:
        (found,) = local_nodes()
        far = (found.published.far_events, found.published.far_replay)
        assert node.stat()["events_far"] == list(far)
        assert all(endpoint.startswith("tcp://10.20.30.40:") for endpoint in far)
        published, replay = (f"tcp://127.0.0.1:{endpoint.rpartition(':')[2]}" for endpoint in far)
        sources = {
            "near": EventSource("near", found.published.events, found.published.replay, pool=True),
            "far": EventSource("far", published, replay, pool=True, token=TOKEN),
            "stranger": EventSource("stranger", published, replay, pool=True),
            "wrong": EventSource(
                "wrong", published, replay, pool=True, token=b"another token of these tests"
            ),
        }
        indexes = PrefixIndexes(blocks_max=100)
        places = {name: at for at, name in enumerate(sources)}
        follower = Subscriber(tuple(sources.values()), indexes, places)
        follower.start()
        try:

            def put() -> None:
                with moonpool.Store(str(node.socket), token=TOKEN, fingerprint=FINGERPRINT) as store:
                    store.put([block_name(block_digests(tokens(0, 1), BLOCK)[0], OBJECTS[0])], [bytes(9)])
                until(lambda: all(follower.stats()[name]["heard"] for name in ("near", "far")), 30.0)

            await asyncio.to_thread(put)
            assert not any(follower.stats()[name]["connected"] for name in ("stranger", "wrong"))
        finally:
            await asyncio.to_thread(follower.stop)


@with_deadline
async def test_a_node_that_cannot_publish_for_other_hosts_publishes_beside_its_socket(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: KvEventPublisher, address: str) -> tuple[str, str]:
        raise ConfigError(f"KV events cannot be published at {address!r}", operation="events")

    monkeypatch.setattr(KvEventPublisher, "_bind_beyond", refuse)
    secret = tmp_path / "token"
    secret.touch(0o600)
    secret.write_bytes(TOKEN)
    arguments = {"cluster.token_file": str(secret), "node.dram": 4 * MIB}
    arguments |= {"node.http": "off", "node.listen": "0.0.0.0:0"}
    async with running(load(arguments=arguments, env={})) as node:
        assert node.stat()["events"] == [f"ipc://{node.socket}.pub", f"ipc://{node.socket}.replay"]
        assert node.stat()["events_far"] == []
        (found,) = local_nodes()
        assert not found.published.token
        assert "KV events are published on this host alone" in caplog.text


class At:
    """A publisher's endpoints."""

    def __init__(self, endpoint: str, far: tuple[str, str] = ("", ""), *, asks_token: bool = False) -> None:
        self.endpoint, self.replay, self.far, self.asks_token = endpoint, "", far, asks_token


@pytest.mark.parametrize(
    ("publisher", "advertise", "expected"),
    [
        # A bound address of an inner network, behind one that others know.
        (At("ipc://x", ("tcp://172.17.0.2:5", "tcp://172.17.0.2:6")), "10.0.0.1:7710", "tcp://10.0.0.1:5"),
        (At("ipc://x", ("tcp://0.0.0.0:5", "tcp://0.0.0.0:6")), "host.example:7710", "tcp://host.example:5"),
        (At("ipc://x", ("tcp://0.0.0.0:5", "tcp://0.0.0.0:6")), "127.0.0.1:7710", ""),
        (At("tcp://127.0.0.1:5"), "", "tcp://127.0.0.1:5"),
        (At("tcp://172.17.0.2:5", asks_token=True), "10.0.0.1:7710", "tcp://172.17.0.2:5"),  # as it was given
        (At("tcp://0.0.0.0:5", asks_token=True), "10.0.0.1:7710", "tcp://10.0.0.1:5"),
        (At("tcp://0.0.0.0:5", asks_token=True), "", ""),  # there is no other address than a loopback
        (At("ipc://x"), "10.0.0.1:7710", ""),
    ],
)
def test_what_other_hosts_are_told(
    publisher: At, advertise: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_event_source, "advertised_address", lambda *of: "127.0.0.1")
    told = published_by(publisher, advertise=advertise, master="")  # type: ignore[arg-type]
    assert told.far_events == expected
    assert told.token is publisher.asks_token


def test_without_a_subscriber_nothing_is_made(runtime: Path) -> None:
    """Neither a message, nor in the node an account of its blocks: a put costs what it costs without."""
    made = Bed(runtime, only_followed=True)
    try:
        made.put(tokens(0, 3))
        made.put(tokens(1000, 2))
        made.remove(tokens(1000, 2))
        assert made.server.metrics()["events_objects"] == 0
        assert made.publisher.published == 0
        made.follow()
        until(lambda: made.match(tokens(0, 3)) == (3, 3))
        assert made.server.metrics()["events_objects"] == 2 * 3 + 2
        made.put(tokens(2000, 2))
        until(lambda: made.match(tokens(2000, 2)) == (2, 2))
        made.remove(tokens(0, 3))
        until(lambda: made.match(tokens(0, 3)) == (0, 0))
        assert made.subscriber is not None
        made.subscriber.stop()  # what happens until the next subscriber stays in the node
        until(lambda: not made.publisher._is_followed)
        before = made.publisher.published
        made.put(tokens(3000, 2))
        assert made.publisher.published == before
        made.follow(replay=False)  # the stream itself goes on with it
        until(lambda: made.match(tokens(3000, 2)) == (2, 2))
    finally:
        made.close()


def test_a_node_rests_between_publications_and_answers_questions_meanwhile(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each put would wake its publisher and every subscriber."""
    monkeypatch.setattr(kv_event_publisher, "_REST_S", 3600.0)
    made = Bed(runtime, only_followed=True)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        made.follow()
        made.put(tokens(0, 1))
        until(lambda: made.match(tokens(0, 1)) == (1, 1))
        until(lambda: made.publisher._rest_ms() > 0)
        before = made.publisher.published
        made.put(tokens(1000, 1))
        assert made.publisher.published == before
        ask = context.socket(zmq.DEALER)
        ask.connect(made.publisher.replay)
        ask.send_multipart((b"", before.to_bytes(8, "big")))
        assert ask.poll(10_000)
        assert int.from_bytes(ask.recv_multipart()[2], "big") == before
        until(lambda: made.match(tokens(1000, 1)) == (1, 1))
    finally:
        context.destroy(linger=0)
        made.close()


def test_a_question_without_a_subscription_is_answered(runtime: Path) -> None:
    made = Bed(runtime, only_followed=True)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        made.put(tokens(0, 3))
        ask = context.socket(zmq.DEALER)
        ask.connect(made.publisher.replay)
        ask.send_multipart((b"", bytes(8)))
        assert ask.poll(10_000)
        assert ask.recv_multipart()[2] == bytes(8)  # its first message: what the node holds
        assert made.publisher.published == 1
    finally:
        context.destroy(linger=0)
        made.close()


def test_more_than_is_kept_without_a_subscriber_is_an_inventory(runtime: Path) -> None:
    """Objects of several pieces, entered when the first subscriber comes, more than a node keeps rows of."""
    made = Bed(runtime, only_followed=True, arena=64 * MIB)
    try:
        prompt = tokens(0, 5000)
        made.put(prompt, OBJECTS[:1], 16)
        made.follow()
        until(lambda: made.match(prompt) == (5000, 5000), 30.0)
    finally:
        made.close()


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:5557"])
def test_beyond_this_host_it_needs_a_token(endpoint: str) -> None:
    config = load(arguments={"node.events": endpoint}, env={})
    with pytest.raises(ConfigError, match="needs a cluster token"):
        publisher_of_node(config, None, Path("node.sock"))  # type: ignore[arg-type]


@pytest.mark.parametrize("endpoint", ["udp://127.0.0.1:1", "tcp://127.0.0.1", "5557"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    config = load(arguments={"node.events": endpoint}, env={})
    with pytest.raises(ConfigError):
        publisher_of_node(config, None, Path("node.sock"))  # type: ignore[arg-type]
