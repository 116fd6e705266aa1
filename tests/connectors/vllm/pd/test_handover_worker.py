"""Two hand-over workers over real memory and sockets: what is read is what was there, or is not counted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moonpool.connectors.vllm.pd.bootstrap import Bootstrap
from moonpool.connectors.vllm.pd.consumer_worker import PIECE_BLOCKS, Piece
from moonpool.connectors.vllm.pd.kv_transfer_params import LEFT, Meeting
from moonpool.connectors.vllm.pd.peer_connection import CONNECTIONS_MAX, PeerConnection
from moonpool.connectors.vllm.pd.step_plan import End, Grown, HandoverStep, Open, Pull, Refuse
from moonpool.core.service.addresses import Address
from tests.connectors.vllm.fakes import FINGERPRINT
from tests.connectors.vllm.pd.worlds import (
    BLOCKS,
    CONTENT,
    DEADLINE_S,
    HEADS,
    LAYERS,
    PROMPT,
    TOKENS,
    World,
    eventually,
    heads_first,
    tokens_first,
    world,
)


@pytest.fixture
def pair() -> Iterator[tuple[World, World]]:
    with world("P", seed=1) as prefill, world("D", seed=2) as decode:
        yield prefill, decode


@pytest.mark.parametrize("transports", [None, ["tcp"]])
@pytest.mark.parametrize("layouts", [(heads_first, heads_first), (heads_first, tokens_first)])
def test_blocks_are_read_and_the_lease_ends(transports: list[str] | None, layouts: tuple) -> None:  # type: ignore[type-arg]
    rng = np.random.default_rng(3)
    with ExitStack() as stack:
        prefill = stack.enter_context(world("P", seed=1, make=layouts[0]))
        decode = stack.enter_context(world("D", seed=2, make=layouts[1], transports=transports))
        there = rng.permutation(BLOCKS)[:20].tolist()
        here = rng.permutation(BLOCKS)[:18].tolist()
        untouched = sorted(set(range(BLOCKS)) - set(here))
        before = decode.kv[:, untouched].copy()

        decode.take(prefill.offer(there), here, first=2)
        ended = decode.ended()

        assert (ended.good, ended.error) == (18, "")
        assert ended.bytes == decode.kv[:, here].nbytes
        np.testing.assert_array_equal(decode.kv[:, here], prefill.kv[:, there[2:]])
        np.testing.assert_array_equal(decode.kv[:, untouched], before)
        prefill.wait_handed(77)
        moved = decode.handover_worker.counters
        assert (moved["tcp_read_bytes_total"] > ended.bytes) == (transports == ["tcp"])


def test_a_lease_that_ended_is_noticed(pair: tuple[World, World]) -> None:
    prefill, decode = pair
    offer = prefill.offer([1, 2, 3])
    prefill.handover_worker.begin(HandoverStep(ends=(End(77, "expired"),)))

    decode.take(offer, [4, 5, 6])

    ended = decode.ended()
    assert ended.good == 0
    assert "gave the blocks away" in ended.error


def test_a_slot_that_is_somebody_elses_now(pair: tuple[World, World]) -> None:
    prefill, decode = pair
    offer = prefill.offer([1, 2, 3])
    prefill.handover_worker.begin(HandoverStep(ends=(End(77, "expired"),), opens=(Open(78, 5, "", PROMPT),)))
    decode.take(offer, [4, 5, 6])
    assert decode.ended().good == 0
    decode.take(prefill.offer([7, 8, 9], lease=79, slot=6), [4, 5, 6])
    assert decode.ended().good == 3


def test_two_requests_take_one_offer(pair: tuple[World, World]) -> None:
    """The second one has no room before the first has it all."""
    prefill, decode = pair
    offer = prefill.offer([1, 2])
    for name in ("r", "s"):
        decode.hold(offer, 2, name=name)
    for name, here in (("r", (3, 4)), ("s", (5, 6))):
        decode.handover_worker.pull(HandoverStep(pulls=(Pull(name, 0, (here,)),)))
        ended = decode.ended()
        assert (ended.good, ended.error) == (2, "")
        np.testing.assert_array_equal(decode.kv[:, list(here)], prefill.kv[:, [1, 2]])
        if name == "r":
            decode.handover_worker.begin(HandoverStep(drops=("r",)))
            decode.hold(prefill.offer([7], lease=79, slot=6), 1, name="t")
            decode.handover_worker.begin(HandoverStep(drops=("t",)))
            prefill.wait_handed(79)  # behind which nothing of the first is on its way
    decode.handover_worker.begin(HandoverStep(drops=("s",)))
    prefill.wait_handed(77)


def test_another_model_or_engine_is_refused_in_one_sentence() -> None:
    with (
        world("P", seed=1, fingerprint=bytes(32)) as other_model,
        world("Q", seed=1) as other_engine,
        world("D", seed=2) as decode,
    ):
        decode.take(other_model.offer([1]), [1])
        assert "serves another model, other weights" in decode.ended().error
        offer = other_engine.offer([1])
        other_engine.engine_id = "restarted"
        decode.take(other_engine.offer([1], lease=80, slot=9), [1], name="second")
        assert "another engine (Q) lives at" in decode.ended().error
        decode.take(offer, [1], name="third")
        assert decode.ended().good == 1


class TestRefusals:
    """What decode cannot use is said in both logs, and prefill keeps it no longer."""

    WHY = "the prefill engine P has 2 workers and this one 1"

    def test_of_the_scheduler_reach_every_worker_of_prefill(self, caplog: pytest.LogCaptureFixture) -> None:
        with (
            world("P", seed=1) as one,
            world("P", seed=1, rank=1) as other,
            world("D", seed=2) as decode,
        ):
            offers = [each.offer([1]) for each in (one, other)]
            both = replace(offers[0], ranks=(one.handover_worker.address, other.handover_worker.address))
            decode.handover_worker.begin(HandoverStep(refuses=(Refuse(both, self.WHY),)))
            for each in (one, other):
                each.wait_handed(77)
            eventually(lambda: caplog.text.count(f"vllm-D-0 did not take a prompt over: {self.WHY}") == 2)

    def test_clients_that_leave_are_no_warnings(self, caplog: pytest.LogCaptureFixture) -> None:
        """Twenty of them, and one prompt that cannot be taken."""
        caplog.set_level(logging.INFO)
        with world("P", seed=1) as prefill, world("D", seed=2) as decode:
            offers = [prefill.offer([1], lease=100 + number, slot=number) for number in range(21)]
            refuses = [Refuse(offer, LEFT) for offer in offers[1:]] + [Refuse(offers[0], self.WHY)]
            decode.handover_worker.begin(HandoverStep(refuses=tuple(refuses)))
            eventually(lambda: self.WHY in caplog.text)
        said = [each for each in caplog.records if "did not take a prompt over" in each.getMessage()]
        assert [each.levelname for each in said] == ["INFO", "WARNING"]

    def test_one_worker_speaks_for_all(self) -> None:
        with world("P", seed=1) as prefill, world("D", seed=2, rank=1) as decode:
            decode.handover_worker.begin(HandoverStep(refuses=(Refuse(prefill.offer([1]), self.WHY),)))
            assert decode.handover_worker._connections.all() == []

    @pytest.mark.parametrize("first", ["prefill", "decode"])
    def test_of_a_transfer(self, pair: tuple[World, World], first: str) -> None:
        prefill, decode = pair
        page = Bootstrap(
            Address("127.0.0.1", 0),
            dp_rank=0,
            engine_id="P",
            workers={(0, 0): prefill.handover_worker.address},
        )
        try:
            opens = HandoverStep(opens=(Open(77, 5, "x-1", PROMPT),))
            if first == "prefill":
                prefill.handover_worker.begin(opens)
            meeting = Meeting("P", f"http://{page.address}", "x-1")
            decode.handover_worker.begin(HandoverStep(refuses=(Refuse(meeting, self.WHY),)))
            if first == "decode":
                eventually(lambda: "x-1" in prefill.handover_worker._producer._waiting)
                prefill.handover_worker.begin(opens)
            prefill.wait_handed(77)
        finally:
            page.close()

    @pytest.mark.parametrize("form", ["two-step", "concurrent"])
    def test_what_another_request_takes_is_not_refused(self, pair: tuple[World, World], form: str) -> None:
        prefill, decode = pair
        meeting = Meeting("P", "http://127.0.0.1:1", "x-1")
        source = prefill.offer([1]) if form == "two-step" else meeting
        decode.hold(source, 1)
        lines = decode.handover_worker._connections.all()
        decode.handover_worker.begin(HandoverStep(refuses=(Refuse(source, self.WHY),)))
        assert set(decode.handover_worker._connections.all()) <= set(
            lines
        )  # the page's is dead by now, perhaps
        decode.handover_worker.pull(HandoverStep(pulls=(Pull("r", 0, ((2,),)),)))
        assert decode.ended().good == (form == "two-step")

    @pytest.mark.parametrize(
        ("heads", "fingerprint", "why"),
        [
            (1, FINGERPRINT, "holds other heads or layers than this one takes from it"),
            (HEADS, bytes(32), "serves another model, other weights, or KV of another form"),
        ],
    )
    def test_of_a_worker(
        self, heads: int, fingerprint: bytes, why: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Of other heads, as with another tensor-parallel size; of another dtype or model."""
        with (
            world("P", seed=1, heads=heads, fingerprint=fingerprint) as prefill,
            world("D", seed=2) as decode,
        ):
            decode.take(prefill.offer([1]), [1])
            ended = decode.ended()
            assert ended.good == 0
            assert why in ended.error
            decode.handover_worker.begin(HandoverStep(drops=("r",)))
            prefill.wait_handed(77)
            eventually(lambda: "vllm-D-0 did not take a prompt over" in caplog.text)
            assert why in caplog.text


