"""Real ZMQ sockets: what publishers say, lose, repeat and lie about, and what the index knows then."""

from __future__ import annotations

import array
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from moonpool.core.service import zmq_curve
from moonpool.core.service.kv_event_publisher import AllBlocksCleared, Batch, BlockRemoved, BlockStored
from moonpool.core.service.processes import allow_many_descriptors
from moonpool.core.store.keys import block_digests
from moonpool.disagg_proxy.events.prefix_indexes import PrefixIndexes
from moonpool.disagg_proxy.events.settings import EventLimits, EventSource
from moonpool.disagg_proxy.events.subscriber import Subscriber
from tests.disagg_proxy.events.beds import (
    BLOCK,
    LIMITS,
    TIMEOUT_S,
    Engine,
    Liar,
    chain,
    eventually,
    matched,
    sound,
    stored,
    subscriber,
    totals,
)
from tests.token_file import NEW, OLD, STEPS, TokenFile, is_refused


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.stop()


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.close()


def test_a_large_fleet_has_more_streams_than_zmq_has_sockets_unless_told() -> None:
    allow_many_descriptors()
    sources = tuple(EventSource(f"e{place}", "ipc:///nonexistent/events") for place in range(400))
    made = Subscriber(sources, PrefixIndexes(), {source.name: place for place, source in enumerate(sources)})
    try:
        assert len(made.stats()) == 400
    finally:
        made.stop()


def test_what_was_said_before_and_what_comes_after(engine: Engine) -> None:
    tokens = chain(0, 6)
    engine.tell(stored(tokens[:16], 100))
    made, indexes = subscriber(engine.spec())
    try:
        eventually(lambda: matched(indexes, tokens) == 4)
        engine.tell(stored(tokens[16:], 104, parent=103))
        eventually(lambda: matched(indexes, tokens) == 6)
        engine.tell(BlockRemoved([102], medium="GPU"))
        eventually(lambda: matched(indexes, tokens) == 2)
        engine.tell(AllBlocksCleared())
        eventually(lambda: totals(made)["messages_total"] + 1 >= 3 and matched(indexes, tokens) == 0)
        row = totals(made)
        assert row["connected"] == 1
        assert row["blocks_stored_total"] == 6
        assert row["gaps_total"] == row["lost_total"] == row["malformed_total"] == 0
        assert 0 <= row["lag_seconds"] <= row["lag_max_seconds"] < 60
        assert sound(indexes)
    finally:
        made.stop()


