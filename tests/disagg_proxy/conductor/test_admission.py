"""Who is taken, by what is predicted for it."""

from __future__ import annotations

import math
import random

import pytest

from moonpool.disagg_proxy.conductor.admission import Admission, Lookahead, Objective
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.inflight import InflightTracker
from moonpool.disagg_proxy.conductor.worker import Role, Worker
from moonpool.disagg_proxy.data_plane.observations import Observation, Outcome, Stage
from tests.disagg_proxy.conductor.confirmed import confirm

PREFILLED = Observation(
    0,
    1,
    0,
    2,
    0.0,
    0.0,
    0.0,
    0.0,
    0.0,
    0.0,
    -1,
    -1,
    -1,
    -1,
    200,
    0,
    1,
    1,
    1,
    Stage.PREFILLED,
    0,
    b"",
    b"",
    b"",
)


def pair(room_tokens: int = 0) -> tuple[Worker, Worker]:
    """A prefill worker that is known to take as long as is assumed at first, and one that decodes."""
    prefill = Worker(0, "p", Role.PREFILL)
    confirm(prefill)
    return prefill, Worker(1, "d", Role.DECODE, room_tokens=room_tokens)


def choice(prefill: Worker, decode: Worker, prefill_s: float) -> Choice:
    return Choice(decode, prefill, prefill_s)


def test_everybody_is_taken_who_is_in_time() -> None:
    prefill, decode = pair()
    admission = Admission(Objective(ttft_s=3.0))
    asked = Request(tokens=10_000)
    assert admission.predict(asked, choice(prefill, decode, 1.0), 0.0).refusal is None
    prefill.load.prefill_began(1, 10_000, 0, 0, 2.5, 0.0)
    refused = admission.predict(asked, choice(prefill, decode, 1.0), 0.0)
    assert refused.refusal is not None
    assert refused.refusal.reason == "ttft"
    assert 0.4 < refused.refusal.retry_after_s < 1.5
    own = Objective(ttft_s=9.0)
    assert admission.predict(asked, choice(prefill, decode, 1.0), 0.0, objective=own).refusal is None
    late = admission.predict(asked, choice(prefill, decode, 1.0), 2.0, objective=own, waited_s=8.0)
    assert late.refusal is not None


def test_what_has_not_been_learnt_yet_refuses_no_request() -> None:
    """A long prompt at engines of which nothing is known: the prediction is a guess."""
    admission, decode = Admission(Objective(ttft_s=1.0)), Worker(1, "d", Role.DECODE)
    worker, asked = Worker(0, "p", Role.PREFILL), Request(tokens=20_000)
    one = Choice(decode, worker)
    prediction = admission.predict(asked, one, 0.0)
    assert prediction.ttft_s > 2.0
    assert prediction.refusal is None
    confirm(worker)
    refusal = admission.predict(asked, one, 0.0).refusal
    assert refusal is not None
    assert refusal.reason == "ttft"
    # Of fetches from the pool nothing was learnt.
    fetched = asked._replace(pool=19_000)
    assert admission.predict(fetched, one, 0.0, waited_s=0.7).refusal is None
    # The queue is known, whatever is not known of the request itself.
    worker.load.prefill_began(1, 10_000, 0, 0, 100.0, 0.0)
    for each in (fetched, asked, Request(tokens=100)):
        assert admission.predict(each, one, 0.0).refusal is not None


def test_a_queue_is_not_late_where_no_engine_has_reported_anything() -> None:
    """Reports stop: an engine that has a prompt in work may have ended it long ago."""
    admission, decode = Admission(Objective(ttft_s=1.0)), Worker(2, "d", Role.DECODE)
    workers = [Worker(place, f"p{place}", Role.PREFILL) for place in range(2)]
    tracker = InflightTracker([*workers, decode], admission)
    for worker in workers:
        confirm(worker)
    for number in range(8):
        one = Choice(decode, workers[number % 2], 1.0)
        tracker.on_dispatch(number, one, Request(tokens=100), streams=True, now_s=0.0)
    assert [worker.load.wait_s(0.0) for worker in workers] == [4.0, 4.0]
    assert [worker.load.wait_s(10.0) for worker in workers] == [0.0, 0.0]
    assert admission.predict(Request(tokens=100), Choice(decode, workers[0], 0.1), 10.0).refusal is None
    left = PREFILLED._replace(request=0, stage=Stage.ENDED, outcome=Outcome.LEFT, last_byte_s=9.0)
    tracker.observe(left)  # a client is gone: the next prompt begins, and nothing is known of p1
    assert [worker.load.wait_s(10.0) for worker in workers] == [2.0, 0.0]
    tracker.observe(PREFILLED._replace(request=1, prefill_done_s=10.0))  # they come again: p0 is late indeed
    assert [worker.load.wait_s(10.0) for worker in workers] == [2.0, 3.0]
    assert admission.predict(Request(tokens=100), Choice(decode, workers[0], 0.1), 10.0).refusal is not None


