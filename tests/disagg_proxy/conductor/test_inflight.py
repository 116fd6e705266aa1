"""WorkerLoad that follow what was observed: whatever is reported late, twice or never, they end empty."""

from __future__ import annotations

import random

import pytest

from moonpool.disagg_proxy.conductor.admission import Admission, Objective
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.inflight import FORGOTTEN_S, STREAMS_S, InflightTracker
from moonpool.disagg_proxy.conductor.observer import Finished, Observer
from moonpool.disagg_proxy.conductor.policies.conductor import Conductor
from moonpool.disagg_proxy.conductor.worker import Role, Worker
from moonpool.disagg_proxy.data_plane.observations import HandoverForm, Observation, Outcome, Stage
from moonpool.disagg_proxy.peers.inflight_feed import InflightFeed
from moonpool.disagg_proxy.peers.wire import Begun, Change, Prefilled

BLANK = Observation(
    0, 1, -1, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1, -1, -1, -1, 200, 0, 1, 0, 1, 0, 1, b"", b"", b""
)


def pair() -> tuple[InflightTracker, Worker, Worker]:
    workers = [Worker(0, "p", Role.PREFILL), Worker(1, "d", Role.DECODE)]
    return InflightTracker(workers), *workers  # type: ignore[return-value]


def test_a_stream_of_one_engine_teaches_prefill_and_gap() -> None:
    tracker = InflightTracker([Worker(0, "e")])
    engine = tracker.workers[0]
    before_s = engine.prefill_model.predict(4_000)
    for number in range(30):
        start_s = number * 10.0
        tracker.on_dispatch(number, Choice(engine), Request(tokens=4_000), streams=True, now_s=start_s)
        assert engine.load.wait_s(start_s) > 0
        seen = BLANK._replace(request=number, first_byte_s=start_s + 2.0)
        tracker.observe(seen._replace(stage=Stage.BEGUN))
        assert engine.load.wait_s(start_s + 2.0) == 0
        assert engine.load.decodes == 1
        tracker.observe(seen._replace(last_byte_s=start_s + 5.0, completion_tokens=31))
        tracker.check_integrity()
    assert before_s < 1.0
    assert engine.prefill_model.predict(4_000) == pytest.approx(2.0, rel=0.1)
    assert engine.decode_model.predict(1, 4_000) == pytest.approx(0.1, rel=0.1)


def test_a_whole_engine_teaches_what_prompts_and_answers_cost_each_other() -> None:
    """A step computes 1,000 tokens of a prompt in a second; it takes 0.4 s more where an answer is under way,
    which gets a token then, and else every 0.4 s."""
    tracker = InflightTracker([Worker(0, "e")])
    engine = tracker.workers[0]

    def send(number: int, tokens: int, now_s: float, took_s: float) -> Observation:
        tracker.on_dispatch(number, Choice(engine), Request(tokens), streams=True, now_s=now_s)
        seen = BLANK._replace(request=number, first_byte_s=now_s + took_s)
        tracker.observe(seen._replace(stage=Stage.BEGUN))
        return seen

    for number in range(0, 120, 2):
        start_s, steps = number * 100.0, 1 + number // 2 % 4
        answer = send(number, 1_000, start_s, 1.0)
        prompt = send(number + 1, 1_000 * steps, start_s + 2.0, 1.4 * steps)
        tracker.observe(prompt._replace(last_byte_s=prompt.first_byte_s, completion_tokens=1))
        if number == 118:
            break
        done_s = answer.first_byte_s + 10 * 0.4 + steps
        tracker.observe(answer._replace(last_byte_s=done_s, completion_tokens=11))
        tracker.check_integrity()
    assert engine.decode_model.predict(1, 1_000) == pytest.approx(0.4, rel=0.1)
    assert engine.load.stall_s(done_s) == pytest.approx(4.2 / 10, rel=0.01)  # of the last answer
    assert engine.prefill_s(3_000) == pytest.approx(3 * 1.4, rel=0.1)
    assert engine.prefill_s(3_000, 1_000) == pytest.approx(2 * 1.4, rel=0.15)
    tracker.forget(0)
    assert engine.prefill_s(3_000) == pytest.approx(3.0, rel=0.1)  # no answer is under way


