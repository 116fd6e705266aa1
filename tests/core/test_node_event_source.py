"""A node's stream of KV events, over real sockets: what it stores, evicts and writes to an SSD, as the
proxy's index and as any subscriber to vLLM's events sees it."""

from __future__ import annotations

import array
import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

import moonpool
from moonpool import _native
from moonpool.core.config.config import load
from moonpool.core.config.native_settings import node_settings
from moonpool.core.errors import ConfigError
from moonpool.core.service.kv_event_publisher import AllBlocksCleared, BlockStored, KvEventPublisher
from moonpool.core.service.node import Node
from moonpool.core.service.node_event_source import NodeEventSource, publisher_of_node
from moonpool.core.store.keys import Ranges, block_digests, block_name
from moonpool.disagg_proxy.events.prefix_indexes import PrefixIndexes
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.events.subscriber import Subscriber
from tests.core.store_bed import MIB, TOKEN, until

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

    def __init__(self, runtime: Path, *, buffer_batches: int = 1000, ssd: str = "") -> None:
        path = runtime / "node.sock"
        directories = [(ssd, 64 * MIB)] if ssd else []
        self.server = _native.Server(
            str(path),
            [("default", 4 * MIB)],
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


def test_the_node_publishes_when_told_to(runtime: Path) -> None:
    config = load(
        arguments={
            "node.dram": 4 * MIB,
            "node.http": "off",
            "node.listen": "off",
            "node.events": f"ipc://{runtime}/events",
            "node.events_replay": f"ipc://{runtime}/replay",
        },
        env={},
    )

    async def run() -> None:
        node = Node(config)
        await node.start()
        try:
            assert node.stat()["events"] == [config.node.events, config.node.events_replay]
            assert "events_blocks" in node.stat()["metrics"]  # type: ignore[operator]
        finally:
            await node.stop()

    asyncio.run(run())


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:5557"])
def test_beyond_this_host_it_needs_a_token(endpoint: str) -> None:
    config = load(arguments={"node.events": endpoint}, env={})
    with pytest.raises(ConfigError, match="needs a cluster token"):
        publisher_of_node(config, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("endpoint", ["udp://127.0.0.1:1", "tcp://127.0.0.1", "5557"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    config = load(arguments={"node.events": endpoint}, env={})
    with pytest.raises(ConfigError):
        publisher_of_node(config, None)  # type: ignore[arg-type]