class BrokenTap:
    """It raises for each batch."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def take(self, holder: int, payload: bytes) -> None:
        raise OverflowError(holder)

    def forget(self, holder: int) -> None:
        self.forgotten.append(holder)


def test_a_tap_that_breaks_stops_no_stream(engine: Engine) -> None:
    made, indexes = subscriber(engine.spec())
    tap = BrokenTap()
    made.subscribe(tap)
    try:
        engine.tell(stored(chain(0, 2), 0))
        engine.tell(stored(chain(8, 2), 10))
        eventually(lambda: matched(indexes, chain(8, 2)) == 2)
        eventually(lambda: totals(made)["malformed_total"] == 2)
        eventually(lambda: len(tap.forgotten) >= 2)
    finally:
        made.stop()


def test_a_name_is_one_streams_and_only_its_own_place_drops_it(engine: Engine) -> None:
    made, indexes = subscriber(engine.spec())
    engine.tell(stored(chain(0, 2), 0))
    try:
        made.follow(engine.spec(), 1)
        made.drop("e0", 1)
        made.follow(EventSource("last", "ipc:///nonexistent/events"), 2)
        eventually(lambda: "last" in made.stats() and matched(indexes, chain(0, 2)) == 2)
        assert matched(indexes, chain(0, 2), 1) == 0
        assert len(made._links) == 2
    finally:
        made.stop()


def test_an_order_that_breaks_stops_no_stream(engine: Engine) -> None:
    made, _ = subscriber(EventSource("other", "ipc:///nonexistent/events"))
    try:
        made._order(lambda: [][0])
        made.follow(engine.spec("late"), 1)
        eventually(lambda: "late" in made.stats())
    finally:
        made.stop()


def test_a_restart_behind_the_same_port_forgets_the_old_life(engine: Engine) -> None:
    old, new = chain(0, 3), chain(1000, 3)
    engine.tell(stored(old, 1))
    made, indexes = subscriber(engine.spec())
    try:
        eventually(lambda: matched(indexes, old) == 3)
        engine.stop()
        engine.start()
        engine.tell(stored(new, 1))
        eventually(lambda: matched(indexes, new) == 3)
        assert matched(indexes, old) == 0
        assert totals(made)["restarts_total"] >= 1
    finally:
        made.stop()


@pytest.mark.parametrize("first", ["publisher", "follower"])
def test_one_secret_replaces_another_while_a_stream_is_followed(tmp_path: Path, first: str) -> None:
    """By a subscription that stays, and by one that begins when one side has made a step, and both have."""
    files = {name: TokenFile(tmp_path / name) for name in ("publisher", "follower")}
    engine = Engine(token=files["publisher"].token())
    source = replace(engine.spec(), token=files["follower"].token())
    limits = replace(LIMITS, redial_s=0.2)
    follower, indexes = subscriber(source, limits=limits)
    number = 0
    for step in STEPS:
        for name in sorted(files, key=lambda name: name != first):
            files[name].replace(step)
            number += 1
            tokens = chain(1000 * number, 2)
            engine.tell(stored(tokens, 10 * number))
            eventually(lambda tokens=tokens: matched(indexes, tokens) == 2)
            late, others = subscriber(source, limits=limits)
            eventually(lambda tokens=tokens, others=others: matched(others, tokens) == 2)
            late.stop()
    assert is_refused(engine.endpoint, zmq_curve.EVENTS, OLD)
    assert not is_refused(engine.endpoint, zmq_curve.EVENTS, NEW)
    follower.stop()
    engine.stop()


def test_a_life_that_began_long_ago_is_joined_where_its_buffer_begins() -> None:
    engine = Engine(buffer_batches=2)
    for number in range(5):
        engine.tell(stored(chain(1000 * number, 2), 10 * number))
    made, indexes = subscriber(engine.spec())
    try:
        eventually(lambda: matched(indexes, chain(4000, 2)) == 2)
        assert matched(indexes, chain(3000, 2)) == 2
        assert matched(indexes, chain(2000, 2)) == 0
        assert totals(made)["lost_total"] == 1
    finally:
        made.stop()
        engine.stop()


def test_gaps_are_replayed(liar: Liar) -> None:
    """Messages 1 and 2 never come by themselves."""
    batches = [batch(stored(chain(1000 * number, 2), 10 * number)) for number in range(4)]
    made, indexes = subscriber(liar.spec(replay=True))
    try:
        serve_replay(liar, {})
        liar.wait_for_subscriber()
        liar.say(0, batches[0])
        eventually(lambda: matched(indexes, chain(0, 2)) == 2)
        liar.say(3, batches[3])
        assert serve_replay(liar, dict(enumerate(batches))) == 0
        for number in range(4):
            eventually(lambda number=number: matched(indexes, chain(1000 * number, 2)) == 2)
        row = totals(made)
        assert row["gaps_total"] == 1
        assert row["lost_total"] == row["forgets_total"] == 0
    finally:
        made.stop()


def test_a_replay_that_is_never_answered_has_a_deadline(liar: Liar) -> None:
    made, indexes = subscriber(liar.spec(replay=True), limits=EventLimits(replay_s=0.1))
    try:
        liar.wait_for_subscriber()
        liar.say(7, batch(stored(chain(0, 2), 1)))
        eventually(lambda: matched(indexes, chain(0, 2)) == 2)
        assert totals(made)["lost_total"] >= 1
    finally:
        made.stop()


class Probed:
    """A pool node driven by hand, with the clock and the number of prompts of the proxy that follows it."""

    def __init__(self, liar: Liar) -> None:
        self.liar = liar
        self.now_s, self.prompts = 0.0, 0
        self.indexes = PrefixIndexes(blocks_max=10_000)
        self.indexes.obtain(BLOCK)
        source = replace(liar.spec(replay=True), pool=True)
        self.made = Subscriber(
            (source,), self.indexes, {"e0": 0}, clock=lambda: self.now_s, prompts=lambda: self.prompts
        )
        self.made._known_indexes = self.indexes.wanting  # none is new: it replays once
        self.made.start()

    def asked(self) -> tuple[bytes, int]:
        """(caller, first wanted number) of the next question."""
        assert self.liar.router.poll(int(TIMEOUT_S * 1000)), "it asked nothing"
        caller, _, start = self.liar.router.recv_multipart()
        return caller, int.from_bytes(start, "big")

    def answer(self, caller: bytes, *messages: tuple[int, bytes]) -> None:
        for number, payload in messages:
            self.liar.router.send_multipart((caller, b"", b"kv", number.to_bytes(8, "big"), payload))
        self.liar.router.send_multipart((caller, b"", b"", b"\xff" * 8, b""))

    def asks_nothing(self) -> bool:
        """After two rounds of the thread."""
        for _ in range(2):
            obeyed = threading.Event()
            self.made._order(obeyed.set)
            assert obeyed.wait(TIMEOUT_S)
        return not self.liar.router.poll(0)

    @property
    def is_mute(self) -> bool:
        return self.made.states()[0].mute


@pytest.fixture
def probed(liar: Liar) -> Iterator[Probed]:
    """It holds TOLD, and has said so in a replay."""
    made = Probed(liar)
    try:
        caller, start = made.asked()
        assert start == 0
        made.answer(caller, (0, held(TOLD)))
        eventually(lambda: in_pool(made.indexes, TOLD) == len(TOLD))
        eventually(lambda: totals(made.made)["replaying"] == 0)
        yield made
    finally:
        made.made.stop()


TOLD = chain(0, 3)


def held(tokens: list[int]) -> bytes:
    return batch(BlockStored(block_digests(tokens, BLOCK), medium="CPU"))


def in_pool(indexes: PrefixIndexes, tokens: list[int]) -> int:
    (index,) = indexes.all
    return int(index.look(array.array("I", tokens).tobytes(), b"", 0, b"")[1])


def test_a_node_that_hangs_is_noticed_within_ten_seconds(probed: Probed) -> None:
    """Its connection stands: ZMQ's own threads answer the heartbeats of a process that does nothing else."""
    probed.prompts += 1
    probed.now_s += LIMITS.check_s
    caller, start = probed.asked()
    assert start > 1 << 63  # no message has such a number: none returns
    assert not probed.is_mute
    probed.now_s += 5.0  # replay_s
    eventually(lambda: probed.is_mute)
    assert probed.now_s <= 10.0
    row = totals(probed.made)
    assert (row["heard"], row["sequence"], row["lost_total"], row["forgets_total"]) == (0, 0, 0, 0)
    assert in_pool(probed.indexes, TOLD) == len(TOLD)  # nothing says that they are gone
    probed.now_s += LIMITS.idle_check_s
    assert probed.asked()[0] != caller  # it goes on asking, and not by the same connection
    probed.liar.say(1, batch(AllBlocksCleared()))
    eventually(lambda: not probed.is_mute and in_pool(probed.indexes, TOLD) == 0)
    row = totals(probed.made)
    assert (row["heard"], row["probes_total"], row["replays_total"]) == (1, 2, 1)


