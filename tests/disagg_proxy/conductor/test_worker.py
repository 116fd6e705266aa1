"""What a new worker takes over from those that are what it is."""

from __future__ import annotations

import random

import pytest

from moonpool.disagg_proxy.conductor.worker import LEARNT, SAME_KIND_MAX, Role, Worker


def taught(place: int, token_s: float, samples: int = 200) -> Worker:
    """It has seen prompts whose every token takes so long, and hand-overs and gaps in proportion."""
    worker = Worker(place, f"p{place}", Role.PREFILL)
    for number in range(samples):
        tokens = 500 + 997 * number % 20_000
        worker.prefill_model.observe(tokens, 0, 0, 0.1 + token_s * tokens)
        worker.handover_model.observe(tokens, token_s * 100)
        worker.decode_model.observe(1 + number % 30, 10 * tokens, token_s * 200)
    return worker


def test_it_begins_with_the_mean_of_what_they_have_learnt() -> None:
    new, same_kind = Worker(9, "new", Role.PREFILL), [taught(0, 1e-4), taught(1, 3e-4)]
    new.learn_from(same_kind)
    for ask in (
        lambda each: each.prefill_model.predict(10_000, 4_000),
        lambda each: each.handover_model.predict(5_000),
        lambda each: each.decode_model.predict(10, 50_000),
    ):
        assert ask(new) == pytest.approx(sum(map(ask, same_kind)) / 2)
    assert new.prefill_model.predict(10_000) == pytest.approx(2.1, rel=0.1)
    new.check_integrity()


def test_who_has_learnt_nothing_teaches_nothing_and_what_was_observed_is_kept() -> None:
    new, prior = Worker(9, "new"), Worker(8, "prior").prefill_model.predict(10_000)
    new.learn_from([])
    new.learn_from([taught(0, 1e-3, samples=LEARNT - 1)])
    assert new.prefill_model.predict(10_000) == prior
    new.prefill_model.observe(10_000, 0, 0, 1.0)
    seen_s = new.prefill_model.predict(10_000)
    new.learn_from([taught(0, 1e-3)])
    assert new.prefill_model.predict(10_000) == seen_s
    assert new.handover_model.predict(1_000) == pytest.approx(0.1, rel=0.1)  # of that it has seen none


def test_a_first_guess_that_is_wrong_is_soon_replaced() -> None:
    new = Worker(9, "new")
    new.learn_from([taught(0, 1e-4)])
    for number in range(30):
        tokens = 500 + 997 * number % 20_000
        new.prefill_model.observe(tokens, 0, 0, 0.1 + 4e-4 * tokens)
    assert new.prefill_model.predict(10_000) == pytest.approx(4.1, rel=0.1)


def test_of_many_sisters_a_few_are_asked() -> None:
    asked = 0

    def same_kind() -> object:
        nonlocal asked
        while True:
            asked += 1
            yield Worker(asked, "one")

    Worker(0, "new").learn_from(same_kind())  # type: ignore[arg-type]
    assert asked == SAME_KIND_MAX


def test_what_one_has_learnt_is_the_first_guess_of_sisters_that_nobody_has_observed() -> None:
    one, fresh, observed = taught(0, 1e-4), Worker(1, "fresh"), taught(2, 3e-4, samples=1)
    seen_s = observed.prefill_model.predict(10_000)
    taught(3, 5e-3, samples=LEARNT - 1).seed_models([fresh, observed])
    one.seed_models([fresh, observed])
    for ask in (
        lambda each: each.prefill_model.predict(10_000, 4_000),
        lambda each: each.handover_model.predict(5_000),
        lambda each: each.decode_model.predict(10, 50_000),
    ):
        assert ask(fresh) == pytest.approx(ask(one))
    assert observed.prefill_model.predict(10_000) == seen_s


def test_who_computes_for_another_is_its_first_guess_until_its_own_kind_has_computed() -> None:
    """A decode engine that nobody has observed is no faster; what its same_kind have taken says more."""
    prefill_worker, decode = taught(0, 1e-4), Worker(1, "d", Role.DECODE)
    taken = prefill_worker.handover_model.predict(5_000)
    decode.guess_from(taught(3, 9e-4, samples=LEARNT - 1))
    assert decode.prefill_model.predict(10_000) == Worker(2, "new").prefill_model.predict(10_000)
    decode.guess_from(prefill_worker)
    assert decode.prefill_model.predict(10_000) == pytest.approx(prefill_worker.prefill_model.predict(10_000))
    assert decode.handover_model.predict(5_000) != pytest.approx(taken)
    taught(2, 4e-4).seed_models([decode])
    decode.guess_from(prefill_worker)
    assert decode.prefill_model.predict(10_000) == pytest.approx(4.1, rel=0.1)
    joined = Worker(4, "joined", Role.DECODE)
    joined.learn_from([taught(2, 4e-4)])
    joined.guess_from(prefill_worker)
    assert joined.prefill_model.predict(10_000) == pytest.approx(4.1, rel=0.1)
    observed = taught(5, 2e-4, samples=1)
    seen_s = observed.prefill_model.predict(10_000)
    observed.guess_from(prefill_worker)
    assert observed.prefill_model.predict(10_000) == seen_s


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
        prefill_s = predicted_s or model.predict(tokens, own, pool, ahead_s, queued=wait_s > 0.0)
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


def test_a_policy_of_a_users_own_finds_attributes_by_their_old_names() -> None:
    worker = Worker(0, "e")
    for old, now in (("books", "load"), ("alone", "self_sufficient"), ("coming", "pending_handover")):
        with pytest.warns(DeprecationWarning, match=f"{old} is named {now} now"):
            assert getattr(worker, old) is getattr(worker, now)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        worker.nothing  # noqa: B018
