"""Weighing all instances at once, in C++, against plain Python."""

from __future__ import annotations

import array
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from moonpool import InvalidArgument
from moonpool._native import Candidates, WorkerLoad, WorkerView
from moonpool.disagg_proxy.conductor.worker import Worker
from tests.disagg_proxy.conductor.policies import plain_candidates


def random_fleet(rng: random.Random, count: int) -> list[Worker]:
    """Many alike, so that ties are frequent; some that have learnt."""
    fleet = []
    for place in range(count):
        instance = Worker(place, f"e{place}", room_tokens=rng.choice((0, 0, 5_000, 100_000)))
        instance.obeys = rng.random() < 0.7
        instance.turn = rng.choice((-1, place, rng.randrange(5)))
        instance.pending_handover = rng.choice((0, 0, rng.randrange(4)))
        instance.pending_handover_tokens = 1_000 * instance.pending_handover
        if rng.random() < 0.3:  # an answer is over, and a prompt was computed meanwhile
            instance.load.decode_began(-1, 500, -3.0)
            instance.load.prefill_began(-2, 100, 0, 0, 1.0, -2.5)
            instance.load.prefill_ended(-2, -2.5 + rng.random())
            instance.load.decode_ended(-1, 20, -1.0)
            assert instance.load.stall_s(0.0) > 0
        for request in range(rng.choice((0, 0, rng.randrange(5)))):
            seconds, silent = rng.choice((0.5, rng.random() * 3)), rng.random() < 0.3
            instance.load.prefill_began(request, 100, 0, 0, seconds, 0.0, silent=silent)
        for request in range(rng.choice((0, 0, rng.randrange(30)))):
            instance.load.decode_began(request, rng.choice((500, rng.randrange(4_000))), 0.0)
        for _ in range(rng.choice((0, 0, rng.randrange(30)))):
            tokens = rng.randrange(100, 20_000)
            own, pool = rng.randrange(tokens), rng.randrange(tokens)
            queued = rng.random() < 0.5
            instance.prefill_model.observe(tokens, own, pool, rng.random() * 2, rng.random(), queued=queued)
            instance.decode_model.observe(rng.randrange(1, 50), rng.randrange(50_000), rng.random() / 10)
        fleet.append(instance)
    return fleet


def test_random_fleets_are_weighed_as_by_plain_python(rng: random.Random) -> None:
    reasons = set()
    for _ in range(1_500):
        fleet = random_fleet(rng, rng.choice((1, 2, rng.randrange(3, 40))))
        candidates = Candidates(fleet)
        assert len(candidates) == len(fleet)
        tokens = rng.choice((0, 256, rng.randrange(30_000)))
        counts = [rng.choice((0, 1_020, 1_024, rng.randrange(tokens + 1))) for _ in fleet]
        own: Sequence[int] = [min(count, tokens) for count in counts[: rng.choice((len(fleet), 1))]]
        pool = rng.choice((0, rng.randrange(tokens + 1)))
        now_s = rng.choice((0.0, rng.random() * 3, -0.5))
        weights = {
            "ahead_s": rng.choice((0.0, rng.random())),
            "urgency": 2.0 ** rng.randrange(-4, 5),
            "marginal_delay": rng.choice((0.0, rng.random() * 10)),
            "reuse_probability": rng.choice((0.0, 0.25)),
            "spare_s": rng.choice((0.0, rng.random())),
            "stalled": rng.choice((0.0, 1.0)),
            "gap_most_s": rng.choice((math.inf, rng.random(), 10 * rng.random())),
            "need_tokens": rng.choice((0, rng.randrange(10_000))),
            "noise": rng.choice((0.0, rng.random())),
            "unseen_s": rng.choice((0.0, 0.0, 3 * rng.random())),
        }
        last = rng.choice((None, rng.choice(fleet)))
        last_own = rng.choice((-1, tokens)) if last is not None else -1
        without = rng.choice((None, None, rng.choice(fleet)))
        for number, form in enumerate((own, tuple(own), array.array("I", own))):
            expected = plain_candidates.cheapest(
                fleet,
                tokens,
                own,
                pool,
                now_s,
                without=without,
                last=last,
                last_own=last_own,
                draws=number + 1,
                **weights,
            )
            which, *found = candidates.cheapest(
                tokens, form, pool, now_s, without=without, last=last, last_own=last_own, **weights
            )
            assert (fleet[which], found[0]) == expected[:2]
            assert found[1:] == pytest.approx(expected[2:], rel=1e-9, abs=1e-12)
        reasons.add(expected[1])
        need = tokens + rng.randrange(4_000)
        decode, gap_s = plain_candidates.least_gap(fleet, tokens, need, now_s)
        which, found_s = candidates.least_gap(tokens, need, now_s)
        assert (fleet[which], found_s) == (decode, pytest.approx(gap_s, rel=1e-9))
        stall_s = fleet[which].load.stall_s(now_s)
        assert fleet[which].gap_s(tokens, stall_s) == pytest.approx(gap_s, abs=plain_candidates.EQUAL_GAP_S)
    assert reasons == {"only", "session", "match", "turn", "least_time", "spares_others", "drawn"}


