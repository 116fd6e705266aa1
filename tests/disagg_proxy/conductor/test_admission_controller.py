"""Who waits, in which order, and that each leaves once."""

from __future__ import annotations

import random
import time
import tracemalloc
from dataclasses import dataclass, field

import pytest

from moonpool.disagg_proxy.conductor.admission import Refusal
from moonpool.disagg_proxy.conductor.admission_controller import (
    RELEASED_MAX,
    RETRY_EVERY_S,
    AdmissionController,
    AdmissionResult,
    Send,
)
from moonpool.disagg_proxy.conductor.demand import Capacity
from moonpool.disagg_proxy.conductor.wait_queue import FAIRNESSES_MAX, TENANTS_MAX, QueuedRequest, WaitQueue


@dataclass
class Engine:
    """Takes one request after the other; a pending is a number."""

    free: bool = True
    slow: bool = False  # decode is
    strict: set[int] = field(default_factory=set)  # for whom it is
    want_as_much: set[int] = field(default_factory=set)
    room: int = 1
    late: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    sent: list[int] = field(default_factory=list)
    waited_s: dict[int, float] = field(default_factory=dict)
    exceeding: set[int] = field(default_factory=set)
    marginal: set[int] = field(default_factory=set)
    beside: set[int] = field(default_factory=set)  # who is computed elsewhere than the others

    def is_busy(self, pending: int, now_s: float) -> bool:
        return not self.free

    def share(self, pending: int) -> int:
        return 2

    def is_gone(self, pending: int) -> bool:
        return pending in self.gone

    def gap_s(self, pending: int) -> float:
        return 0.01 if self.slow or pending in self.strict | self.want_as_much else 0.1

    def capacity_class(self, pending: int, now_s: float) -> Capacity:
        return (
            Capacity.EXCEEDS
            if pending in self.exceeding
            else Capacity.MARGINAL
            if pending in self.marginal
            else Capacity.FITS
        )

    def ask(
        self, pending: int, waited_s: float, now_s: float, send: Send, *, only_if_spare: bool = False
    ) -> AdmissionResult:
        if send is Send.BYPASS and pending in self.beside and not self.slow:
            self.sent.append(pending)
            return AdmissionResult(0.1, None, sent=True)
        self.waited_s[pending] = waited_s
        if only_if_spare:
            return AdmissionResult(3.0, Refusal("long", 1.0, ""))
        if pending in self.late:
            return AdmissionResult(3.0, Refusal("ttft", 1.0, ""), final=True)
        if self.slow or pending in self.strict:
            return AdmissionResult(3.0, Refusal("gap", 1.0, ""))
        if send is Send.NOW:
            self.sent.append(pending)
            self.room -= 1
            self.free = self.room > 0
        return AdmissionResult(3.0, None, sent=send is Send.NOW, prompt=100)


def why(found: tuple[Refusal | None, object]) -> str:
    return "" if found[0] is None else found[0].reason


def test_without_a_queue_all_is_decided_at_once() -> None:
    engine = Engine(slow=True)
    controller: AdmissionController[int] = AdmissionController(engine, 0, 10.0)
    assert why(controller.arrive(1, "g", "", 0, 30.0, 0.0)) == "gap"
    engine.slow = engine.free = False
    assert why(controller.arrive(2, "g", "", 0, 30.0, 0.0)) == ""
    assert engine.sent == [2]


def test_the_most_urgent_goes_first_then_who_must_be_there_first() -> None:
    engine = Engine(free=False)
    controller: AdmissionController[int] = AdmissionController(engine, 10, 60.0)
    for pending, priority, ttft_s in ((1, 0, 50.0), (2, 0, 20.0), (3, 5, 60.0), (4, 0, 50.0)):
        assert controller.arrive(pending, "g", "", priority, ttft_s, 0.0) == (None, None)
    assert engine.waited_s == {1: 0.0, 2: 1.5, 3: 0.0, 4: 4.5}  # what is before them, on two instances
    assert controller.release(1.0) == []
    for _ in range(4):
        engine.free = True
        (_, refusal) = controller.release(2.0)[0]
        assert refusal is None
    assert engine.sent == [3, 2, 1, 4]
    assert not controller.queue