def test_a_node_that_is_slow_keeps_its_blocks(probed: Probed) -> None:
    probed.prompts += 1
    probed.now_s += LIMITS.check_s
    caller, _ = probed.asked()
    probed.now_s += 8.0
    eventually(lambda: probed.is_mute)
    probed.answer(caller)
    eventually(lambda: not probed.is_mute)
    assert in_pool(probed.indexes, TOLD) == len(TOLD)
    assert totals(probed.made)["forgets_total"] == 0


def test_a_healthy_idle_node_is_asked_little(probed: Probed) -> None:
    """One connection for all probes, no message returns, and few of them without prompts."""
    callers = set()
    for _ in range(3):
        probed.now_s += LIMITS.check_s
        assert probed.asks_nothing()  # no prompt was sent since
        probed.prompts += 1
        caller, start = probed.asked()
        assert start > 1 << 63
        callers.add(caller)
        probed.answer(caller)
        eventually(lambda: probed.made._links[0].probed_s is None)
    probed.now_s += LIMITS.idle_check_s - 0.1
    assert probed.asks_nothing()
    probed.now_s += 0.1
    callers.add(probed.asked()[0])
    assert len(callers) == 1
    row = totals(probed.made)
    assert (row["probes_total"], row["replays_total"], row["repeats_total"]) == (4, 1, 0)


def test_a_replay_that_was_given_up_is_asked_for_again_once_the_node_answers(liar: Liar) -> None:
    probed = Probed(liar)
    try:
        probed.asked()
        probed.now_s += 5.0  # replay_s
        caller, start = probed.asked()
        assert start > 1 << 63
        assert probed.is_mute
        probed.answer(caller)
        caller, start = probed.asked()
        assert start == 0
        probed.answer(caller, (0, held(TOLD)))
        eventually(lambda: in_pool(probed.indexes, TOLD) == len(TOLD))
        assert not probed.is_mute
        probed.now_s += LIMITS.check_s
        assert probed.asks_nothing()  # and then it is like any other
    finally:
        probed.made.stop()