def test_what_other_proxies_have_sent_unseen_is_shared_by_all_that_draw(rng: random.Random) -> None:
    fleet = [Worker(place, f"e{place}") for place in range(4)]
    for place, wait_s in enumerate((0.0, 0.1, 0.2, 2.0)):
        if wait_s:
            fleet[place].load.prefill_began(1, 100, 0, 0, wait_s, 0.0, silent=False)
    candidates = Candidates(fleet)

    def shares(unseen_s: float, **more: Any) -> list[float]:
        drawn = [
            candidates.cheapest(100, (), 0, rng.random() / 1e6, unseen_s=unseen_s, **more)[0]
            for _ in range(4_000)
        ]
        return [drawn.count(place) / len(drawn) for place in range(4)]

    assert shares(0.0) == [1, 0, 0, 0]
    # Up to 0.3 s: 0.3, 0.2 and 0.1 s of work bring the first three there; the fourth is later.
    assert shares(0.6) == pytest.approx([1 / 2, 1 / 3, 1 / 6, 0], abs=0.05)
    assert shares(0.1) == pytest.approx([1, 0, 0, 0], abs=0.01)
    assert shares(6.0) == pytest.approx([x / 6 for x in (2.075, 1.975, 1.875, 0.075)], abs=0.05)
    # An unseen second costs as much as a second of waiting, whatever that costs this request.
    assert shares(0.6, urgency=1 / 16) == pytest.approx([1 / 2, 1 / 3, 1 / 6, 0], abs=0.05)
    # Those that may not be chosen take their part with them: 0.3 s for the other two of four.
    for worker in fleet[2:]:
        worker.room_tokens = 10
    assert shares(0.6, need_tokens=100) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.05)


def test_what_a_model_learns_counts_at_once_and_nonsense_is_survived() -> None:
    fleet = [Worker(place, f"e{place}") for place in range(3)]
    candidates = Candidates(fleet)
    assert candidates.cheapest(1_000, (), 0, 0.0)[0] == 0
    for _ in range(50):
        fleet[0].prefill_model.observe(1_000, 0, 0, 5.0)
    assert candidates.cheapest(1_000, (), 0, 0.0)[0] == 1
    for number in (math.nan, math.inf, -math.inf):  # some instance, whichever
        assert candidates.cheapest(1_000, (), 0, number, without=fleet[1])[0] in (0, 2)
        assert candidates.cheapest(1_000, (), 0, 0.0, marginal_delay=number, without=fleet[1])[0] in (0, 2)


def test_what_cannot_be_weighed_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no workers to choose among"):
        Candidates([])
    candidates = Candidates([Worker(0, "e0")])
    for own in ([-1], [1 << 32], ["x"], b"abc", None):
        with pytest.raises((InvalidArgument, TypeError, OverflowError, ValueError)):
            candidates.cheapest(10, own, 0, 0.0)
    with pytest.raises(InvalidArgument, match="its models"):
        WorkerView(0, 0, WorkerLoad(), None, None)  # type: ignore[arg-type]