def test_nobody_passes_those_who_wait_but_the_more_urgent() -> None:
    engine = Engine(free=False)
    controller: AdmissionController[int] = AdmissionController(engine, 10, 60.0)
    controller.arrive(1, "g", "", 0, 30.0, 0.0)
    engine.free = True
    controller.arrive(2, "g", "", 0, 30.0, 0.0)
    assert engine.sent == []
    controller.arrive(3, "g", "", 1, 30.0, 0.0)
    assert engine.sent == [3]
    engine.free = True
    controller.arrive(4, "other", "", 0, 30.0, 0.0)  # another model's
    assert engine.sent == [3, 4]


def test_who_is_computed_where_nobody_waits_for_does_not_wait() -> None:
    engine = Engine(free=False, beside={2, 3, 5})
    controller: AdmissionController[int] = AdmissionController(engine, 10, 60.0)
    controller.arrive(1, "g", "", 0, 30.0, 0.0)
    assert controller.arrive(2, "g", "", 0, 30.0, 0.0) == (None, None)
    assert (engine.sent, len(controller.queue)) == ([2], 1)
    engine.slow = engine.free = True  # 1 is deferred, for decode's sake
    controller.release(1.0)
    engine.slow = engine.free = False
    controller.arrive(3, "g", "", 0, 30.0, 1.0)
    assert engine.sent == [2]  # it waits for the same
    controller.arrive(4, "g", "", 1, 30.0, 1.0)
    controller.arrive(5, "g", "", 1, 30.0, 1.0)  # the more urgent has only 4 before it
    assert engine.sent == [2, 5]


def test_who_cannot_be_in_time_does_not_wait() -> None:
    engine = Engine(free=False, late={1})
    controller: AdmissionController[int] = AdmissionController(engine, 10, 60.0)
    assert why(controller.arrive(1, "g", "", 0, 30.0, 0.0)) == "ttft"
    controller.arrive(2, "g", "", 0, 30.0, 0.0)
    controller.arrive(3, "g", "", 0, 30.0, 0.0)
    engine.late, engine.free = {2}, True
    assert [(pending, refusal and refusal.reason) for pending, refusal in controller.release(5.0)] == [
        (2, "ttft"),
        (3, None),
    ]


def test_a_decode_that_is_too_slow_is_waited_for() -> None:
    engine = Engine(slow=True)
    controller: AdmissionController[int] = AdmissionController(engine, 10, 60.0)
    assert controller.arrive(1, "g", "", 0, 30.0, 0.0) == (None, None)
    assert controller.release(1.0) == []
    engine.slow = False
    assert controller.release(2.0) == [(1, None)]


def test_who_wants_more_than_decode_gives_now_keeps_nobody_from_an_engine() -> None:
    engine = Engine(strict=set(range(40)), room=1_000)
    controller: AdmissionController[int] = AdmissionController(engine, 100, 60.0)
    for pending in range(40):
        controller.arrive(pending, "g", f"t{pending}", 5, 30.0, 0.0)
    for pending in range(40, 44):
        controller.arrive(pending, "g", "", 0, 30.0, 0.0)
    assert engine.waited_s[43] == 43 * 1.5
    assert controller.release(0.05) == [(each, None) for each in range(40, 44)]
    controller.queue.check_integrity()
    controller.arrive(50, "g", "", 0, 30.0, 1.0)
    assert engine.sent[-1] == 50  # at once: nobody who wants less is before it
    assert len(controller.queue) == 40
    engine.waited_s.clear()
    for tick in range(40):
        controller.release(1.0 + tick * RETRY_EVERY_S)
    assert set(engine.waited_s) == set(range(40))  # each has its turn
    engine.strict = set(range(39))
    assert [
        pending for tick in range(40) for pending, _ in controller.release(50.0 + tick * RETRY_EVERY_S)
    ] == [39]
    engine.strict.clear()
    engine.want_as_much = {60}
    controller.arrive(60, "g", "", 5, 30.0, 100.0)
    found = [pending for _ in range(5) for pending, _ in controller.release(100.0)]
    assert sorted(found) == [*range(39), 60]
    assert found.index(60) >= 16  # those who were deferred before it are result first
    assert not controller.queue
    controller.queue.check_integrity()


