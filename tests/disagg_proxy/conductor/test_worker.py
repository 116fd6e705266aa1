"""What workers of one kind learn together, and what a dispatch does to a load."""

from __future__ import annotations

import gc
import random

import pytest

from moonpool.disagg_proxy.conductor.worker import LEARNT, Role, Worker


def taught(place: int, token_s: float, samples: int = 200) -> Worker:
    """It has seen prompts whose every token takes so long, and hand-overs and gaps in proportion."""
    worker = Worker(place, f"p{place}", Role.PREFILL)
    for number in range(samples):
        tokens = 500 + 997 * number % 20_000
        worker.prefill_model.observe(tokens, 0, 0, 0.1 + token_s * tokens)
        worker.handover_model.observe(tokens, token_s * 100)
        worker.decode_model.observe(1 + number % 30, 10 * tokens, token_s * 200)
    return worker


def seconds(worker: Worker) -> tuple[float, float, float]:
    """Of a prefill, a hand-over, a gap."""
    return (
        worker.prefill_model.predict(10_000, 4_000),
        worker.handover_model.predict(5_000),
        worker.decode_model.predict(10, 50_000),
    )


def teach(worker: Worker, token_s: float, samples: int) -> None:
    for number in range(samples):
        tokens = 500 + 997 * number % 20_000
        worker.prefill_model.observe(tokens, 0, 0, 0.1 + token_s * tokens)


def test_a_worker_that_joins_is_predicted_as_its_kind_is() -> None:
    one, new = taught(0, 1e-4), Worker(9, "new", Role.PREFILL)
    new.join_kind([one])
    assert seconds(new) == pytest.approx(seconds(one))
    assert new.prefill_model.predict(10_000) == pytest.approx(1.1, rel=0.1)
    teach(one, 1e-4, 50)
    assert seconds(new) == seconds(one)  # they go on learning together
    new.check_integrity()


def test_equal_workers_are_predicted_alike_whatever_each_of_them_has_seen(rng: random.Random) -> None:
    workers = [Worker(place, f"w{place}") for place in range(4)]
    for worker in workers[1:]:
        worker.join_kind(workers[:1])
    for number in range(2_000):
        worker = workers[number * number % 7 % 4]  # some see more
        tokens = rng.randrange(100, 20_000) if worker is not workers[2] else rng.randrange(100, 800)
        took_s = (0.05 + 1e-4 * tokens + 1e-9 * tokens**2) * rng.gauss(1.0, 0.15)
        worker.prefill_model.observe(tokens, 0, 0, max(took_s, 0.0))
    assert {worker.prefill_model.regression.share for worker in workers} == {0.0}
    predicted = {worker.prefill_model.predict(12_000) for worker in workers}
    assert len(predicted) == 1
    assert predicted.pop() == pytest.approx(0.05 + 1.2 + 0.144, rel=0.05)


def test_a_slower_worker_is_predicted_by_itself_and_misleads_none() -> None:
    one, slow, other = (Worker(place, f"w{place}") for place in range(3))
    slow.join_kind([one])
    other.join_kind([one])
    for _ in range(50):
        for worker, token_s in ((one, 1e-4), (slow, 4e-4), (other, 1e-4)):
            teach(worker, token_s, 4)
    assert slow.prefill_model.predict(10_000) == pytest.approx(4.1, rel=0.1)
    assert one.prefill_model.predict(10_000) == pytest.approx(1.1, rel=0.1)
    new = Worker(3, "new")
    new.join_kind([slow])
    assert new.prefill_model.predict(10_000) == pytest.approx(1.1, rel=0.1)  # as most of its kind


def test_a_worker_that_slows_down_is_noticed_within_thirty_of_its_samples() -> None:
    one, other = Worker(0, "one"), Worker(1, "other")
    other.join_kind([one])
    teach(one, 1e-4, 300)
    teach(other, 1e-4, 300)
    teach(other, 4e-4, 30)
    assert other.prefill_model.predict(10_000) == pytest.approx(4.1, rel=0.1)
    assert one.prefill_model.predict(10_000) == pytest.approx(1.1, rel=0.1)
    teach(other, 1e-4, 60)
    assert other.prefill_model.predict(10_000) == pytest.approx(1.1, rel=0.1)


def test_a_kind_of_which_all_have_changed_learns_anew() -> None:
    one, other = Worker(0, "one"), Worker(1, "other")
    other.join_kind([one])
    for token_s in (1e-4, 4e-4):
        for _ in range(40):
            teach(one, token_s, 10)
            teach(other, token_s, 10)
        new = Worker(2, "new")
        new.join_kind([one])
        assert new.prefill_model.predict(10_000) == pytest.approx(0.1 + token_s * 10_000, rel=0.1)


def test_a_worker_that_turns_out_to_be_of_another_kind_learns_with_that() -> None:
    prefill, decode = taught(0, 1e-4), taught(1, 3e-4)
    worker = Worker(2, "worker")
    worker.join_kind([prefill])
    worker.join_kind([decode])
    assert seconds(worker) == pytest.approx(seconds(decode))
    worker.join_kind([])  # of a kind of its own: it begins with what it was thought to be
    assert seconds(worker) == pytest.approx(seconds(decode))
    teach(worker, 9e-4, 200)
    assert decode.prefill_model.predict(10_000) == pytest.approx(3.1, rel=0.1)


