"""The scheduler driven with plain values: engines that exist in name only.

A model that has learnt nothing predicts 2.4 s for 20,000 tokens of a prompt, so requests of that length keep
an engine busy (HOLD_S is 1 s) until an observation says that they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moonpool.disagg_proxy.conductor.admission import Admission, Objective, Refusal
from moonpool.disagg_proxy.conductor.admission_controller import RELEASED_MAX
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policies.conductor import Conductor
from moonpool.disagg_proxy.conductor.scheduler import (
    Dispatched,
    EligibleWorkers,
    PendingRequest,
    QueueLimits,
    Refused,
    Scheduler,
)
from moonpool.disagg_proxy.conductor.worker import Role, Worker
from moonpool.disagg_proxy.data_plane.observations import Observation, Outcome, Stage
from tests.disagg_proxy.conductor.confirmed import confirm

LONG = 20_000
BLANK = Observation(0, 1, -1, 0, *(0.0,) * 6, *(-1,) * 4, 200, Outcome.ANSWERED, 1, 0, 1, 0, 0, b"", b"", b"")


class Bed:
    """A driver that knows its requests by name."""

    def __init__(self, roles: Sequence[Role] = (Role.BOTH,)) -> None:
        self.workers = tuple(Worker(place, f"engine-{place}", role) for place, role in enumerate(roles))
        for worker in self.workers[1:]:
            worker.join_kind(each for each in self.workers[:1] if each.role is worker.role)
        self.gone: set[int] = set()
        self.objections: dict[int, Refusal] = {}

    def is_gone(self, pending: PendingRequest) -> bool:
        return pending.name in self.gone

    def eligible(self, pending: PendingRequest) -> EligibleWorkers:
        return EligibleWorkers.of(self.workers)

    def refresh(self, pending: PendingRequest) -> Request:
        return pending.asked

    def none_eligible(self, pending: PendingRequest) -> Refusal:
        return Refusal("none", 0.0, "no engine is left")

    def objection(self, pending: PendingRequest, choice: Choice) -> Refusal | None:
        return self.objections.get(pending.name)


def made(bed: Bed, objective: Objective | None = None, waiting_max: int = 0) -> Scheduler[PendingRequest]:
    admission = None if objective is None else Admission(objective)
    limits = QueueLimits(waiting_max, deadline_s=60.0)
    scheduler: Scheduler[PendingRequest] = Scheduler(Conductor(), bed, admission, limits)
    for worker in bed.workers:
        scheduler.join(worker)
    return scheduler


def request(
    name: int, tokens: int = LONG, *, priority: int = 0, objective: Objective | None = None
) -> PendingRequest:
    asked = Request(tokens, priority=priority)
    return PendingRequest(name=name, asked=asked, objective=objective or Objective())


def computed(scheduler: Scheduler[PendingRequest], name: int, at_s: float) -> None:
    """The prompt of a stream is computed, and its answer over."""
    seen = BLANK._replace(request=name, first_byte_s=at_s, last_byte_s=at_s)
    scheduler.observe(seen._replace(stage=Stage.BEGUN))
    scheduler.observe(seen)


def test_a_request_is_dispatched_and_accounted_for_until_it_is_over() -> None:
    bed = Bed()
    scheduler = made(bed)
    pending = request(1)
    assert scheduler.submit(pending, 0.0) == [Dispatched(pending, pending.choice)]
    assert pending.choice is not None
    assert pending.choice.decode is bed.workers[0]
    assert bed.workers[0].load.requests == 1
    computed(scheduler, 1, 1.0)
    assert bed.workers[0].load.requests == 0
    scheduler.check_integrity()


def test_busy_engines_let_requests_wait_and_the_most_urgent_goes_first() -> None:
    bed = Bed()
    scheduler = made(bed, waiting_max=10)
    scheduler.submit(request(1), 0.0)
    usual, urgent = request(2), request(3, priority=1)
    assert scheduler.submit(usual, 0.0) == scheduler.submit(urgent, 0.0) == []
    assert usual.waits
    assert scheduler.waiting == 2
    assert scheduler.tick(0.05) == []
    computed(scheduler, 1, 2.4)
    assert scheduler.tick(2.4) == [Dispatched(urgent, urgent.choice)]
    computed(scheduler, 3, 4.8)
    assert scheduler.tick(4.8) == [Dispatched(usual, usual.choice)]
    assert usual.sent_s == 4.8
    scheduler.check_integrity()


def test_a_full_queue_refuses_the_least_urgent() -> None:
    scheduler = made(Bed(), waiting_max=1)
    scheduler.submit(request(1), 0.0)
    first, second, urgent = request(2), request(3), request(4, priority=1)
    assert scheduler.submit(first, 0.0) == []
    (refused,) = scheduler.submit(second, 0.0)
    assert isinstance(refused, Refused)
    assert (refused.pending, refused.refusal.reason) == (second, "queue_full")
    (refused,) = scheduler.submit(urgent, 0.0)
    assert refused.pending is first
    assert scheduler.waiting == 1


def test_a_deadline_ends_a_wait_and_a_client_that_left_hears_nothing() -> None:
    bed = Bed()
    scheduler = made(bed, waiting_max=10)
    scheduler.submit(request(1, 100 * LONG), 0.0)
    late, left = request(2), request(3)
    scheduler.submit(late, 0.0)
    scheduler.submit(left, 0.0)
    bed.gone.add(3)
    (effect,) = scheduler.tick(61.0)
    assert isinstance(effect, Refused)
    assert (effect.pending, effect.refusal.reason) == (late, "deadline")
    assert scheduler.waiting == 0


def test_a_limit_of_all_waits_counts_for_those_that_wait_already() -> None:
    scheduler = made(Bed(), waiting_max=10)
    scheduler.submit(request(1, 100 * LONG), 0.0)
    scheduler.submit(request(2), 0.0)
    scheduler.limit_wait(5.0)
    assert scheduler.tick(4.9) == []
    assert [effect.pending.name for effect in scheduler.tick(5.1)] == [2]


def test_what_would_be_too_late_is_refused_and_is_not_in_the_books() -> None:
    bed = Bed()
    confirm(bed.workers[0])
    objective = Objective(ttft_s=3.0)
    scheduler = made(bed, objective)
    scheduler.submit(request(1, objective=objective), 0.0)
    (effect,) = scheduler.submit(request(2, objective=objective), 0.0)
    assert isinstance(effect, Refused)
    assert effect.refusal.reason == "ttft"
    assert bed.workers[0].load.requests == 1
    again = scheduler.dispatch(request(2, objective=objective), 0.0)  # a second attempt
    assert isinstance(again, Dispatched)
    assert bed.workers[0].load.requests == 2


@pytest.mark.parametrize("submits", [True, False])
def test_an_objection_of_the_driver_refuses_whatever_the_load(submits: bool) -> None:
    bed = Bed()
    bed.objections[1] = Refusal("odd", 0.0, "it cannot be")
    scheduler, pending = made(bed, waiting_max=5), request(1)
    effects = scheduler.submit(pending, 0.0) if submits else [scheduler.dispatch(pending, 0.0)]
    assert effects == [Refused(pending, bed.objections[1])]
    bed.workers = ()
    effects = scheduler.submit(pending, 0.0) if submits else [scheduler.dispatch(pending, 0.0)]
    assert [effect.refusal.reason for effect in effects if isinstance(effect, Refused)] == ["none"]
    assert scheduler.waiting == 0


def test_a_tick_stops_after_some_and_says_so() -> None:
    scheduler = made(Bed(), waiting_max=100)
    scheduler.submit(request(1, 100 * LONG), 0.0)
    for name in range(2, 3 * RELEASED_MAX):
        scheduler.submit(request(name, 10), 0.0)
    scheduler.forget(0)
    assert len(scheduler.tick(1.0)) == RELEASED_MAX
    assert scheduler.unfinished
    assert len(scheduler.tick(1.0)) == RELEASED_MAX
    assert len(scheduler.tick(1.0)) == RELEASED_MAX - 2
    assert not scheduler.unfinished
    assert scheduler.waiting == 0


class Failing(Conductor):
    def choose(self, request: Request, workers: Sequence[Worker], now_s: float) -> Choice:
        raise RuntimeError("odd")

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        raise RuntimeError("odd")


def test_a_failing_policy_costs_no_request_where_the_driver_wants_to_hear_of_it() -> None:
    bed, said = Bed((Role.PREFILL, Role.PREFILL, Role.DECODE)), list[str]()
    scheduler: Scheduler[PendingRequest] = Scheduler(Failing(), bed, policy_failed=said.append)
    for worker in bed.workers:
        scheduler.join(worker)
    (effect,) = scheduler.submit(request(1), 0.0)
    assert isinstance(effect, Dispatched)
    assert len(said) == 2
    strict: Scheduler[PendingRequest] = Scheduler(Failing(), bed)
    with pytest.raises(RuntimeError, match="odd"):
        strict.submit(request(2), 0.0)


def test_engines_of_one_kind_learn_together() -> None:
    bed = Bed((Role.BOTH, Role.BOTH))
    scheduler = made(bed)
    for name in range(1, 40):
        start_s = 10.0 * name
        bed.workers[1].load.prefill_began(10_000 + name, 1, 0, 0, 1e6, start_s)  # it is busy
        scheduler.submit(request(name), start_s)
        bed.workers[1].load.forget_all()
        computed(scheduler, name, start_s + 5.0)
    assert bed.workers[0].load.requests == 0
    taught = bed.workers[1].prefill_model
    assert not taught.regression.own.samples
    assert taught.predict(LONG) > 4.0  # not the 2.4 s of the prior
