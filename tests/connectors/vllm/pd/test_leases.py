"""Leases against a fake clock, also in random order against an obviously right model."""

from __future__ import annotations

import random

import pytest

from moonpool.connectors.vllm.pd.leases import LIFE, Leases
from tests.connectors.vllm.fakes import FakeBlock


def leases(ranks: int = 1, slots: int = 8) -> Leases:
    ids = iter(range(1, 10**6))
    return Leases(silence_s=10.0, ranks=ranks, slots=slots, new_id=lambda: next(ids))


def test_a_lease_expires_when_decode_never_gives_a_sign() -> None:
    one = leases()
    lease = one.open()
    assert lease is not None
    assert one.expired(10**6) == []  # its request runs
    assert one.offer(lease, 100.0)
    assert one.expired(109.9) == []
    assert one.expired(110.0) == [lease]
    assert len(one) == 0
    assert not one.offer(lease, 111.0)


def test_every_sign_gives_it_more_time() -> None:
    one = leases()
    lease = one.open()
    assert lease is not None
    one.offer(lease, 100.0)
    for now_s in (105.0, 114.0, 123.0):
        one.heard(lease.id, now_s)
        assert one.expired(now_s + 9.9) == []
    assert one.expired(133.0) == [lease]
    one.heard(lease.id, 134.0)


def test_signs_do_not_keep_it_for_ever() -> None:
    """Two engines that each wait for room that the other's leases keep."""
    one = leases()
    lease = one.open()
    assert lease is not None
    one.offer(lease, 100.0)
    last_s = 100.0 + LIFE * 10
    for second in range(100, int(last_s)):
        one.heard(lease.id, float(second))
        assert one.expired(float(second)) == []
    assert one.expired(last_s) == [lease]


def test_all_ranks_must_have_it() -> None:
    one = leases(ranks=3)
    lease = one.open()
    assert lease is not None
    assert one.handed(lease.id, 2) is None
    assert one.handed(lease.id, 1) is lease
    assert one.handed(lease.id, 1) is None


def test_slots_run_out_and_come_back() -> None:
    one = leases(slots=2)
    first, second = one.open(), one.open()
    assert first is not None
    assert second is not None
    assert one.open() is None
    one.end(first.id)
    third = one.open()
    assert third is not None
    assert third.slot == first.slot
    assert third.id != first.id


def test_blocks_that_only_a_lease_keeps_are_free_soon_when_decode_lives() -> None:
    one = leases()
    lease = one.open()
    assert lease is not None
    lease.blocks = [FakeBlock(1, ref_cnt=1)]
    one.offer(lease, 0.0)
    assert not one.frees_soon
    one.heard(lease.id, 0.0)
    assert one.frees_soon


@pytest.mark.parametrize("_round", range(20))
def test_random(_round: int, rng: random.Random) -> None:
    one, now_s = leases(ranks=2, slots=6), 0.0
    model: dict[int, tuple[float | None, int]] = {}  # id -> (deadline, ranks left)
    handles, last_s = {}, {}
    for _ in range(300):
        now_s += rng.random() * 4
        some = rng.choice([0, *model])
        action = rng.choice(["open", "offer", "heard", "handed", "expire", "end"])
        if rng.random() < 0.01:
            action = "end all"
        if action == "open":
            lease = one.open()
            assert (lease is None) == (len(model) == 6)
            if lease is not None:
                model[lease.id], handles[lease.id] = (None, 2), lease
        elif action == "offer" and some:
            assert one.offer(handles[some], now_s)
            model[some], last_s[some] = (now_s + 10, model[some][1]), now_s + LIFE * 10
        elif action == "heard":
            one.heard(some, now_s)
            if some and model[some][0] is not None:
                model[some] = (min(now_s + 10, last_s[some]), model[some][1])
        elif action == "handed":
            over = one.handed(some, 1)
            if some:
                model[some] = (model[some][0], model[some][1] - 1)
                assert (over is not None) == (model[some][1] == 0)
                if over is not None:
                    del model[some]
        elif action == "expire":
            late = {lease.id for lease in one.expired(now_s)}
            assert late == {
                i for i, (deadline, _) in model.items() if deadline is not None and deadline <= now_s
            }
            for lease_id in late:
                del model[lease_id]
        elif action == "end all":
            assert {lease.id for lease in one.end_all()} == model.keys()
            model.clear()
        elif action == "end":
            assert (one.end(some) is not None) == bool(some)
            model.pop(some, None)
        assert len(one) == len(model)
        assert one.check_integrity()