def test_one_engine_alone_is_late_when_it_is() -> None:
    """No other could have reported anything."""
    tracker = InflightTracker([Worker(0, "e"), Worker(1, "idle")])
    (engine, _) = tracker.workers
    for number in range(4):
        tracker.on_dispatch(number, Choice(engine, None, 2.0), Request(tokens=100), streams=True, now_s=0.0)
    assert engine.load.wait_s(8.0) == 6.0


def test_prompts_that_are_computed_between_tokens_count() -> None:
    """A second of them for ten gaps of the last answers."""
    worker, admission = Worker(0, "w"), Admission(Objective(gap_s=0.05))
    assert admission.predict(Request(tokens=100), Choice(worker, None, 1.0), 0.0).refusal is None
    for number in range(0, 40, 2):
        worker.load.decode_began(number, 100, 10.0 * number)
        worker.load.prefill_began(number + 1, 100, 0, 0, 1.0, 10.0 * number + 1.0)
        worker.load.prefill_ended(number + 1, 10.0 * number + 2.0)
        worker.load.decode_ended(number, 11, 10.0 * number + 3.0)
    asked, one = Request(tokens=100), Choice(worker, None, 1.0)
    refused = admission.predict(asked, one, 383.0)
    assert refused.refusal is not None
    assert refused.refusal.reason == "gap"
    assert refused.gap_s == pytest.approx(0.11, rel=0.05)  # 10 ms of its own
    assert not admission.is_final(refused.refusal, asked, (worker,), admission.objective)  # it will pass


def test_an_engine_that_has_been_idle_takes_a_request_whatever_its_last_answer_was_like() -> None:
    """Three tokens, and a prompt of half a second between them: that says nothing of the next hour."""
    worker, admission = Worker(0, "w"), Admission(Objective(gap_s=0.1))
    worker.load.decode_began(1, 100, 0.0)
    worker.load.prefill_began(2, 100, 0, 0, 0.5, 0.1)
    worker.load.prefill_ended(2, 0.6)
    worker.load.decode_ended(1, 3, 1.0)
    asked, one = Request(tokens=100), Choice(worker, None, 0.1)
    assert admission.predict(asked, one, 1.0).refusal is not None
    for now_s in (60.0, 3_600.0):  # no load was asked for its queue since, as of decode engines none is
        assert admission.predict(asked, one, now_s).refusal is None


def test_the_sentence_tells_short_times_apart() -> None:
    prefill, decode = pair()
    admission = Admission(Objective(ttft_s=1e-4))
    for seconds, said in ((0.03, "after 0.04"), (1234.56, "after 1234.6 s, and")):
        refusal = admission.predict(Request(tokens=10), choice(prefill, decode, seconds), 0.0).refusal
        assert refusal is not None
        assert said in refusal.sentence


def test_decode_is_looked_at_when_the_prefill_will_have_ended() -> None:
    """Ten decode and will have ended then; or ten come, and will be there then."""
    for state, now_says, ahead_says in (("decode", "gap", None), ("come", None, "gap")):
        refusals = {}
        for look in (Lookahead.NOW, Lookahead.AHEAD, Lookahead.NEVER):
            prefill, decode = pair()
            admission = Admission(Objective(gap_s=0.013), look)  # 10 ms, and 0.3 ms for each request
            for _ in range(2_000):
                admission.answers.observe(5.0, 100)
                admission.leads.observe(0.01)
            for name in range(20):
                admission.taken(
                    name,
                    Request(tokens=100),
                    choice(prefill, decode, 18.0 if state == "come" else 0.0),
                    admission.predict(
                        Request(tokens=100), choice(prefill, decode, 18.0 if state == "come" else 0.0), 0.0
                    ),
                    0.0,
                )
                if state == "decode":
                    admission.began(name, 0.0)
            found = admission.predict(Request(tokens=100), choice(prefill, decode, 20.0), 0.5).refusal
            refusals[look] = None if found is None else found.reason
            admission.check_integrity()
        assert refusals == {Lookahead.NOW: now_says, Lookahead.AHEAD: ahead_says, Lookahead.NEVER: None}, (
            state
        )


def test_what_no_empty_instance_can_do_is_not_waited_for() -> None:
    prefill, decode = pair()
    quicker = Worker(2, "q", Role.DECODE)
    for _ in range(200):
        quicker.decode_model.observe(1, 100, 0.004)
    admission = Admission(Objective())
    asked, one = Request(tokens=100), choice(prefill, decode, 1.0)
    for gap_s, alone, both in ((0.005, True, False), (0.001, True, True), (0.0104, False, False)):
        wanted = Objective(gap_s=gap_s)
        refusal = admission.predict(asked, one, 0.0, objective=wanted).refusal
        if gap_s < 0.01:
            assert refusal is not None
        assert admission.is_final(refusal, asked, (prefill, decode), wanted) is alone
        assert admission.is_final(refusal, asked, (prefill, decode, quicker), wanted) is both
    wanted = Objective(ttft_s=0.1)
    refusal = admission.predict(asked, one, 0.0, objective=wanted).refusal
    assert admission.is_final(refusal, asked, (prefill, decode), wanted)
    assert not admission.is_final(None, asked, (prefill, decode), wanted)
    admission.gap_margin.factor = 3.0  # it may shrink again
    wanted = Objective(gap_s=0.02)
    refusal = admission.predict(asked, one, 0.0, objective=wanted).refusal
    assert refusal is not None
    assert not admission.is_final(refusal, asked, (prefill, decode), wanted)