def test_no_more_samples_are_taken_than_teach_something() -> None:
    tracker = InflightTracker([Worker(0, "e")])
    engine = tracker.workers[0]
    for number in range(100):
        start_s = number * 0.001
        tracker.on_dispatch(number, Choice(engine), Request(tokens=100), streams=True, now_s=start_s)
        seen = BLANK._replace(request=number, first_byte_s=start_s + 0.0005)
        tracker.observe(seen._replace(stage=Stage.BEGUN))
        tracker.observe(seen._replace(last_byte_s=start_s + 0.0009, completion_tokens=2))
        tracker.check_integrity()
    assert 18 <= engine.prefill_model.regression.own.samples <= 22
    assert engine.decode_model.regression.own.samples == pytest.approx(20, abs=2)


def test_prefill_and_decode_apart_teach_each_its_own() -> None:
    tracker, prefill, decode = pair()
    for number in range(30):
        start_s = number * 10.0
        tracker.on_dispatch(
            number, Choice(decode, prefill), Request(tokens=4_000), streams=True, now_s=start_s
        )
        assert (prefill.in_flight, decode.in_flight) == (1, 0)
        seen = BLANK._replace(request=number, prefill=0, decode=1, prefill_done_s=start_s + 2.0)
        tracker.observe(seen._replace(stage=Stage.PREFILLED))
        seen = seen._replace(first_byte_s=start_s + 2.5, handed_over=1)
        tracker.observe(seen._replace(stage=Stage.BEGUN))
        assert (prefill.in_flight, decode.in_flight) == (0, 1)
        tracker.observe(seen._replace(last_byte_s=start_s + 5.0))
        tracker.check_integrity()
    assert prefill.prefill_model.predict(4_000) == pytest.approx(2.0, rel=0.1)
    assert decode.handover_model.predict(4_000) == pytest.approx(0.5, rel=0.1)
    assert decode.prefill_model.regression.own.samples == 0
    assert decode.prefill_model.predict(4_000) == pytest.approx(2.0, rel=0.1)  # no faster than who is known


def test_a_decode_engine_that_has_computed_nothing_is_not_thought_to_be_fast() -> None:
    """Whole answers never tell how long it computes: with the prior, a tenth of the truth here, it would take
    2.5 s of prompts between two tokens, and not 0.3."""
    tracker, prefill, decode = pair()
    for number in range(30):
        start_s, tokens = number * 10.0, 500 + 100 * number
        tracker.on_dispatch(number, Choice(decode, prefill), Request(tokens), streams=False, now_s=start_s)
        done_s = start_s + 0.001 * tokens
        seen = BLANK._replace(request=number, prefill=0, decode=1, prefill_done_s=done_s, stream=0)
        tracker.observe(seen._replace(stage=Stage.PREFILLED))
        tracker.observe(seen._replace(first_byte_s=done_s + 1.0, last_byte_s=done_s + 1.0, handed_over=1))
    prefill.load.prefill_began(30, 3_000, 0, 0, 3.0, 300.0)
    policy = Conductor()
    assert policy.choose(Request(2_500), (prefill, decode), 300.0).prefill is prefill
    assert policy.choose(Request(260), (prefill, decode), 300.0).prefill is None


def whole(
    tracker: InflightTracker,
    number: int,
    start_s: float,
    tokens: int,
    *,
    begins: bool = False,
    handed: HandoverForm = HandoverForm.TWO_STEP,
) -> None:
    """An answer that is no stream: 2 s of prefill, and 0.1 s for each token. begins: its first byte is told
    before its end."""
    prefill, decode = tracker.workers
    asked, choice = Request(tokens=4_000), Choice(decode, prefill)
    admission = tracker.admission
    prediction = None if admission is None else admission.predict(asked, choice, start_s)
    tracker.on_dispatch(number, choice, asked, streams=False, now_s=start_s, prediction=prediction)
    seen = BLANK._replace(request=number, stream=0, handed_over=handed, prefill_done_s=start_s + 2.0)
    tracker.observe(seen._replace(stage=Stage.PREFILLED))
    assert (prefill.in_flight, decode.in_flight, decode.pending_handover) == (0, 1, 0)
    last_s = start_s + 2.0 + tokens * 0.1
    seen = seen._replace(first_byte_s=last_s, last_byte_s=last_s, completion_tokens=tokens)
    if begins:
        tracker.observe(seen._replace(stage=Stage.BEGUN))
    tracker.observe(seen)
    assert decode.in_flight == 0
    tracker.check_integrity()


