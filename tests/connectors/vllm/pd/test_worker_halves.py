"""The two halves beside the memory, message by message, without sockets or threads."""

from __future__ import annotations

import contextlib
import random

import msgspec
import pytest

from moonpool.connectors.vllm.pd import wire
from moonpool.connectors.vllm.pd.consumer_worker import PIECE_BLOCKS, ConsumerWorker
from moonpool.connectors.vllm.pd.kv_transfer_params import Meeting, Offer
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


def pull(blocks: int, first: int = 0, name: str = "r") -> Pull:
    return Pull(name, first, (tuple(range(10, 10 + blocks)),))


class TestTakes:
    def test_two_step_in_pieces(self) -> None:
        one, total = takes(), PIECE_BLOCKS + 3
        one.hold(Hold("r", offer(total), PROMPT, total), "key", 0.0)
        assert one.next_piece("r") is None  # there is no room yet
        one.pull(pull(total - 1, first=1), 1.0)
        for expected in (PIECE_BLOCKS, 2):
            piece = one.next_piece("r")
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
            one.hold(Hold(name, offer(3), PROMPT, 3), "key", 0.0)
        one.hold(Hold("other", offer(3, lease=8), PROMPT, 3), "key", 0.0)
        if first == "dropped":
            one.drop("r", 0.0)
        else:
            one.pull(pull(3), 0.0)
            piece = one.next_piece("r")
            assert piece is not None
            one.read(piece, 1, "broken" if first == "lost" else "", 0.0)
        assert one.take_to_tell() == []
        one.pull(pull(3, name="s"), 1.0)
        piece = one.next_piece("s")
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
            one.hold(Hold("r", offer(3), PROMPT, 3), "key", 0.0)
        if pulled:
            one.pull(wanted, 0.0)
        one.fail_pull(wanted, "broken", 0.0)
        (ended,) = one.take_ended()
        assert ended.pull is wanted
        assert ended.good == 0
        assert len(one) == 0

    def test_an_interrupted_pull_does_not_end_while_it_is_read(self) -> None:
        one, wanted = takes(), pull(3)
        one.hold(Hold("r", offer(3), PROMPT, 3), "key", 0.0)
        one.pull(wanted, 0.0)
        piece = one.next_piece("r")
        assert piece is not None
        one.fail_pull(wanted, "broken", 0.0)
        assert one.take_ended() == []
        one.read(piece, 1, "", 1.0)
        assert len(one.take_ended()) == 1

    def test_what_failed_is_reported_once_with_what_is_good(self) -> None:
        one, total = takes(), PIECE_BLOCKS + 3
        one.hold(Hold("r", offer(total), PROMPT, total), "key", 0.0)
        one.pull(pull(total), 0.0)
        first, second = one.next_piece("r"), None
        assert first is not None
        one.read(first, 1, "", 0.0)
        second = one.next_piece("r")
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
        one.hold(Hold("r", offer(total), PROMPT, total), "key", 0.0)
        one.pull(pull(total), 0.0)
        pieces = [one.next_piece("r") for _ in range(4)]
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
        one.hold(Hold("r", offer(1), PROMPT, 1), "key", 0.0)
        one.fail_connection("key", "dead", 0.0)
        assert one.take_lost() == {"r"}
        assert one.pull(pull(1), 0.0) is None  # it was planned before that was known
        (ended,) = one.take_ended()
        assert ended.good == 0

    def test_dropped_in_every_stage(self) -> None:
        one = takes()
        one.drop("r", 0.0)
        one.hold(Hold("r", offer(2), PROMPT, 2), "key", 0.0)
        one.drop("r", 0.0)
        assert one.take_to_tell() == [("key", Done(7, "", "", "D"))]
        one.hold(Hold("r", offer(2), PROMPT, 2), "key", 0.0)
        one.pull(pull(2), 0.0)
        piece = one.next_piece("r")
        assert piece is not None
        one.drop("r", 0.0)
        assert one.take_ended() == []
        one.read(piece, 1, "", 0.0)
        assert len(one.take_ended()) == 1

    def met(self, blocks: int = 4) -> ConsumerWorker:
        one = takes()
        one.hold(Hold("r", Meeting("e", "http://b", "x"), PROMPT, blocks), "key", 0.0)
        one.pull(pull(blocks), 0.0)
        return one

    def test_chunks(self) -> None:
        one = self.met()
        assert one.progress(Progress("x", 7, 3, PROMPT, 0, [[50]], False), 0.0) is not None
        piece = one.next_piece("r")
        assert piece is not None
        assert one.progress(Progress("x", 7, 3, PROMPT, 1, [[51, 52, 53]], True), 0.0) is not None
        one.read(piece, 1, "", 0.0)
        piece = one.next_piece("r")
        assert piece is not None
        assert (piece.there, piece.here) == (((51, 52, 53),), ((11, 12, 13),))
        one.read(piece, 1, "", 0.0)
        assert [ended.good for ended in one.take_ended()] == [4]

    def test_a_new_lease_in_the_middle_of_a_read(self) -> None:
        one = self.met()
        one.progress(Progress("x", 7, 3, PROMPT, 0, [[50, 51]], False), 0.0)
        piece = one.next_piece("r")
        assert piece is not None
        one.progress(Progress("x", 8, 4, PROMPT, 0, [[60, 61, 62, 63]], True), 0.0)
        one.read(piece, 0, "the lease is over", 0.0)
        for expected in ((60, 61), (62, 63)):
            piece = one.next_piece("r")
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
        pieces = [one.next_piece("r"), one.next_piece("r")]
        for piece in pieces:
            assert piece is not None
            one.read(piece, 0, "gone", 1.0, is_lease_over=True)
            assert one.next_piece("r") is None  # not under the old lease
        assert one.take_ended() == []
        for first in (0, 9):  # on their way till now
            assert one.progress(Progress("x", 7, 3, PROMPT, first, [[0]], False), 1.0) is None
        assert one.known(Known([("x", 7, 10)]), 1.0) == []
        assert one.next_piece("r") is None
        assert one.take_to_tell() == []
        one.progress(Progress("x", 8, 4, PROMPT, 0, [list(range(200, 200 + PIECE_BLOCKS))], False), 2.0)
        one.progress(
            Progress("x", 8, 4, PROMPT, PIECE_BLOCKS, [list(range(300, 300 + PIECE_BLOCKS))], True), 2.0
        )
        found = {}
        for _ in pieces:
            piece = one.next_piece("r")
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
        piece = one.next_piece("r")
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
        one.hold(Hold("r", offer(3), PROMPT, 3), "key", 0.0)
        one.pull(pull(3), 0.0)
        piece = one.next_piece("r")
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
        piece = one.next_piece("r")
        assert piece is not None
        assert (piece.lease, piece.there) == (7, ((50,),))  # and nothing of what was not understood
        one.read(piece, 1, "", 0.0)
        one.progress(Progress("x", 8, 4, PROMPT, 0, [[60, 61, 62, 63]], True), 0.0)
        piece = one.next_piece("r")
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
    Heartbeat("127.0.0.1:1", [1, 2], ["x"]),
    Done(5, "", "why", "127.0.0.1:1"),
    Progress("x", 1, 2, PROMPT, 3, [[4], [5]], True),
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
