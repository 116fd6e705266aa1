"""The two halves beside the memory, message by message, without sockets or threads."""

from __future__ import annotations

import contextlib
import random

import msgspec
import pytest

from moonpool.connectors.vllm.pd import wire
from moonpool.connectors.vllm.pd.consumer_worker import GAPS, OLDER, PIECE_BLOCKS, ConsumerWorker
from moonpool.connectors.vllm.pd.incoming import UNEVEN, PartSource
from moonpool.connectors.vllm.pd.kv_transfer_params import LEFT, Meeting, Offer
from moonpool.connectors.vllm.pd.producer_worker import ProducerWorker
from moonpool.connectors.vllm.pd.step_plan import End, Grown, Hold, Open, Pull
from moonpool.connectors.vllm.pd.wire import Done, Gone, Heartbeat, Known, Progress, Want

PROMPT = bytes(32)
SILENCE_S = 10.0


class Slots(dict[int, int]):
    """The page, and that nothing is opened where another lease is valid."""

    def set(self, slot: int, lease: int) -> None:
        assert not (lease and self.get(slot))
        self[slot] = lease


def gives() -> tuple[ProducerWorker, Slots]:
    slots = Slots()
    return ProducerWorker(slots.set, silence_s=SILENCE_S), slots


def opened(lease: int = 1, slot: int = 0, transfer: str = "x") -> tuple[Open, ...]:
    return (Open(lease, slot, transfer, PROMPT),)


