"""What the tests of event streams share: publishers on real sockets, chains of blocks, and waiting."""

from __future__ import annotations

import array
import time
from collections.abc import Callable, Sequence

import zmq

from moonpool.core.service.kv_event_publisher import BlockStored, KvEventPublisher, QueuedEventSource
from moonpool.disagg_proxy.events.prefix_indexes import PrefixIndexes
from moonpool.disagg_proxy.events.settings import EventLimits, EventSource
from moonpool.disagg_proxy.events.subscriber import Subscriber

BLOCK = 4
TIMEOUT_S = 20.0
LIMITS = EventLimits(replay_s=TIMEOUT_S, gone_s=0.0)  # heartbeats of 2 s: a busy machine misses none


def eventually(condition: Callable[[], bool], what: str = "") -> None:
    """Returns when the condition holds; fails after TIMEOUT_S."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {TIMEOUT_S:g} s: {what or condition}"
        time.sleep(0.002)


def chain(first: int, blocks: int) -> list[int]:
    return list(range(first, first + blocks * BLOCK))


def stored(tokens: Sequence[int], first_hash: int, parent: int | None = None) -> BlockStored:
    hashes = list(range(first_hash, first_hash + len(tokens) // BLOCK))
    return BlockStored(hashes, parent, list(tokens), BLOCK, medium="GPU")


def matched(indexes: PrefixIndexes, tokens: Sequence[int], place: int = 0) -> int:
    """Leading blocks of that holder, in the index of BLOCK."""
    index = indexes.obtain(BLOCK)
    assert index is not None
    blocks = memoryview(index.match(index.keys(array.array("I", tokens))).blocks).cast("I")
    return blocks[place] if place < len(blocks) else 0


def sound(indexes: PrefixIndexes) -> bool:
    return all(index.check_integrity() for index in indexes.all)


class Engine:
    """A publisher in this process. Its ports stay when it restarts."""

    def __init__(self, *, replay: bool = True, **options: int) -> None:
        self._replay = replay
        self._options = options
        self.endpoint, self.replay = "tcp://127.0.0.1:0", "tcp://127.0.0.1:0" if replay else ""
        self.start()

    def start(self, **options: int) -> None:
        self.source = QueuedEventSource()
        self.publisher = KvEventPublisher(
            self.source, self.endpoint, replay=self.replay, **{**self._options, **options}
        )
        self.endpoint, self.replay = self.publisher.endpoint, self.publisher.replay

    def tell(self, *events: object) -> None:
        """One batch with these events, published when this returns."""
        before = self.publisher.published
        self.source.add(events)  # type: ignore[arg-type]
        eventually(lambda: self.publisher.published > before)

    def stop(self) -> None:
        self.publisher.close()
        self.source.close()

    def spec(self, name: str = "e0") -> EventSource:
        return EventSource(name, self.endpoint, self.replay)


class Liar:
    """A publisher of any bytes, driven message by message."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.pub = self.context.socket(zmq.XPUB)
        self.pub.bind("tcp://127.0.0.1:0")
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind("tcp://127.0.0.1:0")

    def spec(self, *, replay: bool = False) -> EventSource:
        where = [s.getsockopt_string(zmq.LAST_ENDPOINT) for s in (self.pub, self.router)]
        return EventSource("e0", where[0], where[1] if replay else "")

    def wait_for_subscriber(self) -> None:
        assert self.pub.poll(int(TIMEOUT_S * 1000))
        assert self.pub.recv() == b"\x01"

    def say(self, number: int, payload: bytes) -> None:
        self.pub.send_multipart((b"kv", number.to_bytes(8, "big"), payload))

    def close(self) -> None:
        self.context.destroy(linger=0)


def subscriber(*sources: EventSource, limits: EventLimits = LIMITS) -> tuple[Subscriber, PrefixIndexes]:
    indexes = PrefixIndexes(blocks_max=10_000)
    places = {source.name: place for place, source in enumerate(sources)}
    made = Subscriber(sources, indexes, places, limits=limits)
    made.start()
    return made, indexes


def totals(made: Subscriber, name: str = "e0") -> dict[str, float]:
    return made.stats()[name]
