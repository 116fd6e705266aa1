"""What the proxy sent to an engine, counted in seconds."""

from __future__ import annotations

import math
import random

import pytest

from moonpool._native import LastReport, WorkerLoad
from tests.disagg_proxy.conductor import plain_worker_load


def test_a_line_is_as_long_as_its_prefills_less_what_the_first_has_had() -> None:
    load = WorkerLoad()
    assert load.wait_s(0.0) == 0.0
    load.prefill_began(1, 100, 0, 0, 2.0, now_s=10.0)
    load.prefill_began(2, 100, 0, 0, 3.0, now_s=10.5)
    assert load.wait_s(10.5) == pytest.approx(4.5)
    assert load.wait_s(11.0) == pytest.approx(4.0)
    assert load.wait_s(99.0) == pytest.approx(
        3.0
    )  # the head takes longer than predicted: the rest still waits
    done = load.prefill_ended(1, 13.0)
    assert done is not None
    assert done.seconds == pytest.approx(3.0)
    assert load.wait_s(13.0) == pytest.approx(3.0)
    assert load.wait_s(14.0) == pytest.approx(2.0)


def test_the_time_of_a_prefill_begins_when_the_one_before_ended() -> None:
    load = WorkerLoad()
    load.prefill_began(1, 100, 0, 0, 1.0, now_s=0.0)
    load.prefill_began(2, 200, 50, 0, 1.0, now_s=0.1)
    load.prefill_ended(1, 4.0)
    done = load.prefill_ended(2, 5.0)
    assert done is not None
    assert (done.tokens, done.own, done.seconds) == (200, 50, pytest.approx(1.0))


def test_a_line_goes_on_as_predicted_since_the_time_that_reports_are_late() -> None:
    load = WorkerLoad()
    for _ in range(200):
        load.reported(2.0)
    assert load.lag_s == pytest.approx(2.0)
    for number in range(4):
        load.prefill_began(number, 100, 0, 0, 1.0, now_s=0.0)
    assert load.wait_s(1.5) == pytest.approx(2.5)  # the end of the first cannot be known yet
    assert load.wait_s(3.0) == pytest.approx(1.0)
    assert load.wait_s(4.0) == pytest.approx(1.0)  # that of the first should be known: it takes longer
    assert load.wait_s(99.0) == pytest.approx(1.0)  # its end may have come since: the rest, less two seconds


def test_a_prefill_that_was_sent_to_an_idle_engine_begins_then_however_late_reports_are() -> None:
    load = WorkerLoad()
    load.prefill_began(1, 100, 0, 0, 1.0, now_s=0.0)
    load.prefill_began(2, 100, 0, 0, 1.0, now_s=0.2)
    load.prefill_began(3, 100, 0, 0, 1.0, now_s=5.0)
    load.prefill_ended(1, 1.0)
    for _ in range(200):
        load.reported(4.0)
    assert load.wait_s(5.0) == pytest.approx(1.0)  # of the third alone: the second should be over
    second, third = load.prefill_ended(2, 2.0), load.prefill_ended(3, 6.5)
    assert second is not None
    assert third is not None
    assert (second.seconds, third.seconds) == (pytest.approx(1.0), pytest.approx(1.5))


def test_one_that_overtakes_or_leaves_teaches_nothing() -> None:
    load = WorkerLoad()
    load.prefill_began(1, 100, 0, 0, 1.0, now_s=0.0)
    load.prefill_began(2, 100, 0, 0, 1.0, now_s=0.0)
    assert load.prefill_ended(2, 0.5) is None
    assert load.prefill_ended(1, 0.6, done=False) is None
    assert load.wait_s(0.6) == 0.0


def test_reports_that_come_twice_late_or_never_change_nothing() -> None:
    load = WorkerLoad()
    load.prefill_began(1, 100, 0, 0, 1.0, now_s=0.0)
    load.prefill_began(1, 100, 0, 0, 1.0, now_s=0.0)
    assert load.prefills == 1
    assert load.prefill_ended(7, 1.0) is None
    assert load.decode_ended(7, 10, 1.0) is None
    load.prefill_ended(1, 1.0)
    assert load.prefill_ended(1, 1.0) is None
    load.decode_began(1, 100, 1.0)
    load.decode_began(1, 100, 1.0)
    assert load.context_tokens == 100
    load.check_integrity()
    load.forget_all()
    assert (load.prefills, load.decodes, load.context_tokens) == (0, 0, 0)