class TestGives:
    def test_slots_follow_leases(self) -> None:
        one, slots = gives()
        assert one.begin(opened(transfer=""), ()) == []
        assert slots == {0: 1}
        one.done(Done(1, ""), 0.0)
        assert slots == {0: 0}
        assert one.take_heartbeats() == (set(), {1: 1})
        one.done(Done(1, ""), 0.0)  # again
        assert one.begin((), (End(1, "late"),)) == []
        assert one.take_heartbeats() == (set(), {})

    def test_a_slot_ends_and_opens_in_one_step(self) -> None:
        one, slots = gives()
        one.begin(opened(1, 0, ""), ())
        one.begin(opened(2, 0, ""), (End(1, ""),))
        assert slots == {0: 2}

    def test_growth_is_told_to_who_takes_it(self) -> None:
        one, _ = gives()
        one.begin(opened(), ())
        assert one.grown((Grown(1, 0, ((5, 6),), False),)) == []
        assert one.want(Want("x", "D"), 0.0) == [("D", Progress("x", 1, 0, PROMPT, 0, [[5, 6]], False))]
        assert one.grown((Grown(1, 2, ((7,),), True),)) == [
            ("D", Progress("x", 1, 0, PROMPT, 2, [[7]], True))
        ]
        assert one.want(Want("x", "E"), 0.0) == [("E", Gone("x", "another engine takes this transfer"))]

    def test_a_worker_that_leaves_before_another_one_comes_is_not_waited_for(self) -> None:
        one, slots = gives()
        one.begin(opened(), ())
        one.done(Done(0, "x", LEFT, "D0", "D", 2), 0.0)
        one.want(Want("x", "D1", "D", 2), 0.0)
        assert slots == {0: 1}
        one.done(Done(1, "x", "", "D1", "D", 2), 0.0)
        assert slots == {0: 0}
        assert one.take_heartbeats()[1] == {1: 1}

    def test_an_end_is_told_but_not_when_it_begins_anew(self) -> None:
        one, _ = gives()
        one.begin(opened(), ())
        one.want(Want("x", "D"), 0.0)
        assert one.begin(opened(2, 1), (End(1, "preempted"),)) == []
        assert one.begin((), (End(2, "aborted"),)) == [("D", Gone("x", "aborted"))]

    def test_a_lease_that_ends_in_the_step_that_opens_it(self) -> None:
        """Its request was aborted before the first step."""
        one, slots = gives()
        one.want(Want("x", "D"), 0.0)
        assert one.begin(opened(), (End(1, "aborted"),)) == [("D", Gone("x", "aborted"))]
        assert slots == {}
        assert len(one) == 0
        # Once more: the first word may have been lost.
        assert one.heartbeat(Heartbeat("D", [], ["x"]), 0.0) == [
            ("D", Gone("x", "aborted")),
            ("D", Known([])),
        ]

    def test_who_asks_for_what_is_gone_hears_it_at_once(self) -> None:
        one, _ = gives()
        one.begin(opened(), (End(1, "aborted"),))
        assert one.want(Want("x", "D"), 0.0) == [("D", Gone("x", "aborted"))]
        one.begin(opened(2), ())  # the same name, tried again
        assert one.want(Want("x", "D"), 0.0) == []

    def test_signs_of_life(self) -> None:
        one, _ = gives()
        one.begin((*opened(1, 0, "x"), *opened(2, 1, "")), ())
        one.want(Want("y", "D"), 0.0)
        assert one.heartbeat(Heartbeat("D", [2, 99], ["x", "y"]), 1.0) == [("D", Known([("x", 1, 0)]))]
        assert one.take_heartbeats() == ({1, 2}, {})

    def test_who_left_before_it_began_is_done_at_once(self) -> None:
        one, slots = gives()
        one.want(Want("x", "D"), 0.0)
        one.done(Done(0, "x", "", "D"), 0.0)
        assert one.begin(opened(), ()) == []
        assert one.take_heartbeats()[1] == {1: 1}
        assert slots == {0: 0}

    @pytest.mark.parametrize("done", [Done(0, "x", "", "E"), Done(0, "x", "another model", "E")])
    @pytest.mark.parametrize("is_open", [False, True])
    def test_another_decode_engine_ends_nothing(self, done: Done, is_open: bool) -> None:
        """It was told that D takes the transfer, or cannot use it itself."""
        one, slots = gives()
        one.want(Want("x", "D"), 0.0)
        if is_open:
            one.begin(opened(), ())
        one.done(done, 0.0)
        if not is_open:
            one.begin(opened(), ())
        assert slots == {0: 1}
        assert one.take_heartbeats() == ({1}, {})
        assert one.grown((Grown(1, 0, ((5,),), True),)) == [
            ("D", Progress("x", 1, 0, PROMPT, 0, [[5]], True))
        ]

    def test_who_comes_after_one_that_left_takes_its_place(self) -> None:
        one, slots = gives()
        one.done(Done(0, "x", "another model", "E"), 0.0)
        assert one.want(Want("x", "D"), 0.0) == []
        one.begin(opened(), ())
        assert slots == {0: 1}

    def test_who_leaves_under_a_lease_that_was_replaced(self) -> None:
        """Prefill began anew, and decode gave up before it heard of that."""
        one, slots = gives()
        one.begin(opened(), ())
        one.want(Want("x", "D"), 0.0)
        one.begin(opened(2, 1), (End(1, "preempted"),))
        one.done(Done(1, "x", "", "E"), 0.0)  # who has nothing to do with it
        assert slots == {0: 0, 1: 2}
        one.done(Done(1, "x", "", "D"), 0.0)
        assert slots == {0: 0, 1: 0}
        assert one.take_heartbeats()[1] == {2: 1}

    def test_a_late_word_about_an_old_lease_leaves_the_next_one(self) -> None:
        one, slots = gives()
        one.begin(opened(), ())
        one.begin((), (End(1, "late"),))
        one.begin(opened(2, 1), ())
        one.done(Done(1, "x", "", "D"), 0.0)
        assert slots == {0: 0, 1: 2}

    @pytest.mark.parametrize("grown", [Grown(1, 2, ((7,),), False), Grown(1, 1, ((7,), (8,)), False)])
    def test_a_gap_in_what_grew_ends_the_lease(self, grown: Grown) -> None:
        """A step was lost between the scheduler and this worker."""
        one, slots = gives()
        one.begin(opened(), ())
        one.want(Want("x", "D"), 0.0)
        one.grown((Grown(1, 0, ((5,),), False),))
        gone = Gone("x", "the prefill engine lost track of its blocks")
        assert one.grown((grown,)) == [("D", gone)]
        assert (slots, one.take_heartbeats()[1]) == ({0: 0}, {1: 1})
        assert one.want(Want("x", "D"), 0.0) == [("D", gone)]

    def test_revoked(self) -> None:
        one, slots = gives()
        one.begin((*opened(1, 0, "x"), *opened(2, 1, "")), ())
        one.want(Want("x", "D"), 0.0)
        one.take_heartbeats()
        assert one.revoke() == [("D", Gone("x", "the prefill engine gave up"))]
        assert slots == {0: 0, 1: 0}
        assert one.take_heartbeats() == (set(), {1: 1, 2: 1})
        assert len(one) == 0

    def test_a_refusal_may_come_before_what_it_refuses(self) -> None:
        one, slots = gives()
        one.done(Done(0, "x", "another model", "D"), 0.0)
        assert one.begin(opened(), ()) == []
        assert (slots, one.take_heartbeats()[1]) == ({0: 0}, {1: 1})
        one.done(Done(0, "y", "another model", "D"), 0.0)
        one.tick(SILENCE_S + 0.1)
        one.begin(opened(2, 1, "y"), ())
        assert slots[1] == 2  # tried again, later
        one.begin((), (End(2, "aborted"),))
        one.done(Done(0, "y", "another model", "D"), 20.0)
        one.begin(opened(3, 1, "y"), ())
        assert slots[1] == 3  # what was refused is gone, not this

    def test_who_is_silent_is_forgotten(self) -> None:
        one, _ = gives()
        one.want(Want("x", "D"), 0.0)
        one.tick(SILENCE_S + 0.1)
        one.begin(opened(), ())
        assert one.grown((Grown(1, 0, ((5,),), True),)) == []