@pytest.mark.parametrize("begins", [False, True])
def test_an_answer_that_comes_whole_teaches_decode_where_its_prefill_was_heard_of(begins: bool) -> None:
    tracker, prefill, decode = pair()
    admission = tracker.admission = Admission(Objective(ttft_s=2.1, gap_s=0.2))  # 2 s are near it
    for number in range(50):
        whole(tracker, number, number * 20.0, 100, begins=begins)
    assert prefill.prefill_model.predict(4_000) == pytest.approx(2.0, rel=0.1)
    assert decode.decode_model.predict(1, 4_000) == pytest.approx(0.1, rel=0.1)
    assert decode.handover_model.regression.own.samples == 0
    assert admission.answers.times.learnt  # so capacity is known
    assert admission.answers.times.mean_s == pytest.approx(10.0, rel=0.1)
    assert admission.ttft_margin.factor == 1.0  # of first tokens nothing was heard


def test_the_hand_over_of_an_answer_that_comes_whole_is_in_none_of_its_gaps() -> None:
    tracker, _, decode = pair()
    decode.handover_model.regression.start((5.0, 0.0))
    for number in range(50):
        whole(tracker, number, number * 20.0, 100)
    assert decode.decode_model.predict(1, 4_000) == pytest.approx(0.05, rel=0.1)


def test_the_others_hear_that_an_answer_that_comes_whole_is_decoded_when_its_prompt_is_computed() -> None:
    tracker, prefill, decode = pair()
    tracker.on_dispatch(1, Choice(decode, prefill), Request(tokens=4_000), streams=False, now_s=0.0)
    said: list[Change] = []
    tracker.subscribe(InflightFeed(said.append))
    tracker.observe(BLANK._replace(request=1, stage=Stage.PREFILLED, stream=0, prefill_done_s=2.0))
    assert said == [Prefilled(1), Begun(1, True)]


@pytest.mark.parametrize(("tokens", "handed"), [(10, HandoverForm.TWO_STEP), (100, HandoverForm.NOT)])
def test_a_whole_answer_that_may_be_something_else_mostly_teaches_decode_nothing(
    tokens: int, handed: HandoverForm
) -> None:
    """Its hand-over; or its prompt, which the prefill engine said it had computed, and not where it lies."""
    tracker, _, decode = pair()
    tracker.admission = Admission(Objective(gap_s=0.2))
    for number in range(50):
        whole(tracker, number, number * 20.0, tokens, handed=handed)
    assert decode.decode_model.regression.own.samples == 0
    assert not tracker.admission.answers.times.learnt


@pytest.mark.parametrize("streams", [False, True])
def test_of_several_answers_to_one_request_no_gap_is_learnt(streams: bool) -> None:
    """Their tokens are told together: the gaps would be as many times too short."""
    tracker, prefill, decode = pair()
    admission = tracker.admission = Admission(Objective(gap_s=0.2))
    asked, choice = Request(tokens=4_000, one=False), Choice(decode, prefill)
    for number in range(50):
        start_s = number * 20.0
        prediction = admission.predict(asked, choice, start_s)
        tracker.on_dispatch(number, choice, asked, streams=streams, now_s=start_s, prediction=prediction)
        seen = BLANK._replace(
            request=number,
            stream=int(streams),
            handed_over=HandoverForm.TWO_STEP,
            prefill_done_s=start_s + 2.0,
        )
        tracker.observe(seen._replace(stage=Stage.PREFILLED))
        first_s = start_s + (2.1 if streams else 12.0)
        tracker.observe(seen._replace(first_byte_s=first_s, stage=Stage.BEGUN))
        tracker.observe(
            seen._replace(first_byte_s=first_s, last_byte_s=start_s + 12.0, completion_tokens=800)
        )
        tracker.check_integrity()
    assert prefill.prefill_model.regression.own.samples == 50
    assert decode.decode_model.regression.own.samples == 0
    assert admission.gap_margin.factor == 1.0
    assert admission.answers.tokens == Admission(Objective()).answers.tokens