def test_who_wants_no_less_keeps_behind_but_has_its_turn() -> None:
    engine = Engine(slow=True, room=1_000)
    controller: AdmissionController[int] = AdmissionController(engine, 100, 60.0)
    for pending in range(10):
        controller.arrive(pending, "g", "", 0, 30.0, 0.0)
    controller.release(1.0)
    engine.waited_s.clear()
    for tick in range(20):
        controller.release(2.0 + tick * RETRY_EVERY_S / 20)
    assert len(engine.waited_s) <= 2  # the first, and one in turn: what is in vain for one is for most
    engine.slow, engine.strict = False, {0}  # the first is a prompt too long
    sent = [pending for tick in range(10) for pending, _ in controller.release(3.0 + tick)]
    assert sorted(sent) == list(range(1, 10))
    engine.strict.clear()
    assert controller.release(20.0) == [(0, None)]


def test_who_takes_the_place_of_several_goes_behind_them_and_without_a_queue_not_at_all() -> None:
    engine = Engine(free=False, exceeding={1, 2, 5, 9})
    controller: AdmissionController[int] = AdmissionController(engine, 6, 60.0)
    for pending in range(1, 7):
        controller.arrive(pending, "g", "other" if pending == 5 else "", 0, 30.0 + pending, 0.0)
    while controller.queue:
        engine.free = True
        controller.release(1.0)
        if len(engine.sent) == 3:
            controller.arrive(7, "g", "", 0, 90.0, 1.0)
    assert [each for each in engine.sent if each != 5] == [3, 4, 6, 7, 1, 2]
    assert engine.sent.index(5) < 3  # its tenant has no less than the others
    controller.queue.check_integrity()
    without: AdmissionController[int] = AdmissionController(engine, 0, 60.0)
    assert why(without.arrive(9, "g", "", 0, 30.0, 2.0)) == "long"
    assert 9 not in engine.sent


def test_groups_take_turns_and_all_who_may_go_do() -> None:
    engine = Engine(free=False, room=1_000)
    controller: AdmissionController[int] = AdmissionController(engine, 1_000, 60.0)
    for pending in range(200):
        controller.arrive(pending, "many", "", 0, 60.0, 0.0)
    for pending in range(200, 240):
        controller.arrive(pending, f"group {pending}", "", 0, 60.0, 0.0)
    engine.free = True
    seen: list[int] = []
    while left := controller.release(1.0):
        assert len(left) == RELEASED_MAX or not controller.queue
        seen += [pending for pending, _ in left]
    assert sorted(seen) == list(range(240))
    assert max(seen.index(pending) for pending in range(200, 240)) < 50


def test_who_leaves_while_it_is_deferred_is_kept_nowhere() -> None:
    engine = Engine(slow=True)
    controller: AdmissionController[int] = AdmissionController(engine, 20, 1e9)
    controller.arrive(0, "g", "", 0, 1e9, 0.0)
    for tick in range(1, 50):
        for pending in range(tick * 10, tick * 10 + 10):
            controller.arrive(pending, "g", "", 0, 1e9, tick / 20)
            engine.gone.add(pending)
        controller.release(tick / 20)  # they are deferred: 0 waits before them
        assert all(entry.deferred for entry in controller.queue)
        controller.expire(tick / 20)
        controller.queue.check_integrity()
    assert [entry.pending for entry in controller.queue._groups["g"].retry] == [0]


