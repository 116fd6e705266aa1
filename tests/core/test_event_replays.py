"""Replays of KV events under callers that read nothing, and the streams under the cluster token."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from moonpool.core.config.config import load
from moonpool.core.service import zmq_curve
from moonpool.core.service.event_replays import (
    CALLER_MESSAGES_MAX,
    END_OF_REPLAY,
    QUESTIONS_MAX,
    REPLAYS_MAX,
    STALL_S,
    ReplayBuffer,
    ReplayServer,
)
from moonpool.core.service.kv_event_publisher import (
    MESSAGE_BLOCKS_MAX,
    AllBlocksCleared,
    BlockStored,
    KvEvent,
    KvEventPublisher,
    QueuedEventSource,
)
from moonpool.core.service.node_event_source import publisher_of_node
from moonpool.disagg_proxy.events.prefix_indexes import PrefixIndexes
from moonpool.disagg_proxy.events.settings import parse_event_sources
from moonpool.disagg_proxy.events.subscriber import Subscriber
from tests.core.store_bed import MIB, until

TOKEN = b"a token of the cluster"
DEADLINE_MS = 60_000


class FakeRouter:
    """A ROUTER whose callers take nothing but what read() takes."""

    def __init__(self) -> None:
        self.questions: list[list[bytes]] = []
        self.queues: dict[bytes, list[tuple[bytes, ...]]] = {}
        self.gone: set[bytes] = set()
        self.most = 0

    def ask(self, caller: bytes, start: int = 0) -> None:
        self.questions.append([caller, b"", start.to_bytes(8, "big")])

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.questions:
            raise zmq.Again
        return self.questions.pop(0)

    def send_multipart(self, frames: Sequence[bytes], flags: int) -> None:
        caller, *rest = frames
        if caller in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        queue = self.queues.setdefault(caller, [])
        if len(queue) >= CALLER_MESSAGES_MAX:
            raise zmq.Again
        queue.append(tuple(rest))
        self.most = max(self.most, sum(map(len, self.queues.values())))

    def read(self, caller: bytes) -> list[tuple[bytes, ...]]:
        return self.queues.pop(caller, [])


def replays(router: FakeRouter, messages: int, now: list[float]) -> ReplayServer:
    told = [(number, b"x") for number in range(messages)]
    return ReplayServer(
        router,  # type: ignore[arg-type]
        b"kv",
        lambda start: iter(told[start:]),
        clock=lambda: now[0],
    )


def test_a_caller_gets_all_in_order_as_fast_as_it_reads() -> None:
    router, now = FakeRouter(), [0.0]
    serving = replays(router, 50, now)
    router.ask(b"a", 10)
    got: list[int] = []
    while True:
        serving.hear()
        due = serving.serve()
        for _empty, topic, number, _payload in router.read(b"a"):
            if number == END_OF_REPLAY:
                assert (topic, due) == (b"", None)
                assert got == list(range(10, 50))
                assert serving.answered == 1
                return
            got.append(int.from_bytes(number, "big"))


def test_callers_that_read_nothing_are_few_and_are_dropped() -> None:
    router, now = FakeRouter(), [0.0]
    serving = replays(router, 1000, now)
    for caller in range(1000):
        router.ask(b"%d" % caller)
        router.ask(b"%d" % caller)
    for _ in range(100):
        serving.hear()
        serving.serve()
    assert router.most == REPLAYS_MAX * CALLER_MESSAGES_MAX
    assert serving.dropped >= 1000 - QUESTIONS_MAX - REPLAYS_MAX
    now[0] += STALL_S + 1
    serving.serve()
    assert serving.serve() is not None  # the next of them
    router.gone = set(router.queues)
    for _ in range(QUESTIONS_MAX):
        now[0] += STALL_S + 1
        serving.serve()
    assert serving.serve() is None
    assert serving.answered == 0


def test_one_that_stands_still_holds_up_no_other() -> None:
    router, now = FakeRouter(), [0.0]
    serving = replays(router, 20, now)
    router.ask(b"slow")
    router.ask(b"quick")
    serving.hear()
    got = 0
    while serving.answered == 0:
        serving.serve()
        got += len(router.read(b"quick"))
    assert got + len(router.read(b"quick")) == 21


def test_the_buffer_is_bounded_in_bytes() -> None:
    memory = ReplayBuffer(1000, 10_000)
    for number in range(500):
        memory.add(number, bytes(100))
    assert memory.oldest(-1) == 400
    assert len(memory.since(0)) == 100


# ---- over real sockets


class Holder(QueuedEventSource):
    """A source that has so many blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self._blocks = blocks

    def inventory(self) -> list[KvEvent] | None:
        digests = [number.to_bytes(32, "big") for number in range(self._blocks)]
        pieces = (digests[at : at + 1024] for at in range(0, self._blocks, 1024))
        return [AllBlocksCleared(), *(BlockStored(piece, medium="CPU") for piece in pieces)]