def test_batch_and_context_are_averages_over_the_time_of_a_request() -> None:
    load = WorkerLoad()
    load.decode_began(1, 1_000, now_s=0.0)
    load.decode_began(2, 3_000, now_s=5.0)
    ended = load.decode_ended(1, tokens=101, now_s=10.0)
    assert ended is not None
    assert ended.gap_s == pytest.approx(0.1)
    assert ended.batch == pytest.approx(1.5)
    assert ended.context_tokens == pytest.approx(2_500)
    assert load.context_tokens == 3_000


def test_a_prefill_knows_what_decoded_meanwhile() -> None:
    load = WorkerLoad()
    load.decode_began(1, 1_000, now_s=0.0)
    load.prefill_began(2, 100, 0, 0, 1.0, now_s=2.0)
    load.prefill_began(3, 100, 0, 0, 1.0, now_s=2.0)
    load.decode_began(4, 3_000, now_s=3.0)
    first = load.prefill_ended(2, 6.0)
    load.decode_ended(1, 0, now_s=7.0)
    second = load.prefill_ended(3, 8.0)
    load.prefill_began(5, 100, 0, 0, 1.0, now_s=10.0)  # the engine idled in between
    load.decode_ended(4, 0, now_s=11.0)
    third = load.prefill_ended(5, 12.0)
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.batch, first.context_tokens) == (pytest.approx(1.75), pytest.approx(3_250))
    assert (second.batch, second.context_tokens) == (pytest.approx(1.5), pytest.approx(3_500))
    assert (third.batch, third.context_tokens) == (pytest.approx(0.5), pytest.approx(1_500))


def test_a_request_knows_how_long_prompts_kept_it_waiting() -> None:
    load = WorkerLoad()
    load.prefill_began(1, 100, 0, 0, 1.0, now_s=0.0)
    load.prefill_ended(1, 2.0)
    load.decode_began(1, 100, now_s=2.0)  # its own prompt did not
    assert load.stall_s(2.0) == 0.0
    load.prefill_began(2, 100, 0, 0, 1.0, now_s=3.0)
    load.prefill_began(3, 100, 0, 0, 1.0, now_s=3.0)
    load.prefill_ended(2, 5.0)
    ended = load.decode_ended(1, tokens=11, now_s=6.0)  # in the middle of the third
    assert ended is not None
    assert (ended.gap_s, ended.stall_s) == (pytest.approx(0.4), pytest.approx(0.3))
    assert load.stall_s(6.0) == pytest.approx(0.3)  # as a later one should expect
    load.prefill_ended(3, 7.0)
    load.decode_began(3, 100, now_s=7.0)
    load.decode_ended(3, tokens=101, now_s=9.0)
    assert 0.01 < load.stall_s(9.0) < 0.03  # by gaps, not by requests


def test_prompts_that_end_out_of_order_or_never_kept_it_waiting_as_long() -> None:
    for ends in (
        ((2, True), (3, True)),
        ((3, True), (2, True)),
        ((2, False), (3, True)),
        ((3, True), (2, False)),
    ):
        load = WorkerLoad()
        load.decode_began(1, 100, now_s=2.0)
        load.prefill_began(2, 100, 0, 0, 1.0, now_s=3.0)
        load.prefill_began(3, 100, 0, 0, 1.0, now_s=3.0)
        for at_s, (request, done) in zip((5.0, 6.0), ends, strict=True):
            load.prefill_ended(request, at_s, done=done)
        ended = load.decode_ended(1, tokens=11, now_s=7.0)
        assert ended is not None
        assert ended.stall_s == pytest.approx(0.3), ends
        load.prefill_began(4, 100, 0, 0, 1.0, now_s=10.0)
        assert load.prefill_ended(4, 9.5) is None  # a clock that went back takes nothing away
        load.decode_began(5, 100, now_s=11.0)
        ended = load.decode_ended(5, tokens=11, now_s=12.0)
        assert ended is not None
        assert ended.stall_s == 0.0


def answered(load: WorkerLoad, at_s: float, tokens: int, stalled_s: float) -> None:
    """A stream of three seconds, in which a prompt is computed for so long."""
    load.decode_began(1, 100, at_s)
    load.prefill_began(2, 100, 0, 0, stalled_s, at_s + 1.0)
    load.prefill_ended(2, at_s + 1.0 + stalled_s)
    load.decode_ended(1, tokens, at_s + 3.0)