def test_without_a_replay_a_gap_forgets(liar: Liar) -> None:
    made, indexes = subscriber(liar.spec())
    try:
        liar.wait_for_subscriber()
        liar.say(0, batch(stored(chain(0, 2), 1)))
        eventually(lambda: matched(indexes, chain(0, 2)) == 2)
        liar.say(5, batch(stored(chain(500, 2), 11)))
        eventually(lambda: matched(indexes, chain(500, 2)) == 2)
        assert matched(indexes, chain(0, 2)) == 0
    finally:
        made.stop()


def test_repeats_change_nothing(liar: Liar) -> None:
    made, indexes = subscriber(liar.spec())
    try:
        liar.wait_for_subscriber()
        first = batch(stored(chain(0, 2), 1))
        second = batch(BlockRemoved([2], medium="GPU"))
        for _ in range(3):
            liar.say(0, first)
        liar.say(1, second)
        liar.say(0, first)
        eventually(lambda: totals(made)["repeats_total"] == 3)
        assert matched(indexes, chain(0, 2)) == 1
        assert totals(made)["forgets_total"] == 0
    finally:
        made.stop()


def test_hostile_bytes(liar: Liar, rng: random.Random) -> None:
    """Frames of all kinds; the thread lives, the index is sound, and good batches count afterwards."""
    good = batch(stored(chain(0, 2), 1), BlockRemoved([7], medium="GPU"), AllBlocksCleared())
    made, indexes = subscriber(liar.spec())
    try:
        liar.wait_for_subscriber()
        liar.say(0, batch(stored(chain(0, 2), 1)))
        liar.pub.send_multipart((b"kv", b"short", good))
        liar.pub.send_multipart((b"kv",))
        for number in range(1, 400):
            damaged = bytearray(good)
            for _ in range(rng.randrange(1, 5)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            liar.say(number, bytes(damaged[: rng.randrange(len(damaged)) if rng.random() < 0.3 else None]))
            if number % 37 == 0:
                liar.say(rng.randrange(1 << 64), rng.randbytes(20))
        eventually(lambda: totals(made)["malformed_total"] > 100)
        liar.say((1 << 64) - 2, batch(stored(chain(0, 2), 1)))
        eventually(lambda: matched(indexes, chain(0, 2)) == 2)
        assert sound(indexes)
    finally:
        made.stop()


def test_a_batch_from_ten_seconds_ago_counts_and_shows(liar: Liar) -> None:
    made, indexes = subscriber(liar.spec())
    try:
        liar.wait_for_subscriber()
        liar.say(0, msgspec.msgpack.encode(Batch(time.time() - 10, [stored(chain(0, 2), 1)])))
        eventually(lambda: matched(indexes, chain(0, 2)) == 2)
        eventually(lambda: totals(made)["lag_max_seconds"] >= 10)  # noted after the blocks
    finally:
        made.stop()


def test_what_is_told_again_is_old_and_not_late(liar: Liar) -> None:
    """A proxy that starts hears of what engines stored an hour ago."""
    made, indexes = subscriber(liar.spec(replay=True))
    try:
        liar.wait_for_subscriber()
        old = msgspec.msgpack.encode(Batch(time.time() - 3600, [stored(chain(0, 2), 1)]))
        serve_replay(liar, {0: old})
        eventually(lambda: matched(indexes, chain(0, 2)) == 2 and not totals(made)["replaying"])
        assert totals(made)["lag_max_seconds"] == 0
        liar.say(1, batch(stored(chain(1, 2), 7)))
        eventually(lambda: matched(indexes, chain(1, 2)) == 2)
        eventually(lambda: totals(made)["lag_max_seconds"] > 0)  # noted after the blocks
        assert totals(made)["lag_max_seconds"] < 60
    finally:
        made.stop()


def test_whoever_leaves_the_rotation_is_forgotten_and_read_again(engine: Engine) -> None:
    tokens = chain(0, 3)
    engine.tell(stored(tokens, 1))
    made, indexes = subscriber(engine.spec(), limits=LIMITS)
    try:
        eventually(lambda: matched(indexes, tokens) == 3)
        made.in_rotation("e0", False)
        eventually(lambda: matched(indexes, tokens) == 0)
        made.in_rotation("e0", True)
        eventually(lambda: matched(indexes, tokens) == 3)
    finally:
        made.stop()


def test_what_a_lost_stream_told_is_not_believed_and_read_again(engine: Engine) -> None:
    tokens = chain(0, 3)
    heard: list[bool] = []
    indexes = PrefixIndexes(blocks_max=10_000)
    limits = EventLimits(replay_s=TIMEOUT_S, lost_s=0.05)  # a busy machine misses no heartbeat of 2 s
    made = Subscriber(
        (engine.spec(),),
        indexes,
        {"e0": 0},
        limits=limits,
        followed=lambda place, index: heard.append(index is not None),
    )
    made.start()
    try:
        engine.tell(stored(tokens, 1))
        eventually(lambda: matched(indexes, tokens) == 3)
        eventually(lambda: heard == [True])
        assert [(each.heard, each.lost_s) for each in made.states()] == [(True, None)]
        engine.stop()
        eventually(lambda: heard == [True, False])
        eventually(lambda: matched(indexes, tokens) == 0)
        (state,) = made.states()
        assert not state.heard
        assert state.lost_s is not None
        assert totals(made)["heard"] == 0
        engine.start()
        engine.tell(stored(tokens, 1))
        eventually(lambda: matched(indexes, tokens) == 3)
        eventually(lambda: heard == [True, False, True])
        assert totals(made)["heard"] == 1
    finally:
        made.stop()


def test_a_stream_of_more_than_can_be_looked_at_is_cut_off_and_read_later(
    liar: Liar, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """S13: 3.6 GB of valid batches stayed in the proxy's memory. One message of 2 MiB is too much here."""
    limits = EventLimits(queues_bytes_max=1 << 20, behind_s=0.0, rest_s=0.05)
    honest = EventSource("honest", engine.endpoint, engine.replay)
    made = Subscriber(
        (liar.spec(), honest), indexes := PrefixIndexes(), {"e0": 0, "honest": 1}, limits=limits
    )
    made.start()
    try:
        engine.tell(stored(chain(0, 3), 1))
        for number in range(3):
            liar.wait_for_subscriber()
            liar.say(number, batch(stored([1 << 30] * (100_000 * BLOCK), 1)))
            eventually(lambda number=number: totals(made)["rests_total"] == number + 1)
            assert liar.pub.poll(20_000)
            assert liar.pub.recv() == b"\x00"  # it has hung up
        liar.wait_for_subscriber()
        liar.say(9, batch(stored(chain(500, 2), 11)))
        eventually(lambda: matched(indexes, chain(500, 2)) == 2)
        eventually(lambda: matched(indexes, chain(0, 3), 1) == 3)
        assert totals(made, "honest")["rests_total"] == 0
        assert caplog.text.count("come faster than they can be looked at") == 1
        assert [each.rests for each in made.states()] == [False, False]
    finally:
        made.stop()


def test_an_engine_that_changes_its_block_size_leaves_no_index_behind(liar: Liar) -> None:
    made, indexes = subscriber(liar.spec())
    try:
        liar.wait_for_subscriber()
        for number in range(20):
            size = 1 + number
            event = BlockStored([1], None, list(range(size)), size, medium="GPU")
            liar.say(2 * number, batch(event))
            liar.say(2 * number + 1, b"no batch")
        eventually(lambda: totals(made)["malformed_total"] == 20)
        assert [index.block_tokens for index in indexes.all] == [20]
        assert indexes.refused == 0
    finally:
        made.stop()


def test_many_streams_and_an_end_at_any_time() -> None:
    engines = [Engine() for _ in range(6)]
    made, indexes = subscriber(*(engine.spec(f"e{place}") for place, engine in enumerate(engines)))
    try:
        for place, engine in enumerate(engines):
            engine.tell(stored(chain(0, place + 1), 1))
        for place in range(6):
            eventually(lambda place=place: matched(indexes, chain(0, 6), place) == place + 1)
    finally:
        made.stop()
        made.stop()
        for engine in engines:
            engine.stop()


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode(Batch(time.time(), events))  # type: ignore[arg-type]


def serve_replay(liar: Liar, batches: dict[int, bytes]) -> int:
    """Answers one replay; returns where it was to start."""
    assert liar.router.poll(20_000)
    caller, empty, start = liar.router.recv_multipart()
    assert empty == b""
    for number, payload in batches.items():
        if number >= int.from_bytes(start, "big"):
            liar.router.send_multipart((caller, b"", b"kv", number.to_bytes(8, "big"), payload))
    liar.router.send_multipart((caller, b"", b"", b"\xff" * 8, b""))
    return int.from_bytes(start, "big")