@pytest.mark.parametrize(
    "form", [HandoverForm.CONCURRENT, HandoverForm.ONE_SHOT, HandoverForm.GENERATION_FIRST]
)
def test_a_first_token_that_overtakes_the_prefills_answer_leaves_the_prefill_in_work(
    form: HandoverForm,
) -> None:
    """Concurrently: decode had the prompt, or computed it."""
    tracker, prefill, decode = pair()
    tracker.on_dispatch(1, Choice(decode, prefill), Request(tokens=4_000), streams=True, now_s=0.0)
    seen = BLANK._replace(request=1, prefill=0, decode=1, first_byte_s=0.5, handed_over=form)
    tracker.observe(seen._replace(stage=Stage.BEGUN))
    assert (prefill.in_flight, decode.in_flight) == (1, 1)
    assert decode.handover_model.regression.own.samples == 0
    tracker.observe(seen._replace(stage=Stage.PREFILLED, prefill_done_s=2.0))
    assert (prefill.in_flight, decode.in_flight) == (0, 1)
    assert prefill.prefill_model.regression.own.samples == 1
    tracker.observe(seen._replace(prefill_done_s=2.0, last_byte_s=3.0))
    assert len(tracker) == decode.in_flight == 0
    tracker.check_integrity()


def test_an_answer_that_comes_whole_holds_the_line_as_long_as_predicted() -> None:
    tracker = InflightTracker([Worker(0, "e")])
    engine = tracker.workers[0]
    tracker.on_dispatch(1, Choice(engine, prefill_s=2.0), Request(tokens=100), streams=False, now_s=0.0)
    tracker.on_dispatch(2, Choice(engine, prefill_s=3.0), Request(tokens=100), streams=False, now_s=0.0)
    assert engine.load.wait_s(1.0) == pytest.approx(4.0)
    assert engine.load.wait_s(4.0) == pytest.approx(1.0)
    assert engine.load.wait_s(6.0) == 0.0
    assert engine.in_flight == 2
    for number in (1, 2):
        tracker.observe(BLANK._replace(request=number, stream=0, first_byte_s=9.0, last_byte_s=9.0))
    assert engine.in_flight == 0
    assert engine.prefill_model.regression.own.samples == 0
    tracker.check_integrity()


def test_a_retry_leaves_the_first_engine() -> None:
    tracker = InflightTracker([Worker(0, "a"), Worker(1, "b")])
    a, b = tracker.workers
    tracker.on_dispatch(1, Choice(a), Request(tokens=100), streams=True, now_s=0.0)
    tracker.on_dispatch(1, Choice(b), Request(tokens=100), streams=True, now_s=1.0)
    assert (a.in_flight, b.in_flight) == (0, 1)


def test_a_request_that_nobody_reports_is_forgotten() -> None:
    tracker, prefill, decode = pair()
    tracker.on_dispatch(1, Choice(decode, prefill), Request(tokens=100), streams=True, now_s=0.0)
    tracker.expire(FORGOTTEN_S - 1)
    assert len(tracker) == 1
    tracker.expire(FORGOTTEN_S + 1)
    assert len(tracker) == 0
    tracker.check_integrity()


def test_an_answer_that_comes_whole_may_take_no_longer_than_a_first_token() -> None:
    """Though it is known since when it is decoded."""
    tracker, prefill, decode = pair()
    tracker.on_dispatch(1, Choice(decode, prefill), Request(tokens=100), streams=False, now_s=0.0)
    tracker.observe(BLANK._replace(request=1, stage=Stage.PREFILLED, stream=0, prefill_done_s=2.0))
    tracker.expire(FORGOTTEN_S - 1)
    assert decode.load.decodes == 1
    tracker.expire(FORGOTTEN_S + 1)
    assert len(tracker) == decode.load.decodes == 0
    tracker.check_integrity()


