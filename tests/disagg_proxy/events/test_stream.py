from __future__ import annotations

import random

import pytest

from moonpool.disagg_proxy.events.stream import ByteBudget, Stream


class Recorder:
    """What the stream did: batches that count now, and where it asked."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.asked: list[int] = []
        self.forgets = 0

    def take(self, payload: bytes) -> None:
        self.batches.append(payload)

    def forget(self) -> None:
        self.batches.clear()
        self.forgets += 1

    def ask(self, start: int) -> None:
        self.asked.append(start)


def batch(number: int, life: int = 0) -> bytes:
    return b"%d/%d" % (life, number)


def make(*, can_replay: bool = True, pending_max: int = 100) -> tuple[Stream, Recorder]:
    recorder = Recorder()
    return Stream(recorder, can_replay=can_replay, pending_max=pending_max), recorder


def feed(stream: Stream, *numbers: int, life: int = 0) -> None:
    for number in numbers:
        stream.message(number, batch(number, life))


def answer(stream: Stream, *numbers: int, life: int = 0, end: bool = True) -> None:
    for number in numbers:
        stream.replayed(number, batch(number, life))
    if end:
        stream.replay_ended()


def test_in_order() -> None:
    stream, recorder = make()
    feed(stream, 0, 1, 2)
    assert recorder.batches == [batch(n) for n in (0, 1, 2)]
    assert recorder.asked == []


def test_a_new_connection_reads_what_was_before_and_what_comes_meanwhile_waits() -> None:
    stream, recorder = make()
    stream.connected()
    assert recorder.asked == [0]
    feed(stream, 2, 3)
    assert recorder.batches == []
    answer(stream, 0, 1, 2)
    assert recorder.batches == [batch(n) for n in range(4)]
    assert recorder.forgets == 0


def test_a_gap_is_closed_from_the_last_one_on() -> None:
    stream, recorder = make()
    feed(stream, 0, 1, 4, 5)
    assert recorder.asked == [1]
    answer(stream, 1, 2, 3, 4)
    assert recorder.batches == [batch(n) for n in range(6)]
    assert recorder.forgets == 0
    assert stream.counts.gaps == 1


def test_beyond_the_buffer_all_is_forgotten_and_it_goes_on() -> None:
    stream, recorder = make()
    feed(stream, 0, 1, 9)
    answer(stream, 7, 8, 9)
    assert recorder.batches == [batch(n) for n in (7, 8, 9)]
    assert recorder.forgets == 1
    assert stream.counts.lost == 1


def test_without_a_replay_a_gap_forgets() -> None:
    stream, recorder = make(can_replay=False)
    feed(stream, 0, 1, 3, 4)
    assert recorder.batches == [batch(3), batch(4)]
    assert recorder.forgets == 1


def test_a_replay_that_is_silent_is_given_up() -> None:
    stream, recorder = make()
    feed(stream, 0, 3, 4)
    stream.replay_ended(complete=False)
    assert recorder.batches == [batch(3), batch(4)]
    assert recorder.forgets == 1
    feed(stream, 5)
    assert recorder.batches[-1] == batch(5)
    assert len(recorder.asked) == 1


def test_repeats_are_dropped() -> None:
    stream, recorder = make()
    feed(stream, 0, 1, 1, 0, 2)
    assert recorder.batches == [batch(n) for n in range(3)]
    assert stream.counts.repeats == 2


@pytest.mark.parametrize("numbers", [(0,), (0, 1), (0, 1, 2, 3)])
def test_a_restart_is_seen_by_its_numbers(numbers: tuple[int, ...]) -> None:
    stream, recorder = make()
    feed(stream, 0, 1, 2)
    feed(stream, *numbers, life=1)
    assert recorder.batches == [batch(n, 1) for n in numbers]
    assert recorder.forgets == 1
    assert stream.counts.restarts == 1


def test_a_restart_whose_first_messages_were_missed() -> None:
    stream, recorder = make()
    feed(stream, 0, 1, 2, 3)
    feed(stream, 2, life=1)
    assert recorder.asked == [0]
    answer(stream, 0, 1, 2, life=1)
    assert recorder.batches == [batch(n, 1) for n in (0, 1, 2)]


@pytest.mark.parametrize("younger", [1, 3, 4, 9])
def test_a_restart_behind_a_new_connection(younger: int) -> None:
    """The new life may have said less or more than the old one; its numbers alone do not tell."""
    stream, recorder = make()
    feed(stream, 0, 1, 2)
    stream.connected()
    assert recorder.asked == [2]
    answer(stream, *range(2, younger)[:1], life=1, end=younger <= 2)  # the rest is not wanted any more
    assert recorder.asked == [2, 0]
    answer(stream, *range(younger), life=1)
    assert recorder.batches == [batch(n, 1) for n in range(younger)]


def test_a_new_connection_to_the_same_life_forgets_nothing() -> None:
    stream, recorder = make()
    feed(stream, 0, 1)
    stream.connected()
    answer(stream, 1, 2)
    assert recorder.batches == [batch(n) for n in range(3)]
    assert recorder.forgets == 0


def test_an_inventory_comes_in_pieces_of_one_number() -> None:
    stream, recorder = make()
    stream.connected()
    for piece in (b"a", b"b"):
        stream.replayed(6, piece)
    answer(stream, 7)
    assert recorder.batches == [b"a", b"b", batch(7)]


def test_more_than_can_wait_is_a_gap_afterwards() -> None:
    stream, recorder = make(pending_max=2)
    stream.connected()
    feed(stream, 1, 2, 3)
    assert stream.counts.overflows == 1
    answer(stream, 0)
    feed(stream, 4)
    assert recorder.asked == [0, 2]
    answer(stream, 2, 3, 4)
    assert recorder.batches == [batch(n) for n in range(5)]


def test_what_waits_during_replays_shares_its_bytes() -> None:
    room, size = ByteBudget(4 * len(batch(0))), len(batch(0))
    first, second = Recorder(), Recorder()
    streams = [Stream(each, can_replay=True, room=room) for each in (first, second)]
    for stream in streams:
        stream.connected()
        feed(stream, 1, 2, 3)
    assert (streams[0].counts.overflows, streams[1].counts.overflows) == (0, 2)
    assert room.taken == 4 * size
    answer(streams[0], 0)
    assert room.taken == size
    assert first.batches == [batch(n) for n in range(4)]
    answer(streams[1], 0)
    feed(streams[1], 4)  # what was dropped is asked for
    assert second.asked == [0, 1]
    answer(streams[1], 1, 2, 3, 4)
    assert second.batches == [batch(n) for n in range(5)]
    assert room.taken == 0
    for end in (streams[0].connected, streams[0].gone):
        streams[0].connected()
        feed(streams[0], 9)
        assert room.taken == size
        end()
        assert room.taken == 0


def test_whoever_was_given_up_begins_anew() -> None:
    stream, recorder = make()
    feed(stream, 0, 1)
    stream.gone()
    assert recorder.batches == []
    stream.connected()
    assert recorder.asked == [0]


def test_a_replay_with_a_hole_does_not_ask_for_ever() -> None:
    stream, recorder = make()
    feed(stream, 0, 9)
    answer(stream, 0, 5, 3)
    assert recorder.batches == [batch(9)]
    assert len(recorder.asked) == 1


def test_random_lives_losses_and_lies(rng: random.Random) -> None:
    """Whatever happens on the way, what counts is always one life from some message on without a hole, and
    after a last connection it is all that the publisher has."""
    for _ in range(300):
        stream, recorder = make(pending_max=5)
        life = said = 0
        buffer = 4
        answered = 0
        for _ in range(60):
            what = rng.randrange(12)
            if what == 0:
                life, said = life + 1, rng.randrange(3)
                stream.connected()
            elif what == 1:
                stream.connected()
            elif what == 2 and said:
                feed(stream, rng.randrange(said), life=life)  # repeats
            elif what == 3:
                stream.replay_ended(complete=False)
            else:
                if rng.random() < 0.8:
                    feed(stream, said, life=life)
                said += 1
            while answered < len(recorder.asked) and rng.random() < 0.6:
                answered = len(recorder.asked)
                answer(stream, *range(max(recorder.asked[-1], said - buffer), said), life=life)
            lives = {text.split(b"/")[0] for text in recorder.batches}
            numbers = [int(text.split(b"/")[1]) for text in recorder.batches]
            assert len(lives) <= 1
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        stream.gone()
        stream.connected()
        answer(stream, *range(max(0, said - buffer), said), life=life)
        assert recorder.batches == [batch(n, life) for n in range(max(0, said - buffer), said)]