def test_of_an_engine_that_has_nothing_to_do_no_stall_is_expected() -> None:
    load = WorkerLoad()
    for number in range(100):
        answered(load, 4.0 * number, 3, 0.5)
    assert load.stall_s(399.0) == pytest.approx(0.25)
    assert load.stall_s(398.0) == load.stall_s(399.0)  # reports may come out of order
    assert load.stall_s(409.0) == pytest.approx(0.25 / math.e)
    assert load.stall_s(4_000.0) == pytest.approx(0.0, abs=1e-9)
    assert load.stall_s(math.nan) == load.stall_s(399.0)
    load.forget_all()  # another one may come up in its place
    assert load.stall_s(399.0) == 0.0


def test_a_stall_that_was_forgotten_does_not_come_back_with_the_next_answer() -> None:
    load = WorkerLoad()
    for number in range(100):
        answered(load, 4.0 * number, 3, 0.5)
    answered(load, 4_000.0, 3, 0.0)
    assert load.stall_s(4_003.0) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("every_s", [0.1, 1.0, 30.0])
def test_how_often_answers_end_does_not_change_the_stall_that_is_observed(every_s: float) -> None:
    load = WorkerLoad()
    for number in range(200):
        load.decode_began(2 * number, 100, every_s * number)
        load.prefill_began(2 * number + 1, 100, 0, 0, 1.0, every_s * number)
        load.prefill_ended(2 * number + 1, every_s * (number + 0.5))
        load.decode_ended(2 * number, 11, every_s * (number + 1))
    assert load.stall_s(200 * every_s) == pytest.approx(0.05 * every_s)


READ = ("prefills", "prefill_tokens", "prefill_rest_tokens", "decodes", "requests", "context_tokens")


def values(ended: object, names: tuple[str, ...]) -> tuple[object, ...] | None:
    return None if ended is None else tuple(getattr(ended, name) for name in names)


def test_random_stories_are_told_as_by_plain_python(rng: random.Random) -> None:
    for _ in range(30):
        load, plain, now_s, last = WorkerLoad(), plain_worker_load.WorkerLoad(), 0.0, LastReport()
        other = WorkerLoad()
        if rng.random() < 0.5:
            load.follow_reports(last)
            other.follow_reports(last)
            other.prefill_began(0, 1, 0, 0, 1.0, 0.0)  # there are two with work
            plain.heard_s = -math.inf
        for _ in range(300):
            if rng.random() < 0.3 and plain.heard_s < math.inf:
                load.heard(now_s)
                plain.heard_s = max(plain.heard_s, now_s)
            now_s += rng.choice((0.0, rng.random(), -0.01))
            request = rng.randrange(-6, 6)
            if rng.random() < 0.1:
                age_s = rng.uniform(-0.5, 2.0)
                load.reported(age_s)
                plain.reported(age_s)
            match rng.randrange(40):
                case 0:
                    load.forget_all()
                    plain.forget_all()
                case each if each < 12:
                    tokens, own, pool = (rng.randrange(500) for _ in range(3))
                    began = (tokens, own, pool, rng.random(), now_s)
                    silent = rng.random() < 0.3
                    load.prefill_began(request, *began, silent=silent)
                    plain.prefill_began(request, *began, silent=silent)
                case each if each < 20:
                    done = rng.random() < 0.8
                    names = ("tokens", "own", "pool", "seconds", "predicted_s", "batch", "context_tokens")
                    assert values(load.prefill_ended(request, now_s, done=done), names) == pytest.approx(
                        values(plain.prefill_ended(request, now_s, done=done), names)
                    )
                case each if each < 30:
                    context = rng.randrange(1_000)
                    silent = rng.random() < 0.3
                    load.decode_began(request, context, now_s, silent=silent)
                    plain.decode_began(request, context, now_s, silent=silent)
                case _:
                    tokens = rng.randrange(5)
                    names = ("batch", "context_tokens", "gap_s", "stall_s")
                    assert values(load.decode_ended(request, tokens, now_s), names) == pytest.approx(
                        values(plain.decode_ended(request, tokens, now_s), names), abs=1e-9
                    )
                    for at_s in (now_s, now_s + 5.0):
                        assert load.stall_s(at_s) == pytest.approx(plain.stall_s(at_s), abs=1e-9)
            if rng.random() < 0.8:
                wait_s = plain.wait_s(now_s)
                assert wait_s >= 0
                assert load.wait_s(now_s) == pytest.approx(wait_s, abs=1e-9)  # sums in another order
            assert values(load, READ) == values(plain, READ)
            load.check_integrity()
            plain.check_integrity()