def test_who_computes_for_another_is_its_first_guess_until_its_own_kind_has_computed() -> None:
    """A decode engine that has computed nothing is no faster; what its kind has taken says more."""
    prefill_worker, decode, sister = taught(0, 1e-4), Worker(1, "d", Role.DECODE), Worker(2, "e", Role.DECODE)
    sister.join_kind([decode])
    taken = prefill_worker.handover_model.predict(5_000)
    decode.guess_from(taught(3, 9e-4, samples=LEARNT - 1))
    assert decode.prefill_model.predict(10_000) == Worker(4, "new").prefill_model.predict(10_000)
    decode.guess_from(prefill_worker)
    for each in (decode, sister):
        assert each.prefill_model.predict(10_000) == pytest.approx(
            prefill_worker.prefill_model.predict(10_000)
        )
    assert decode.handover_model.predict(5_000) != pytest.approx(taken)
    teach(sister, 4e-4, 60)
    decode.guess_from(prefill_worker)
    assert decode.prefill_model.predict(10_000) == pytest.approx(4.1, rel=0.1)


def test_a_dispatch_is_accounted_for_in_one_call_as_step_by_step(rng: random.Random) -> None:
    one, other = taught(0, 1e-4), taught(0, 1e-4)
    load, model, now_s = other.load, other.prefill_model, 0.0
    for request in range(300):
        now_s += rng.choice((0.0, rng.random(), 30.0 * rng.random()))
        tokens = rng.randrange(20_000)
        own, pool, ahead_s = rng.randrange(tokens + 1), rng.choice((0, 500)), rng.choice((0.0, rng.random()))
        predicted_s, silent = rng.choice((0.0, rng.random())), rng.random() < 0.5
        sent = one.dispatched(
            request, tokens, own, pool, ahead_s=ahead_s, predicted_s=predicted_s, now_s=now_s, silent=silent
        )
        wait_s = load.wait_s(now_s)
        step_s = other.decode_model.step_s(load.decodes, load.context_tokens)
        prefill_s = predicted_s or model.predict(
            tokens, own, pool, ahead_s, queued=wait_s > 0.0, step_s=step_s
        )
        load.prefill_began(request, tokens, own, pool, prefill_s, now_s, silent=silent)
        if silent:
            load.decode_began(request, tokens, now_s)
        assert sent == (wait_s, prefill_s, model.transfer_s(pool))
        if rng.random() < 0.5:
            for each in (one.load, load):
                each.prefill_ended(request, now_s)
                each.decode_ended(request, 10, now_s)
        for name in ("prefills", "prefill_rest_tokens", "decodes", "requests", "context_tokens"):
            assert getattr(one.load, name) == getattr(load, name)
        one.check_integrity()


def test_an_answer_that_is_no_stream_says_nothing_of_stalls() -> None:
    """Its own prompt is in its time, and the prompts before it; it kept others from their tokens as any."""
    worker = Worker(0, "w")
    for number in range(20):
        worker.dispatched(number, 5_000, 0, 0, ahead_s=0.0, predicted_s=3.0, now_s=4.0 * number, silent=True)
        assert worker.load.wait_s(4.0 * number + 3.1) == 0.0
        assert worker.load.decode_ended(number, 8, 4.0 * number + 3.2) is not None
    assert worker.load.stall_s(79.2) == 0.0
    worker.load.decode_began(20, 100, 80.0)
    worker.dispatched(21, 5_000, 0, 0, ahead_s=0.0, predicted_s=3.0, now_s=81.0, silent=True)
    worker.load.decode_ended(20, 11, 85.0)
    assert worker.load.stall_s(85.0) == pytest.approx(0.3)


def test_a_policy_of_a_users_own_finds_attributes_by_their_old_names() -> None:
    worker = Worker(0, "e")
    for old, now in (("books", "load"), ("alone", "self_sufficient"), ("coming", "pending_handover")):
        with pytest.warns(DeprecationWarning, match=f"{old} is named {now} now"):
            assert getattr(worker, old) is getattr(worker, now)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        worker.nothing  # noqa: B018


def test_a_policy_of_a_users_own_finds_what_each_worker_learnt_alone_as_before() -> None:
    worker, sister = taught(0, 1e-4), Worker(1, "e")
    regression = worker.prefill_model.regression
    for name in ("samples", "odd", "refused"):
        with pytest.warns(DeprecationWarning, match=f"regression.{name} is regression.own.{name} now"):
            assert getattr(regression, name) == getattr(regression.own, name)
    features = [1.0, 2.0, *[0.0] * (len(regression.coefficients) - 2)]
    error = regression.observe(features, 0.3)
    assert error == pytest.approx(0.3 - (0.1 + 0.2), abs=0.02)
    assert regression.predict(features) == pytest.approx(0.3, rel=0.1)
    with pytest.warns(DeprecationWarning, match="learn_from is named join_kind now"):
        sister.learn_from([worker])
    assert seconds(sister) == seconds(worker)
    third = Worker(2, "f")
    with pytest.warns(DeprecationWarning, match="seed_models is named join_kind now"):
        worker.seed_models([third])
    assert seconds(third) == seconds(worker)
    with pytest.warns(DeprecationWarning, match="same_kind_computes"):
        assert third.same_kind_computes


def test_a_kind_that_is_kept_outlives_its_last_engine() -> None:
    one, other = taught(0, 1e-4), taught(1, 3e-4)
    kept = one.prefill_model.regression.kind
    known = kept.coefficients
    one.join_kind([other])
    del one
    gc.collect()
    again = [taught(2, 9e-4) for _ in range(20)]  # takes the memory of what is gone
    assert kept.coefficients == known
    assert kept.samples
    assert len(again) == 20