def test_who_leaves_while_it_is_deferred_is_not_sent() -> None:
    engine = Engine(slow=True, room=10)
    controller: AdmissionController[int] = AdmissionController(engine, 20, 60.0)
    for pending in range(6):
        controller.arrive(pending, "g", "", 0, 60.0 + pending, 0.0)
    controller.release(0.0)
    engine.slow, engine.strict, engine.gone = False, {1}, {0, 2, 4}
    assert controller.release(RETRY_EVERY_S) == []  # 1 is the first of them, and the turn is its own
    assert controller.release(2 * RETRY_EVERY_S) == [(3, None), (5, None)]
    assert engine.sent == [3, 5]
    assert [entry.pending for entry in controller.queue] == [1]
    controller.queue.check_integrity()


def test_more_tenants_than_are_told_apart_share_a_place_in_line() -> None:
    controller: AdmissionController[int] = AdmissionController(Engine(free=False), 5_000, 60.0)
    for pending in range(4_000):
        controller.arrive(pending, "g", f"t{pending}", pending % 2, 60.0, 0.0)
    tenants = {entry.tenant for entry in controller.queue}
    assert len(tenants) == TENANTS_MAX + 1
    assert sum(entry.tenant == "" for entry in controller.queue) == 4_000 - TENANTS_MAX
    controller.queue.check_integrity()


def test_deadlines_who_is_gone_and_an_end() -> None:
    engine = Engine(free=False)
    controller: AdmissionController[int] = AdmissionController(engine, 10, 60.0)
    for pending, ttft_s in ((1, 10.0), (2, 1e9), (3, 1e9), (4, 1e9)):
        controller.arrive(pending, "g", "", 0, ttft_s, 0.0)
    engine.gone = {3}
    assert [(pending, refusal.reason) for pending, refusal in controller.expire(10.0)] == [(1, "deadline")]
    assert len(controller.queue) == 2
    controller.limit_wait(30.0)
    controller.arrive(5, "g", "", 0, 1e9, 20.0)
    assert controller.expire(29.0) == []
    assert sorted(pending for pending, _ in controller.expire(31.0)) == [2, 4, 5]
    assert not controller.queue
    controller.queue.check_integrity()


def test_a_full_line_lets_only_the_more_urgent_in() -> None:
    engine = Engine(free=False)
    controller: AdmissionController[int] = AdmissionController(engine, 2, 60.0)
    controller.arrive(1, "g", "", 0, 30.0, 0.0)
    controller.arrive(2, "h", "", 1, 30.0, 0.0)
    assert why(controller.arrive(3, "g", "", 0, 30.0, 0.0)) == "queue_full"
    refusal, out = controller.arrive(4, "g", "", 1, 30.0, 0.0)
    assert refusal is None
    assert out is not None
    assert (out[0], out[1].reason) == (1, "queue_full")
    assert why(controller.arrive(5, "h", "", 1, 30.0, 0.0)) == "queue_full"
    controller.queue.check_integrity()


def test_a_tenant_that_asks_much_makes_no_other_wait_longer() -> None:
    engine = Engine(free=False)
    controller: AdmissionController[int] = AdmissionController(engine, 100, 60.0)
    for pending in range(40):
        controller.arrive(pending, "g", "many", 0, 60.0, 0.0)
    for pending in range(100, 104):
        controller.arrive(pending, "g", "few", 0, 60.0, 1.0)
    controller.arrive(200, "g", "many", 1, 60.0, 2.0)
    while controller.queue:
        engine.free = True
        assert len(controller.release(3.0)) == 1
    assert engine.sent[0] == 200  # the more urgent first, whoever it is
    assert {100, 101, 102, 103} <= set(engine.sent[1:10])
    assert [each for each in engine.sent if each < 100] == list(range(40))


def test_what_was_served_while_nobody_waited_is_nobodys_debt() -> None:
    engine = Engine(room=1_000_000)
    controller: AdmissionController[int] = AdmissionController(engine, 1_000, 60.0)
    for pending in range(-10_000, 0):
        assert controller.arrive(pending, "g", "regular", 0, 60.0, 0.0) == (None, None)
    engine.sent.clear()
    engine.free, engine.room = False, 0
    for pending in range(0, 200, 4):  # each second both of them more than the engine serves
        for number, tenant in enumerate(("new", "new", "regular", "regular")):
            controller.arrive(pending + number, "g", tenant, 0, 60.0, pending / 4)
        engine.free, engine.room = True, 1
        assert len(controller.release(pending / 4)) == 1
    of_regular = sum(pending % 4 >= 2 for pending in engine.sent)
    assert len(engine.sent) == 50
    assert 24 <= of_regular <= 26