@contextmanager
def publisher(source: QueuedEventSource, **options: Any) -> Iterator[KvEventPublisher]:
    made = KvEventPublisher(source, "tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0", **options)
    try:
        yield made
    finally:
        made.close()
        source.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made.linger = 0  # also of sockets that are collected before the end
    yield made
    made.destroy(linger=0)


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def whole_replay(socket: zmq.Socket[bytes]) -> list[int]:
    """The numbers of what comes until the end of a replay."""
    numbers = []
    while True:
        assert socket.poll(DEADLINE_MS), "no answer"
        frames = socket.recv_multipart()
        if frames[2] == END_OF_REPLAY:
            return numbers
        numbers.append(int.from_bytes(frames[2], "big"))


def test_a_flood_of_questions_costs_little_and_holds_up_nobody(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """8 callers that ask 15 times for 60,000 blocks and read nothing: 240 MB, if all were queued."""
    with publisher(Holder(60_000), first_sequence=1) as made:
        before = resident_bytes()
        silent = []
        for _ in range(8):
            caller = context.socket(zmq.DEALER)
            caller.setsockopt(zmq.RCVHWM, 1)
            caller.setsockopt(zmq.RCVBUF, 4096)
            caller.connect(made.replay)
            silent.append(caller)
            for _ in range(15):
                caller.send_multipart((b"", bytes(8)))
        honest = context.socket(zmq.DEALER)
        honest.connect(made.replay)
        honest.send_multipart((b"", bytes(8)))
        assert len(whole_replay(honest)) >= 60_000 // MESSAGE_BLOCKS_MAX
        assert resident_bytes() - before < 96 * MIB
        assert not any(caller.closed for caller in silent)


def test_only_who_has_the_token_hears_and_asks(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    source = Holder(10)
    with publisher(source, token=TOKEN, first_sequence=1) as made:
        strangers = []
        for token in (b"", b"another token"):
            ask, sub = context.socket(zmq.DEALER), context.socket(zmq.SUB)
            for socket in (ask, sub):
                if token:
                    zmq_curve.dial(socket, zmq_curve.EVENTS, token)
            ask.connect(made.replay)
            ask.send_multipart((b"", bytes(8)))
            sub.subscribe(b"")
            sub.connect(made.endpoint)
            strangers += [ask, sub]
        friend = context.socket(zmq.DEALER)
        zmq_curve.dial(friend, zmq_curve.EVENTS, TOKEN)
        friend.connect(made.replay)
        for numbers in ([0], [0, 1]):  # the second ends behind whatever the others would have been told
            friend.send_multipart((b"", bytes(8)))
            assert whole_replay(friend) == numbers
            if made.published == 0:
                source.add([AllBlocksCleared()])
                until(lambda: made.published > 0)
        until(lambda: made.replays == 2)
        assert not any(socket.poll(0) for socket in strangers)


def test_the_proxy_follows_a_node_beyond_loopback_by_the_token(tmp_path: Path, free_port: int) -> None:
    """The node asks for the token there, and the proxy shows it, at addresses of other hosts only."""
    (tmp_path / "token").write_bytes(TOKEN)
    (tmp_path / "token").chmod(0o600)
    config = load(
        arguments={
            "node.events": f"tcp://0.0.0.0:{free_port}",
            "cluster.token_file": str(tmp_path / "token"),
        },
        env={},
    )

    class Silent(Holder):
        events_fd = property(lambda self: self.fileno())

        def begin_events(self) -> bool:
            return True

        def take_events(self) -> bytes:
            self.take()
            return b""

        def events_fingerprints(self) -> list[bytes]:
            return []

        def events_inventory(self, cursor: int) -> tuple[int, bytes]:
            return 0, b""

    source = Silent(0)
    made = publisher_of_node(config, source, tmp_path / "node.sock")
    assert made is not None
    try:
        followers = {}
        for token in (TOKEN, b""):
            (told,) = parse_event_sources([f"n=tcp://0.0.0.0:{free_port}"], pool=True, token=token)
            assert told.token == token
            assert b"token" not in repr(told).encode()
            followers[token] = Subscriber((told,), PrefixIndexes(blocks_max=100), {"n": 1})
            followers[token].start()
        until(lambda: followers[TOKEN].stats()["n"]["connected"] == 1, 60)
        assert followers[b""].stats()["n"]["connected"] == 0
        for follower in followers.values():
            follower.stop()
    finally:
        made.close()
        source.close()
    (near,) = parse_event_sources([f"n=tcp://127.0.0.1:{free_port},ipc:///tmp/x"], pool=True, token=TOKEN)
    (engine,) = parse_event_sources([f"e=tcp://10.0.0.1:{free_port}"], token=TOKEN)
    assert (near.token, engine.token) == (b"", b"")  # engines speak no CURVE