def test_nobody_there(pair: tuple[World, World]) -> None:
    prefill, decode = pair
    offer = prefill.offer([1, 2])
    prefill.handover_worker.close()
    decode.take(offer, [3, 4])
    ended = decode.ended()
    assert ended.good == 0
    assert ended.error


def test_a_line_without_a_thread_is_no_line(
    pair: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair

    def fail(line: PeerConnection) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as crowded:
        crowded.setattr(PeerConnection, "start", fail)
        for attempt in range(2 * CONNECTIONS_MAX):
            decode.take(prefill.offer([1, 2], lease=100 + attempt, slot=attempt), [3, 4])
            ended = decode.ended()
            assert ended.good == 0
            assert decode.handover_worker.take_lost() == {"r"}
    decode.take(prefill.offer([1, 2]), [3, 4])
    assert decode.ended().good == 2


def test_known_to_be_lost_before_there_was_room(pair: tuple[World, World]) -> None:
    prefill, decode = pair
    offer = prefill.offer([1, 2])
    prefill.handover_worker.close()
    decode.hold(offer, 2)
    eventually(lambda: decode.handover_worker.has_news)
    assert decode.handover_worker.take_lost() == {"r"}


@pytest.mark.parametrize("block", [BLOCKS, 10**6, (1 << 32) - 1])
@pytest.mark.parametrize("transports", [None, ["tcp"]])
def test_blocks_that_are_not_there(block: int, transports: list[str] | None) -> None:
    """A lying offer, signed all the same: the transfer engine lets nobody read beyond what is registered, and
    what the request already has stays good."""
    with world("P", seed=1) as prefill, world("D", seed=2, transports=transports) as decode:
        blocks = list(range(PIECE_BLOCKS))
        decode.take(prefill.offer([*blocks, block]), [*blocks, 20])
        ended = decode.ended()
        assert ended.good == PIECE_BLOCKS
        assert ended.error
        np.testing.assert_array_equal(decode.kv[:, blocks], prefill.kv[:, blocks])


class TestConcurrent:
    def meet(self, prefill: World, decode: World, stack: ExitStack, blocks: list[int]) -> None:
        page = Bootstrap(
            Address("127.0.0.1", 0),
            dp_rank=0,
            engine_id="P",
            workers={(0, 0): prefill.handover_worker.address},
        )
        stack.callback(page.close)
        decode.take(Meeting("P", f"http://{page.address}", "x-1"), blocks)

    def test_each_chunk_arrives_while_later_ones_are_computed(self, pair: tuple[World, World]) -> None:
        prefill, decode = pair
        with ExitStack() as stack:
            prefill.handover_worker.begin(HandoverStep(opens=(Open(77, 5, "x-1", PROMPT),)))
            self.meet(prefill, decode, stack, [10, 11, 12, 13, 14])
            for first, ids, final in ((0, (1, 2), False), (2, (3,), False), (3, (20, 21), True)):
                prefill.handover_worker.computed(HandoverStep(grown=(Grown(77, first, (ids,), final),)))
                here = [10 + first + place for place in range(len(ids))]
                expected = prefill.kv[:, list(ids)]
                eventually(lambda h=here, e=expected: bool((decode.kv[:, h] == e).all()))  # type: ignore[misc]
                assert not decode.handover_worker.take_ended() or final
            prefill.wait_handed(77)

    def test_decode_comes_first(self, pair: tuple[World, World]) -> None:
        prefill, decode = pair
        with ExitStack() as stack:
            self.meet(prefill, decode, stack, [10, 11])
            prefill.handover_worker.begin(HandoverStep(opens=(Open(77, 5, "x-1", PROMPT),)))
            prefill.handover_worker.computed(HandoverStep(grown=(Grown(77, 0, ((1, 2),), True),)))
            assert decode.ended().good == 2
            np.testing.assert_array_equal(decode.kv[:, [10, 11]], prefill.kv[:, [1, 2]])

    def test_decode_comes_last(self, pair: tuple[World, World]) -> None:
        prefill, decode = pair
        with ExitStack() as stack:
            prefill.handover_worker.begin(HandoverStep(opens=(Open(77, 5, "x-1", PROMPT),)))
            prefill.handover_worker.computed(HandoverStep(grown=(Grown(77, 0, ((1, 2),), True),)))
            self.meet(prefill, decode, stack, [10, 11])
            assert decode.ended().good == 2

    def test_a_message_that_was_lost_is_asked_for_again(
        self, pair: tuple[World, World], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As when the line died to which it went. The one after it makes no sense alone."""
        prefill, decode = pair
        with ExitStack() as stack:
            prefill.handover_worker.begin(HandoverStep(opens=(Open(77, 5, "x-1", PROMPT),)))
            self.meet(prefill, decode, stack, [10, 11])
            eventually(lambda: "x-1" in prefill.handover_worker._producer._waiting)
            with monkeypatch.context() as patch:
                patch.setattr(prefill.handover_worker, "_send", lambda outbox: None)
                prefill.handover_worker.computed(HandoverStep(grown=(Grown(77, 0, ((1,),), False),)))
            prefill.handover_worker.computed(HandoverStep(grown=(Grown(77, 1, ((2,),), True),)))
            ended = decode.ended()
            assert (ended.good, ended.error) == (2, "")
            np.testing.assert_array_equal(decode.kv[:, [10, 11]], prefill.kv[:, [1, 2]])

    def test_prefill_begins_anew_after_a_preemption(self, pair: tuple[World, World]) -> None:
        prefill, decode = pair
        with ExitStack() as stack:
            prefill.handover_worker.begin(HandoverStep(opens=(Open(77, 5, "x-1", PROMPT),)))
            self.meet(prefill, decode, stack, [10, 11, 12])
            prefill.handover_worker.computed(HandoverStep(grown=(Grown(77, 0, ((1,),), False),)))
            eventually(lambda: bool((decode.kv[:, 10] == prefill.kv[:, 1]).all()))
            prefill.handover_worker.begin(
                HandoverStep(ends=(End(77, "preempted"),), opens=(Open(78, 6, "x-1", PROMPT),))
            )
            prefill.handover_worker.computed(HandoverStep(grown=(Grown(78, 0, ((4, 5, 6),), True),)))
            ended = decode.ended()
            assert (ended.good, ended.error) == (3, "")
            np.testing.assert_array_equal(decode.kv[:, [11, 12]], prefill.kv[:, [5, 6]])

    def test_a_read_that_fails_before_prefill_begins_anew(
        self, pair: tuple[World, World], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The end of the old lease is seen in memory; the new one is told steps later."""
        prefill, decode = pair
        failed = threading.Event()
        read = decode.handover_worker._consumer.read

        def reads(
            piece: Piece, nbytes: int, error: str, now_s: float, *, is_lease_over: bool, **more: Any
        ) -> None:
            read(piece, nbytes, error, now_s, is_lease_over=is_lease_over, **more)
            if is_lease_over:
                failed.set()

        monkeypatch.setattr(decode.handover_worker._consumer, "read", reads)
        with ExitStack() as stack:
            prefill.handover_worker.begin(HandoverStep(opens=(Open(77, 5, "x-1", PROMPT),)))
            prefill.handover_worker.computed(HandoverStep(grown=(Grown(77, 0, ((1, 2),), False),)))
            prefill.handover_worker._lease_table.set(
                5, 0
            )  # as in the step below, before decode is told anything
            self.meet(prefill, decode, stack, [10, 11, 12])
            assert failed.wait(DEADLINE_S)
            prefill.handover_worker.begin(
                HandoverStep(ends=(End(77, "preempted"),), opens=(Open(78, 6, "x-1", PROMPT),))
            )
            prefill.handover_worker.computed(HandoverStep(grown=(Grown(78, 0, ((4, 5, 6),), True),)))
            ended = decode.ended()
            assert (ended.good, ended.error) == (3, "")
            np.testing.assert_array_equal(decode.kv[:, [10, 11, 12]], prefill.kv[:, [4, 5, 6]])
            prefill.wait_handed(78)

    def test_an_aborted_prefill_leaves_what_is_good(self, pair: tuple[World, World]) -> None:
        prefill, decode = pair
        with ExitStack() as stack:
            prefill.handover_worker.begin(HandoverStep(opens=(Open(77, 5, "x-1", PROMPT),)))
            self.meet(prefill, decode, stack, [10, 11])
            prefill.handover_worker.computed(HandoverStep(grown=(Grown(77, 0, ((1,),), False),)))
            eventually(lambda: bool((decode.kv[:, 10] == prefill.kv[:, 1]).all()))
            prefill.handover_worker.begin(HandoverStep(ends=(End(77, "the prefill was aborted"),)))
            ended = decode.ended()
            assert ended.good <= 1
            assert ended.error

    def test_another_prompt_under_the_same_transfer(self, pair: tuple[World, World]) -> None:
        prefill, decode = pair
        with ExitStack() as stack:
            self.meet(prefill, decode, stack, [10])
            prefill.handover_worker.begin(HandoverStep(opens=(Open(77, 5, "x-1", bytes(32)),)))
            prefill.handover_worker.computed(HandoverStep(grown=(Grown(77, 0, ((1,),), True),)))
            ended = decode.ended()
            assert ended.good == 0
            assert "another prompt" in ended.error

    def test_a_transfer_that_nobody_knows(self) -> None:
        with (
            ExitStack() as stack,
            world("P", seed=1) as prefill,
            world("D", seed=2, silence_s=0.5) as decode,
        ):
            self.meet(prefill, decode, stack, [10])
            assert "knew nothing of it" in decode.ended().error

    def test_decode_leaves_before_prefill_began(self, pair: tuple[World, World]) -> None:
        prefill, decode = pair
        with ExitStack() as stack:
            self.meet(prefill, decode, stack, [10])
            decode.handover_worker.begin(HandoverStep(drops=("r",)))
            assert decode.ended().good == 0
            prefill.handover_worker.begin(HandoverStep(opens=(Open(77, 5, "x-1", PROMPT),)))
            prefill.wait_handed(77)


def test_something_unexpected_while_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pull still ends, once, and the next one works. Over TCP, where the line's own thread reads."""

    def fail(*args: object) -> None:
        raise ValueError("unexpected")

    with world("P", seed=1) as prefill, world("D", seed=2, transports=["tcp"]) as decode:
        with monkeypatch.context() as patch:
            patch.setattr(decode.handover_worker, "_read_piece", fail)
            decode.take(prefill.offer([1]), [1])
            assert decode.ended().good == 0
        offer = prefill.offer([1], lease=78, slot=6)

        def works() -> bool:  # after the rest that a line takes which died
            decode.take(offer, [1])
            return decode.ended().good == 1

        eventually(works)


def test_what_a_step_read_is_told_with_the_next_one(
    pair: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not meanwhile, which would wake a thread; and not only with the next heartbeat."""
    monkeypatch.setattr("moonpool.connectors.vllm.pd.handover_worker.HEARTBEAT_S", 1000.0)
    prefill, _ = pair
    with world("E", seed=3, silence_s=4000.0) as decode:
        decode.hold(prefill.offer([1]), 1)
        decode.handover_worker.begin(HandoverStep(drops=("r",)))
        prefill.wait_handed(77)  # over a line that had to be made, which is there now
        decode.take(prefill.offer([2, 3], lease=78, slot=6), [2, 3])
        (ended,) = decode.handover_worker.take_ended()
        assert ended.good == 2
        decode.handover_worker.begin(HandoverStep(drops=("r",)))
        prefill.wait_handed(78)


def test_signs_of_life_go_out_while_a_long_read_lasts() -> None:
    """Else a burst of hand-overs over a slow network loses the leases of those that wait behind it."""
    with (
        world("P", seed=1) as prefill,
        world("D", seed=2, transports=["tcp"], silence_s=0.2) as decode,
    ):
        handover_worker = decode.handover_worker
        assert handover_worker._consumer._piece_blocks == PIECE_BLOCKS
        pieces, read_piece, tick = [], handover_worker._read_piece, handover_worker._tick
        ticked = threading.Event()

        def slow(line: PeerConnection, piece: Piece, scratch: int) -> tuple[int, tuple[int, ...]]:
            """As long as it takes until the next sign is due; the last one until it has arrived."""
            ticked.clear()
            assert ticked.wait(DEADLINE_S)
            if pieces:
                eventually(lambda: {77, 78} <= heard)
            pieces.append(piece)
            return read_piece(line, piece, scratch)

        def ticks(now_s: float) -> None:
            tick(now_s)
            ticked.set()
            heard.update(prefill.handover_worker.take_heartbeats()[0])

        heard: set[int] = set()
        handover_worker._read_piece, handover_worker._tick = slow, ticks  # type: ignore[method-assign]
        blocks = list(range(PIECE_BLOCKS + 4))
        decode.hold(prefill.offer([1], lease=78, slot=6), 1, name="behind")  # before any heartbeat
        decode.take(prefill.offer(blocks), blocks)
        decode.handover_worker.pull(HandoverStep(pulls=(Pull("behind", 0, ((30,),)),)))
        ends: dict[str, int] = {}

        def look() -> bool:
            ends.update((ended.pull.request_id, ended.good) for ended in handover_worker.take_ended())
            return len(ends) == 2

        eventually(look)
        assert ends == {"r": len(blocks), "behind": 1}
        assert len(pieces) == 3


def test_pieces_of_large_blocks_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = len(LAYERS) * HEADS * TOKENS * CONTENT * 4
    for room, expected in ((3 * block_bytes, 3), (1, 1), (10**9, PIECE_BLOCKS)):
        monkeypatch.setattr("moonpool.connectors.vllm.pd.handover_worker.PIECE_BYTES", room)
        with world("D", seed=2) as decode:
            assert decode.handover_worker._consumer._piece_blocks == expected


def test_garbage_is_counted_and_changes_nothing(pair: tuple[World, World]) -> None:
    prefill, decode = pair
    segment = decode.handover_worker._engine.open(prefill.handover_worker.address)
    for text in (b"", b"\xff\xff", b"\x93\x01\x02\x03", bytes(1000)):
        decode.handover_worker._engine.notify(segment, text)
    eventually(lambda: prefill.handover_worker.dropped_messages == 4)
    decode.take(prefill.offer([1]), [1])
    assert decode.ended().good == 1