def test_no_room_at_decode_is_a_wait() -> None:
    prefill, decode = pair(room_tokens=20_000)
    admission = Admission(Objective(ttft_s=5.0))
    one = choice(prefill, decode, 1.0)
    for name in range(2):
        prediction = admission.predict(Request(tokens=9_000), one, 0.0)
        assert prediction.refusal is None
        admission.taken(name, Request(tokens=9_000), one, prediction, 0.0)
    third = admission.predict(Request(tokens=9_000), one, 0.0)
    assert third.ttft_s > 3.0
    admission.over(0, 1.0)
    assert admission.predict(Request(tokens=9_000), one, 1.0).ttft_s < 1.5


def test_after_prefill_the_decode_instance_has_a_word() -> None:
    prefill, decode = pair()
    admission = Admission(Objective(gap_s=0.012), Lookahead.AFTER)
    one = choice(prefill, decode, 1.0)
    asked = Request(tokens=100)
    refused = 0
    for name in range(20):
        prediction = admission.predict(asked, one, 0.0)
        assert prediction.refusal is None
        admission.taken(name, asked, one, prediction, 0.0)
        if admission.after_prefill(name, asked, one, 1.0) is not None:
            admission.over(name, 1.0)
            refused += 1
        else:
            admission.began(name, 1.0)
    assert 10 <= refused <= 16
    assert admission.after_prefill(99, asked, one, 1.0) is None
    admission.check_integrity()


def test_what_was_promised_too_much_is_promised_no_more() -> None:
    """Engines that take twice as long as predicted: in the end nine of ten are in time."""
    prefill, decode = pair()
    admission, chance, now_s = Admission(Objective(ttft_s=10.0)), random.Random(11), 0.0
    late = taken = 0
    for name in range(8_000):
        now_s += 1.0
        predicted_s = chance.uniform(1.0, 12.0)
        one = choice(prefill, decode, predicted_s)
        prediction = admission.predict(Request(tokens=1_000), one, now_s)
        if prediction.refusal is not None:
            continue
        took_s = predicted_s * chance.uniform(1.5, 2.5)
        admission.taken(name, Request(tokens=1_000), one, prediction, now_s)
        admission.began(name, now_s + took_s)
        admission.over(name, now_s + took_s + 1.0)
        if name > 4_000:
            taken, late = taken + 1, late + (took_s > 10.0)
    assert taken > 500
    assert late / taken < 0.05
    assert 2.0 < admission.ttft_margin.factor < 2.6


def test_an_instance_that_is_gone_and_clocks_that_jump_leave_nothing_behind() -> None:
    chance = random.Random(13)
    decodes = [Worker(place, f"d{place}", Role.DECODE) for place in range(1, 4)]
    prefill = Worker(0, "p", Role.PREFILL)
    admission = Admission(Objective(30.0, 0.1))
    now_s = 0.0
    for _ in range(10_000):
        now_s += chance.choice((0.1, 0.1, 0.1, -0.3, 0.0, 50.0, -1e6 if chance.random() < 0.001 else 0.2))
        name, act = chance.randrange(40), chance.randrange(5)
        if act < 2:
            one = choice(prefill, chance.choice(decodes), chance.uniform(0, 20))
            asked = Request(tokens=chance.randrange(100_000))
            admission.taken(name, asked, one, admission.predict(asked, one, now_s), now_s)
        elif act == 2:
            admission.began(name, now_s)
        elif act == 3:
            odd = chance.choice((math.nan, -1.0, math.inf, 0.05))
            admission.over(name, now_s, gap_s=odd, answer_s=odd, tokens=chance.randrange(-1, 5))
        elif chance.random() < 0.05:
            admission.forget(chance.choice(decodes))
        admission.check_integrity()
    for name in range(40):
        admission.over(name, now_s)
    admission.check_integrity()
    assert len(admission) == 0


@pytest.mark.parametrize("look", list(Lookahead))
def test_without_an_objective_nobody_is_refused(look: Lookahead) -> None:
    prefill, decode = pair()
    prefill.load.prefill_began(1, 1, 0, 0, 1e9, 0.0)
    found = Admission(Objective(), look).predict(Request(tokens=1 << 20), choice(prefill, decode, 1e9), 0.0)
    assert found.refusal is None