def offer(blocks: int, lease: int = 7) -> Offer:
    return Offer("e", ("P",), lease, 3, (tuple(range(50, 50 + blocks)),), 4 * blocks, bytes(32), PROMPT)


def takes() -> ConsumerWorker:
    return ConsumerWorker(reply="D", silence_s=SILENCE_S)


def hold(one: ConsumerWorker, what: Hold, *sources: PartSource) -> None:
    """A request comes, whose prefill engine has these workers: one, if none is named."""
    incoming = one.hold(what, "key", 0.0)
    assert incoming is not None
    one.meet(incoming, sources or (PartSource("key", "P"),), 0.0)


def pull(blocks: int, first: int = 0, name: str = "r") -> Pull:
    return Pull(name, first, (tuple(range(10, 10 + blocks)),))


class TestTakes:
    def test_two_step_in_pieces(self) -> None:
        one, total = takes(), PIECE_BLOCKS + 3
        hold(one, Hold("r", offer(total), PROMPT, total))
        assert one.next_piece("r", "key") is None  # there is no room yet
        one.pull(pull(total - 1, first=1), 1.0)
        for expected in (PIECE_BLOCKS, 2):
            piece = one.next_piece("r", "key")
            assert piece is not None
            assert piece.blocks == expected
            assert [b - 50 for b in piece.there[0]] == [b - 10 + 1 for b in piece.here[0]]
            one.read(piece, 100, "", 2.0)
        (ended,) = one.take_ended()
        assert (ended.good, ended.bytes, ended.seconds, ended.error) == (total - 1, 200, 1.0, "")
        assert one.take_to_tell() == [("key", Done(7, "", "", "D"))]
        assert len(one) == 0

    @pytest.mark.parametrize("first", ["taken", "dropped", "lost"])
    def test_the_last_of_several_requests_ends_their_lease(self, first: str) -> None:
        """As the children of a request with n=2, which all bring the same offer."""
        one = takes()
        for name in ("r", "s"):
            hold(one, Hold(name, offer(3), PROMPT, 3))
        hold(one, Hold("other", offer(3, lease=8), PROMPT, 3))
        if first == "dropped":
            one.drop("r", 0.0)
        else:
            one.pull(pull(3), 0.0)
            piece = one.next_piece("r", "key")
            assert piece is not None
            one.read(piece, 1, "broken" if first == "lost" else "", 0.0)
        assert one.take_to_tell() == []
        one.pull(pull(3, name="s"), 1.0)
        piece = one.next_piece("s", "key")
        assert piece is not None
        one.read(piece, 1, "", 1.0)
        assert one.take_to_tell() == [("key", Done(7, "", "", "D"))]
        one.drop("other", 1.0)
        assert one.take_to_tell() == [("key", Done(8, "", "", "D"))]

    @pytest.mark.parametrize("known", [False, True])
    @pytest.mark.parametrize("pulled", [False, True])
    def test_a_pull_that_was_interrupted_ends_once(self, known: bool, pulled: bool) -> None:
        one, wanted = takes(), pull(3)
        if known:
            hold(one, Hold("r", offer(3), PROMPT, 3))
        if pulled:
            one.pull(wanted, 0.0)
        one.fail_pull(wanted, "broken", 0.0)
        (ended,) = one.take_ended()
        assert ended.pull is wanted
        assert ended.good == 0
        assert len(one) == 0

    def test_an_interrupted_pull_does_not_end_while_it_is_read(self) -> None:
        one, wanted = takes(), pull(3)
        hold(one, Hold("r", offer(3), PROMPT, 3))
        one.pull(wanted, 0.0)
        piece = one.next_piece("r", "key")
        assert piece is not None
        one.fail_pull(wanted, "broken", 0.0)
        assert one.take_ended() == []
        one.read(piece, 1, "", 1.0)
        assert len(one.take_ended()) == 1

    def test_what_failed_is_reported_once_with_what_is_good(self) -> None:
        one, total = takes(), PIECE_BLOCKS + 3
        hold(one, Hold("r", offer(total), PROMPT, total))
        one.pull(pull(total), 0.0)
        first, second = one.next_piece("r", "key"), None
        assert first is not None
        one.read(first, 1, "", 0.0)
        second = one.next_piece("r", "key")
        assert second is not None
        one.fail_connection("other", "x", 0.0)
        one.fail_connection("key", "the line is dead", 0.0)
        assert one.take_ended() == []  # its blocks are still written to
        one.read(second, 0, "gone", 0.0)
        (ended,) = one.take_ended()
        assert (ended.good, ended.error) == (PIECE_BLOCKS, "the line is dead")
        assert one.take_ended() == []
        assert one.take_lost() == set()
        assert one.take_to_tell() == [("key", Done(7, "", "the line is dead", "D"))]

    def test_pieces_that_arrive_out_of_order(self) -> None:
        one, total = takes(), 3 * PIECE_BLOCKS
        hold(one, Hold("r", offer(total), PROMPT, total))
        one.pull(pull(total), 0.0)
        pieces = [one.next_piece("r", "key") for _ in range(4)]
        assert pieces.pop() is None
        first, second, third = pieces
        assert first is not None
        assert second is not None
        assert third is not None
        assert [each.start for each in (first, second, third)] == [0, PIECE_BLOCKS, 2 * PIECE_BLOCKS]
        one.read(third, 1, "", 0.0)
        one.read(first, 1, "", 0.0)
        one.read(second, 0, "gone", 0.0)
        (ended,) = one.take_ended()
        assert (ended.good, ended.error) == (PIECE_BLOCKS, "gone")  # what lies behind the gap does not count

    def test_lost_before_there_was_room(self) -> None:
        one = takes()
        hold(one, Hold("r", offer(1), PROMPT, 1))
        one.fail_connection("key", "dead", 0.0)
        assert one.take_lost() == {"r"}
        assert one.pull(pull(1), 0.0) is None  # it was planned before that was known
        (ended,) = one.take_ended()
        assert ended.good == 0

    def test_dropped_in_every_stage(self) -> None:
        one = takes()
        one.drop("r", 0.0)
        hold(one, Hold("r", offer(2), PROMPT, 2))
        one.drop("r", 0.0)
        assert one.take_to_tell() == [("key", Done(7, "", "", "D"))]
        hold(one, Hold("r", offer(2), PROMPT, 2))
        one.pull(pull(2), 0.0)
        piece = one.next_piece("r", "key")
        assert piece is not None
        one.drop("r", 0.0)
        assert one.take_ended() == []
        one.read(piece, 1, "", 0.0)
        assert len(one.take_ended()) == 1

    def met(self, blocks: int = 4) -> ConsumerWorker:
        one = takes()
        hold(one, Hold("r", Meeting("e", "http://b", "x"), PROMPT, blocks))
        one.pull(pull(blocks), 0.0)
        return one

    def test_chunks(self) -> None:
        one = self.met()
        assert one.progress(Progress("x", 7, 3, PROMPT, 0, [[50]], False), 0.0) is not None
        piece = one.next_piece("r", "key")
        assert piece is not None
        assert one.progress(Progress("x", 7, 3, PROMPT, 1, [[51, 52, 53]], True), 0.0) is not None
        one.read(piece, 1, "", 0.0)
        piece = one.next_piece("r", "key")
        assert piece is not None
        assert (piece.there, piece.here) == (((51, 52, 53),), ((11, 12, 13),))
        one.read(piece, 1, "", 0.0)
        assert [ended.good for ended in one.take_ended()] == [4]

    def test_a_new_lease_in_the_middle_of_a_read(self) -> None:
        one = self.met()
        one.progress(Progress("x", 7, 3, PROMPT, 0, [[50, 51]], False), 0.0)
        piece = one.next_piece("r", "key")
        assert piece is not None
        one.progress(Progress("x", 8, 4, PROMPT, 0, [[60, 61, 62, 63]], True), 0.0)
        one.read(piece, 0, "the lease is over", 0.0)
        for expected in ((60, 61), (62, 63)):
            piece = one.next_piece("r", "key")
            assert piece is not None
            assert (piece.lease, piece.slot, piece.there) == (8, 4, (expected,))
            one.read(piece, 1, "", 0.0)
        assert [ended.good for ended in one.take_ended()] == [4]

    @pytest.mark.parametrize(
        ("progress", "why"),
        [
            (Progress("x", 7, 3, bytes(31) + b"1", 0, [[50]], False), "another prompt"),
            (Progress("x", 7, 3, PROMPT, 0, [[50]], True), "too few blocks"),
        ],
    )
    def test_lies(self, progress: Progress, why: str) -> None:
        one = self.met()
        one.progress(progress, 0.0)
        (ended,) = one.take_ended()
        assert ended.good == 0
        assert why in ended.error
        assert [done.why for _, done in one.take_to_tell()] == [ended.error]

    def test_a_transfer_that_its_engine_does_not_know(self) -> None:
        one = self.met()
        assert one.tick(5.0) == [("key", Heartbeat("D", [], ["x"]))]
        assert one.known(Known([("x", 7, 0), ("y", 8, 3)]), 9.0) == []
        assert one.tick(18.9) != []
        assert one.tick(19.1) == []
        (ended,) = one.take_ended()
        assert "knew nothing of it" in ended.error

    def test_a_lost_message_is_asked_for_again(self) -> None:
        one = self.met()
        one.progress(Progress("x", 7, 3, PROMPT, 0, [[50]], False), 0.0)
        assert one.known(Known([("x", 7, 1)]), 1.0) == []
        again = [("key", Want("x", "D"))]
        assert one.known(Known([("x", 7, 2)]), 1.0) == again
        assert one.known(Known([("x", 8, 1)]), 1.0) == again
        one.progress(Progress("x", 7, 3, PROMPT, 0, [[50, 51]], False), 0.0)
        assert one.known(Known([("x", 7, 2)]), 1.0) == []

    def test_a_preempted_prefill_costs_no_hand_over(self) -> None:
        """The reads of two threads fail before the new lease is heard of."""
        one = self.met(2 * PIECE_BLOCKS)
        one.progress(Progress("x", 7, 3, PROMPT, 0, [list(range(100, 100 + 2 * PIECE_BLOCKS))], True), 0.0)
        pieces = [one.next_piece("r", "key"), one.next_piece("r", "key")]
        for piece in pieces:
            assert piece is not None
            one.read(piece, 0, "gone", 1.0, is_lease_over=True)
            assert one.next_piece("r", "key") is None  # not under the old lease
        assert one.take_ended() == []
        for first in (0, 9):  # on their way till now
            assert one.progress(Progress("x", 7, 3, PROMPT, first, [[0]], False), 1.0) is None
        assert one.known(Known([("x", 7, 10)]), 1.0) == []
        assert one.next_piece("r", "key") is None
        assert one.take_to_tell() == []
        one.progress(Progress("x", 8, 4, PROMPT, 0, [list(range(200, 200 + PIECE_BLOCKS))], False), 2.0)
        one.progress(
            Progress("x", 8, 4, PROMPT, PIECE_BLOCKS, [list(range(300, 300 + PIECE_BLOCKS))], True), 2.0
        )
        found = {}
        for _ in pieces:
            piece = one.next_piece("r", "key")
            assert piece is not None
            assert piece.lease == 8
            found.update(zip(piece.here[0], piece.there[0], strict=True))
            one.read(piece, 1, "", 3.0)
        assert found == {10 + n: (200 + n if n < PIECE_BLOCKS else 300 + n - PIECE_BLOCKS) for n in range(32)}
        (ended,) = one.take_ended()
        assert (ended.good, ended.error) == (2 * PIECE_BLOCKS, "")

    @pytest.mark.parametrize("ends", ["gone", "silence", "drop"])
    def test_a_lease_that_is_over_for_good(self, ends: str) -> None:
        one = self.met()
        one.progress(Progress("x", 7, 3, PROMPT, 0, [[50, 51, 52, 53]], True), 0.0)
        piece = one.next_piece("r", "key")
        assert piece is not None
        one.read(piece, 0, "gone", 0.0, is_lease_over=True)
        if ends == "gone":
            one.gone(Gone("x", "expired"), 0.0)
        elif ends == "silence":
            one.tick(SILENCE_S + 0.1)
        else:
            one.drop("r", 0.0)
        assert [ended.good for ended in one.take_ended()] == [0]
        told = [message for _, message in one.take_to_tell()]
        assert [(done.lease, done.transfer) for done in told if isinstance(done, Done)] == [(0, "x")] * (
            ends != "gone"
        )

    def test_a_two_step_lease_that_is_over_has_no_successor(self) -> None:
        one = takes()
        hold(one, Hold("r", offer(3), PROMPT, 3))
        one.pull(pull(3), 0.0)
        piece = one.next_piece("r", "key")
        assert piece is not None
        one.read(piece, 0, "gone", 0.0, is_lease_over=True)
        assert [ended.error for ended in one.take_ended()] == ["gone"]

    @pytest.mark.parametrize(
        "lost",
        [
            Progress("x", 7, 3, PROMPT, 2, [[52]], False),  # which of one lease
            Progress("x", 8, 4, PROMPT, 1, [[61]], False),  # the first of another lease
            Progress("x", 8, 4, PROMPT, 2, [[62]], False),
        ],
    )
    def test_what_follows_a_lost_message_asks_for_it(self, lost: Progress) -> None:
        one = self.met()
        one.progress(Progress("x", 7, 3, PROMPT, 0, [[50]], False), 0.0)
        assert one.progress(lost, 0.0) is None
        assert one.take_to_tell() == [("key", Want("x", "D"))]
        piece = one.next_piece("r", "key")
        assert piece is not None
        assert (piece.lease, piece.there) == (7, ((50,),))  # and nothing of what was not understood
        one.read(piece, 1, "", 0.0)
        one.progress(Progress("x", 8, 4, PROMPT, 0, [[60, 61, 62, 63]], True), 0.0)
        piece = one.next_piece("r", "key")
        assert piece is not None
        assert (piece.lease, piece.there) == (8, ((61, 62, 63),))
        one.read(piece, 1, "", 0.0)
        assert [ended.good for ended in one.take_ended()] == [4]

    @pytest.mark.parametrize(
        "again",
        [
            Progress("x", 7, 3, PROMPT, 1, [[51]], False),
            Progress("x", 7, 3, PROMPT, 2, [[52], [52]], False),
        ],
    )
    def test_a_count_that_contradicts_what_was_said(self, again: Progress) -> None:
        one = self.met()
        one.progress(Progress("x", 7, 3, PROMPT, 0, [[50, 51]], False), 0.0)
        one.progress(again, 0.0)
        assert [ended.error for ended in one.take_ended()] == ["the prefill engine contradicts itself"]

    def test_two_requests_for_one_transfer(self) -> None:
        one = self.met()
        assert one.hold(Hold("s", Meeting("e", "http://b", "x"), PROMPT, 4), "key", 0.0) is None
        assert one.take_lost() == {"s"}
        one.gone(Gone("x", "aborted"), 0.0)
        assert [ended.error for ended in one.take_ended()] == ["aborted"]
        assert one.take_to_tell() == []  # it knows: it said so