@pytest.mark.parametrize(("group", "priority"), [("another model", 0), ("g", -1)])
def test_who_waits_for_something_else_is_no_measure_of_what_one_that_comes_may_have(
    group: str, priority: int
) -> None:
    engine = Engine(free=False)
    controller: AdmissionController[int] = AdmissionController(engine, 1_000, 1e9)
    controller.arrive(-1, group, "never served", priority, 1e9, 0.0)
    engine.strict.add(-1)
    for pending in range(0, 400, 2):
        controller.arrive(pending, "g", "regular", 0, 1e9, 0.0)
        controller.arrive(pending + 1, "g", "regular" if pending < 200 else "new", 0, 1e9, 0.0)
        engine.free, engine.room = True, 1
        controller.release(1.0)
    late = engine.sent[100:]
    assert len(late) == 100
    assert 45 <= sum(pending % 2 for pending in late if pending > 200) <= 55


def test_groups_and_priorities_leave_nothing_behind() -> None:
    engine = Engine(room=1_000_000)
    controller: AdmissionController[int] = AdmissionController(engine, 1_000, 60.0)
    for pending in range(1_000):
        engine.free = False
        controller.arrive(pending, f"g{pending}", "", pending % 200 - 100, 60.0, 0.0)
        engine.free = True
        assert len(controller.release(0.0)) == 1
    assert len(controller.queue._fairness) <= FAIRNESSES_MAX


def test_a_tenant_that_fills_the_queue_makes_room_for_others() -> None:
    controller: AdmissionController[int] = AdmissionController(Engine(free=False), 4, 60.0)
    for pending in range(4):
        controller.arrive(pending, "g", "many", 0, 60.0, float(pending))
    _, out = controller.arrive(10, "g", "few", 0, 60.0, 5.0)
    assert out is not None
    assert out[0] == 3
    _, out = controller.arrive(11, "g", "few", 0, 60.0, 5.0)
    assert out is not None
    assert out[0] == 2
    assert why(controller.arrive(12, "g", "few", 0, 60.0, 5.0)) == "queue_full"  # two each
    controller.queue.check_integrity()