def test_a_stream_may_take_longer_than_a_first_token() -> None:
    tracker = InflightTracker([Worker(0, "e")], Admission(Objective()))
    engine, ended = tracker.workers[0], list[Finished]()

    class Heard(Observer):
        def on_finish(self, finished: Finished) -> None:
            ended.append(finished)

    heard = Heard()
    tracker.subscribe(heard)
    tracker.on_dispatch(1, Choice(engine), Request(tokens=100), streams=True, now_s=0.0)
    seen = BLANK._replace(request=1, first_byte_s=1.0)
    tracker.observe(seen._replace(stage=Stage.BEGUN))
    tracker.expire(FORGOTTEN_S + 1)
    assert engine.load.decodes == 1
    tracker.observe(seen._replace(last_byte_s=2_000.0, completion_tokens=40_000))
    assert (len(ended), tracker.nonsense, len(tracker)) == (1, 0, 0)
    assert engine.decode_model.regression.own.samples == 1
    assert (ended[0].choice.decode, ended[0].asked.tokens, ended[0].sent_s) == (engine, 100, 0.0)
    tracker.check_integrity()
    for _ in range(2):
        tracker.unsubscribe(heard)
    tracker.on_dispatch(2, Choice(engine), Request(tokens=100), streams=True, now_s=2_000.0)
    tracker.observe(seen._replace(request=2, first_byte_s=2_001.0, last_byte_s=2_002.0))
    assert len(ended) == 1


def test_a_stream_whose_end_was_lost_ends_when_its_engine_has_nothing_in_work() -> None:
    load = [1]
    tracker = InflightTracker([Worker(0, "e", relay_requests=lambda: load[0]), Worker(1, "f")])
    for number, engine in enumerate(tracker.workers):
        tracker.on_dispatch(number, Choice(engine), Request(tokens=100), streams=True, now_s=0.0)
        tracker.observe(BLANK._replace(request=number, first_byte_s=1.0, stage=Stage.BEGUN))
    tracker.expire(FORGOTTEN_S + 1)
    assert len(tracker) == 2
    load[0] = 0
    tracker.expire(FORGOTTEN_S + 1)
    assert len(tracker) == 1
    tracker.expire(STREAMS_S + 1)
    assert len(tracker) == 0
    tracker.check_integrity()


def test_an_engine_that_counts_other_tokens_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tracker = InflightTracker([Worker(0, "blind")])
    for number in range(200):
        tracker.on_dispatch(
            number, Choice(tracker.workers[0]), Request(tokens=1_000), streams=True, now_s=1.0
        )
        tracker.observe(
            BLANK._replace(request=number, prompt_tokens=1_003, cached_tokens=960, last_byte_s=2.0)
        )
    assert sum("blind" in record.getMessage() for record in caplog.records) == 1
    assert tracker.watches[0].wrong == 200


def test_random_reports_leave_nothing_behind() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        print("seed", seed)
        tracker, prefill, decode = pair()
        now_s = 0.0
        for _ in range(400):
            now_s += rng.random()
            number = rng.randrange(10)
            if rng.random() < 0.4:
                choice = Choice(decode, prefill if rng.random() < 0.5 else None)
                asked = Request(tokens=rng.randrange(5_000))
                tracker.on_dispatch(number, choice, asked, streams=rng.random() < 0.7, now_s=now_s)
            else:
                tracker.observe(
                    BLANK._replace(
                        request=number,
                        stage=rng.choice(list(Stage)),
                        outcome=rng.choice(list(Outcome)),
                        status=rng.choice((200, 400, 503)),
                        stream=rng.randrange(2),
                        handed_over=rng.choice(list(HandoverForm)),
                        prefill_done_s=rng.choice((0.0, now_s)),
                        first_byte_s=rng.choice((0.0, now_s)),
                        last_byte_s=now_s,
                        completion_tokens=rng.randrange(-1, 5),
                    )
                )
            tracker.check_integrity()
            for worker in tracker.workers:
                assert worker.load.wait_s(now_s) >= 0
        for number in range(10):
            tracker.observe(BLANK._replace(request=number, last_byte_s=now_s))
        assert len(tracker) == 0
        tracker.check_integrity()