MESSAGES = [
    Want("x", "127.0.0.1:1"),
    Want("x", "127.0.0.1:1", "127.0.0.1:2", 4),
    Heartbeat("127.0.0.1:1", [1, 2], ["x"]),
    Done(5, "", "why", "127.0.0.1:1"),
    Done(5, "", "why", "127.0.0.1:1", "127.0.0.1:2", 4),
    Progress("x", 1, 2, PROMPT, 3, [[4], [5]], True, "127.0.0.1:1"),
    Known([("x", 1, 2)]),
    Gone("x", "why"),
]


def test_messages_survive_the_wire() -> None:
    assert [wire.decode(wire.encode(message)) for message in MESSAGES] == MESSAGES


def test_an_engine_that_gives_no_reason_is_understood() -> None:
    assert wire.decode(msgspec.msgpack.encode([3, 5, "x"])) == Done(5, "x", "", "")


@pytest.mark.parametrize("_round", range(20))
def test_broken_messages(_round: int, rng: random.Random) -> None:
    for message in MESSAGES:
        text = bytearray(wire.encode(message))
        for _ in range(rng.randrange(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        with contextlib.suppress(wire.Malformed):
            wire.decode(bytes(text[: rng.randrange(len(text) + 1)]))


class TestSeveralReaders:
    """Of one decode engine, which has more tensor-parallel ranks than prefill."""

    def both(self, one: ProducerWorker) -> None:
        for reply in ("D0", "D1"):
            one.want(Want("x", reply, "D0", 2), 0.0)

    def test_each_hears_what_is_computed(self) -> None:
        one, _ = gives()
        one.begin(opened(), ())
        self.both(one)
        assert [reply for reply, _ in one.grown((Grown(1, 0, ((5,),), False),))] == ["D0", "D1"]
        assert [reply for reply, _ in one.want(Want("x", "D1", "D0", 2), 1.0)] == [
            "D1"
        ]  # once more, all of it
        gone = Gone("x", "another engine takes this transfer")
        assert one.want(Want("x", "E0", "E0", 2), 1.0) == [("E0", gone)]
        assert one.begin((), (End(1, "aborted"),)) == [
            ("D0", Gone("x", "aborted")),
            ("D1", Gone("x", "aborted")),
        ]

    @pytest.mark.parametrize("transfer", ["", "x"])
    def test_the_last_one_ends_the_lease(self, transfer: str) -> None:
        one, slots = gives()
        one.begin(opened(transfer=transfer), ())
        if transfer:
            self.both(one)
        for _ in range(2):  # a word that comes twice counts once
            one.done(Done(1, transfer, "", "D0", "D0", 2), 0.0)
        assert slots == {0: 1}
        assert one.take_heartbeats()[1] == {}
        one.done(Done(1, transfer, "", "D1", "D0", 2), 0.0)
        assert slots == {0: 0}
        assert one.take_heartbeats()[1] == {1: 1}

    def test_who_has_it_all_needs_no_other_lease(self) -> None:
        """Prefill is preempted when one reader is done; only the other one reads again."""
        one, slots = gives()
        one.begin(opened(), ())
        self.both(one)
        one.grown((Grown(1, 0, ((5,),), True),))
        one.done(Done(1, "x", "", "D0", "D0", 2), 0.0)
        assert one.begin(opened(2, 1), (End(1, "preempted"),)) == []
        assert [reply for reply, _ in one.grown((Grown(2, 0, ((6,),), True),))] == ["D1"]
        one.done(Done(2, "x", "", "D1", "D0", 2), 0.0)
        assert slots == {0: 0, 1: 0}

    def test_one_leaves_before_it_asked(self) -> None:
        one, slots = gives()
        one.done(Done(0, "x", LEFT, "D1", "D0", 2), 0.0)
        one.want(Want("x", "D0", "D0", 2), 0.0)
        one.begin(opened(), ())
        assert slots == {0: 1}
        assert [reply for reply, _ in one.grown((Grown(1, 0, ((5,),), True),))] == ["D0"]
        one.done(Done(1, "x", "", "D0", "D0", 2), 0.0)
        assert slots == {0: 0}

    def test_any_of_them_keeps_the_transfer(self) -> None:
        one, _ = gives()
        self.both(one)
        one.heartbeat(Heartbeat("D1", [], ["x"]), SILENCE_S)
        one.tick(SILENCE_S + 1)
        one.begin(opened(), ())
        assert [reply for reply, _ in one.grown((Grown(1, 0, ((5,),), True),))] == ["D0", "D1"]


class TestSeveralParts:
    """Of one request, from the workers of a prefill engine that has more tensor-parallel ranks."""

    SOURCES = (PartSource("k0", "P0", 1), PartSource("k1", "P1", 1))

    def pulled(self, source: Offer | Meeting, blocks: int = 4) -> ConsumerWorker:
        one = takes()
        hold(one, Hold("r", source, PROMPT, blocks, "D"), *self.SOURCES)
        one.pull(pull(blocks), 0.0)
        return one

    def read(self, one: ConsumerWorker, key: str, error: str = "") -> None:
        piece = one.next_piece("r", key)
        assert piece is not None
        assert piece.key == key
        one.read(piece, 10, error, 0.0)

    def test_a_pull_ends_with_the_last_part(self) -> None:
        one = self.pulled(offer(4))
        self.read(one, "k1")
        assert one.take_to_tell() == [("k1", Done(7, "", "", "D", "D", 1))]
        assert one.take_ended() == []
        assert one.tick(0.0) == [("k0", Heartbeat("D", [7], []))]
        self.read(one, "k0")
        (ended,) = one.take_ended()
        assert (ended.good, ended.bytes, ended.error) == (4, 20, "")

    def test_what_fails_in_one_part_ends_the_others(self) -> None:
        """The worker where it failed is told why, the others only that they are needed no more."""
        one = self.pulled(offer(PIECE_BLOCKS + 4), PIECE_BLOCKS + 4)
        self.read(one, "k0")
        piece = one.next_piece("r", "k0")
        assert piece is not None
        self.read(one, "k1", "broken")
        assert one.take_to_tell() == [("k1", Done(7, "", "broken", "D", "D", 1))]
        assert one.take_ended() == []  # its blocks are still written to
        assert one.next_piece("r", "k0") is None
        one.read(piece, 10, "", 0.0)
        assert one.take_to_tell()[-1] == ("k0", Done(7, "", "", "D", "D", 1))
        (ended,) = one.take_ended()
        assert (ended.good, ended.error) == (0, "broken")

    def test_the_least_of_all_parts_counts(self) -> None:
        one = self.pulled(offer(PIECE_BLOCKS + 4), PIECE_BLOCKS + 4)
        for key in ("k0", "k1"):
            self.read(one, key)
        self.read(one, "k1")
        one.fail_connection("k0", "dead", 0.0)
        (ended,) = one.take_ended()
        assert (ended.good, ended.error) == (PIECE_BLOCKS, "dead")

    @pytest.mark.parametrize(
        ("first", "second", "expected"),
        [((6, 4), (2, 0), (4, "")), ((6, 4), (2, 4), (0, GAPS)), ((6, 4), (0, 0), (0, GAPS))],
    )
    def test_all_bytes_of_each_group_have_to_come(
        self, first: tuple[int, int], second: tuple[int, int], expected: tuple[int, str]
    ) -> None:
        one = ConsumerWorker(reply="D", silence_s=SILENCE_S, group_bytes=(8, 4))
        hold(one, Hold("r", offer(4), PROMPT, 4, "D"), *self.SOURCES)
        one.pull(pull(4), 0.0)
        for key, group_bytes in (("k0", first), ("k1", second)):
            piece = one.next_piece("r", key)
            assert piece is not None
            one.read(piece, 10, "", 0.0, group_bytes=group_bytes)
        (ended,) = one.take_ended()
        assert (ended.good, ended.error) == expected

    def test_a_part_that_gives_less_of_a_later_piece(self) -> None:
        one = self.pulled(offer(PIECE_BLOCKS + 4), PIECE_BLOCKS + 4)
        for group_bytes in ((8, 4), (8, 2)):
            piece = one.next_piece("r", "k0")
            assert piece is not None
            one.read(piece, 10, "", 0.0, group_bytes=group_bytes)
        (ended,) = one.take_ended()
        assert (ended.good, ended.error) == (0, UNEVEN)

    def test_messages_are_of_one_worker(self) -> None:
        one = self.pulled(Meeting("e", "http://b", "x"))
        found = one.progress(Progress("x", 7, 3, PROMPT, 0, [[50, 51]], False, "P1"), 0.0)
        assert found is not None
        assert found[1].source.key == "k1"
        assert one.next_piece("r", "k0") is None
        self.read(one, "k1")
        again = Want("x", "D", "D", 1)
        assert one.known(Known([("x", 7, 2)], "P0"), 1.0) == [("k0", again)]
        assert one.known(Known([("x", 7, 2)], "P1"), 1.0) == []
        assert one.progress(Progress("x", 7, 3, PROMPT, 0, [[50]], False, "P9"), 0.0) is None
        one.gone(Gone("x", "aborted", "P0"), 0.0)
        assert [ended.error for ended in one.take_ended()] == ["aborted"]
        assert one.take_to_tell() == [("k1", Done(7, "x", "", "D", "D", 1))]  # the other one knows

    def test_one_silent_worker(self) -> None:
        one = self.pulled(Meeting("e", "http://b", "x"))
        one.known(Known([("x", 7, 0)], "P1"), SILENCE_S)
        assert one.tick(SILENCE_S + 0.1) == []
        assert "knew nothing of it" in one.take_ended()[0].error

    def test_words_without_a_name(self) -> None:
        """Of the release before: it cannot be told which worker sent them."""
        one = self.pulled(Meeting("e", "http://b", "x"))
        assert one.progress(Progress("x", 7, 3, PROMPT, 0, [[50]], False), 0.0) is None
        assert [ended.error for ended in one.take_ended()] == [OLDER]

    @pytest.mark.parametrize("ends", ["dropped", "lost"])
    def test_before_its_workers_are_known(self, ends: str) -> None:
        one = takes()
        incoming = one.hold(Hold("r", Meeting("e", "http://b", "x"), PROMPT, 4), "page", 0.0)
        assert incoming is not None
        assert one.tick(1.0) == []
        if ends == "dropped":
            one.drop("r", 0.0)
        else:
            one.fail_connection("page", "dead", 0.0)
        assert one.take_lost() == {"r"}
        assert not one.is_here(incoming)
        assert len(one) == 0

    def test_a_request_is_met_once(self) -> None:
        one = takes()
        incoming = one.hold(Hold("r", Meeting("e", "http://b", "x"), PROMPT, 4, "T"), "page", 0.0)
        assert incoming is not None
        assert one.meet(incoming, [PartSource("k0", "P0", 3)], 0.0) == [("k0", Want("x", "D", "T", 3))]


def test_messages_of_the_release_before() -> None:
    """Fields that it does not have stand last, with defaults; and it reads ours without those."""
    old = (
        (Want("x", "D"), [1, "x", "D"]),
        (Done(5, "x", "why", "D"), [3, 5, "x", "why", "D"]),
        (Progress("x", 1, 2, PROMPT, 3, [[4]], True), [4, "x", 1, 2, PROMPT, 3, [[4]], True]),
        (Known([("x", 1, 2)]), [5, [["x", 1, 2]]]),
        (Gone("x", "why"), [6, "x", "why"]),
    )
    for message, fields in old:
        assert wire.decode(msgspec.msgpack.encode(fields)) == message
        assert msgspec.msgpack.decode(wire.encode(message))[: len(fields)] == fields