def test_exceeding_ones_that_fill_the_queue_make_room_for_others_of_their_tenant() -> None:
    controller: AdmissionController[int] = AdmissionController(
        Engine(free=False, exceeding={0, 1, 2, 3, 20}), 4, 60.0
    )
    for pending in range(4):
        controller.arrive(pending, "g", "", int(pending == 3), 60.0, float(pending))
    assert why(controller.arrive(20, "g", "", 0, 60.0, 4.0)) == "queue_full"  # exceeding, too
    out = [controller.arrive(pending, "g", "", 0, 60.0, 5.0)[1] for pending in (10, 11, 12)]
    assert [each and (each[0], each[1].reason) for each in out] == [(i, "queue_full") for i in (2, 1, 0)]
    assert why(controller.arrive(13, "g", "", 0, 60.0, 6.0)) == "queue_full"  # more urgent, or not exceeding
    controller.queue.check_integrity()
    few: AdmissionController[int] = AdmissionController(Engine(free=False, exceeding={0, 1}), 4, 60.0)
    for pending in range(4):
        few.arrive(pending, "g", "ab"[pending // 2], 0, 60.0, 0.0)
    assert why(few.arrive(4, "g", "b", 0, 60.0, 0.0)) == "queue_full"  # another tenant's share is its own


def test_of_a_length_that_decode_can_take_in_part_they_are_between_the_shorter_and_the_longer() -> None:
    engine = Engine(free=False, exceeding={1}, marginal={2, 5, 9})
    controller: AdmissionController[int] = AdmissionController(engine, 3, 60.0)
    for pending in range(1, 4):
        controller.arrive(pending, "g", "", 0, 60.0, float(pending))
    out = [controller.arrive(pending, "g", "", 0, 60.0, 4.0)[1] for pending in (4, 5, 6, 7)]
    assert [each and each[0] for each in out] == [1, None, 2, None]  # for 4 and 6; 5 and 7 get no place
    controller.queue.check_integrity()
    without: AdmissionController[int] = AdmissionController(Engine(marginal={9}), 0, 60.0)
    assert why(without.arrive(9, "g", "", 0, 30.0, 0.0)) == ""  # decode itself decides


@pytest.mark.parametrize("exceeding", ["exceeding", "marginal"])
def test_however_many_exceeding_ones_come_a_short_queue_serves_the_others(exceeding: str) -> None:
    """Five a second can be served, of 4.5 that are not exceeding and ten that are."""
    engine = Engine(**{exceeding: set(range(0, 100_000, 2))})  # type: ignore[arg-type]
    controller: AdmissionController[int] = AdmissionController(engine, 50, 30.0)
    came: list[int] = []
    for tick in range(20 * 100):
        now_s = tick / 20
        engine.room = min(engine.room, 0) + int(tick % 4 == 0)
        engine.free = engine.room > 0
        controller.release(now_s)
        controller.expire(now_s)
        come = [tick * 2] * (tick % 2) + [tick * 2 + 1] * (tick % 40 < 9)
        came += [pending for pending in come if pending % 2]
        for pending in come:
            controller.arrive(pending, "g", "", 0, 30.0, now_s)
    sent = [pending for pending in engine.sent if pending % 2]
    waiting = [entry.pending for entry in controller.queue if entry.pending % 2]
    assert sorted(sent + waiting) == came
    assert 400 < len(sent) < len(engine.sent) < 520  # and the exceeding ones have what is left


@pytest.mark.parametrize("seed", range(3))
def test_each_leaves_once_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    engine = Engine()
    controller: AdmissionController[int] = AdmissionController(engine, 40, 30.0)
    left: list[int] = []
    now_s, arrived = 0.0, 3_000
    for pending in range(arrived):
        now_s += chance.choice((0.0, 0.1, 1.0, -0.5, 100.0 if chance.random() < 0.01 else 0.2))
        engine.free, engine.slow = chance.random() < 0.5, chance.random() < 0.2
        if chance.random() < 0.05:
            engine.late.add(chance.randrange(pending + 1))
        before = len(engine.sent)
        refusal, out = controller.arrive(
            pending,
            chance.randrange(3),
            chance.choice("abc"),
            chance.randrange(-2, 3),
            chance.uniform(1, 60),
            now_s,
        )
        left += [pending] * (refusal is not None) + ([out[0]] if out else []) + engine.sent[before:]
        left += [each for each, _ in (*controller.expire(now_s), *controller.release(now_s))]
        controller.queue.check_integrity()
    waiting = [entry.pending for entry in controller.queue]
    assert sorted(left + waiting) == list(range(arrived)), seed
    assert len(waiting) <= 40


def test_ten_thousand_that_wait_cost_little_time_and_memory() -> None:
    chance = random.Random(1)
    queue: WaitQueue[int] = WaitQueue(10_000)
    tracemalloc.start()
    began_s = time.process_time()
    entries = [
        QueuedRequest(number, "g", "", chance.randrange(3), 0.0, chance.uniform(1, 60), 0.5)
        for number in range(20_000)
    ]
    out = [queue.add(entry) for entry in entries]
    assert len(queue) == 10_000
    assert sum(each is not None for each in out) == 10_000
    assert queue.ahead_s("g", 1) <= 5_000.0
    order = []
    while (first := queue.first("g")) is not None:
        order.append((-first.priority, first.deadline_s))
        queue.remove(first)
    took_s = time.process_time() - began_s
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert order == sorted(order)
    assert took_s < 5.0, f"{took_s:.1f} s"  # under tracemalloc, which makes it several times slower
    assert peak < 20_000_000, peak
