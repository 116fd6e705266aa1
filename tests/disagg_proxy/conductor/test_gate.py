"""Who waits, in which order, and that each leaves once."""

from __future__ import annotations

import random
import time
import tracemalloc
from dataclasses import dataclass, field

import pytest

from moonpool.disagg_proxy.conductor.admission import Refusal
from moonpool.disagg_proxy.conductor.demand import Dear
from moonpool.disagg_proxy.conductor.gate import RELEASED_MAX, TURN_EVERY_S, Asked, Gate, Send
from moonpool.disagg_proxy.conductor.line import FAIRNESSES_MAX, TENANTS_MAX, Line, Waiting


@dataclass
class Engine:
    """Takes one request after the other; a ticket is a number."""

    free: bool = True
    slow: bool = False  # decode is
    strict: set[int] = field(default_factory=set)  # for whom it is
    want_as_much: set[int] = field(default_factory=set)
    room: int = 1
    late: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    sent: list[int] = field(default_factory=list)
    waited_s: dict[int, float] = field(default_factory=dict)
    dear: set[int] = field(default_factory=set)
    dearer: set[int] = field(default_factory=set)  # than others, less than those
    beside: set[int] = field(default_factory=set)  # who is computed elsewhere than the others

    def is_busy(self, ticket: int, now_s: float) -> bool:
        return not self.free

    def share(self, ticket: int) -> int:
        return 2

    def is_gone(self, ticket: int) -> bool:
        return ticket in self.gone

    def gap_s(self, ticket: int) -> float:
        return 0.01 if self.slow or ticket in self.strict | self.want_as_much else 0.1

    def how_dear(self, ticket: int, now_s: float) -> Dear:
        return Dear.NONE if ticket in self.dear else Dear.SOME if ticket in self.dearer else Dear.ALL

    def ask(self, ticket: int, waited_s: float, now_s: float, send: Send, *, dear: bool = False) -> Asked:
        if send is Send.BESIDE and ticket in self.beside and not self.slow:
            self.sent.append(ticket)
            return Asked(0.1, None, sent=True)
        self.waited_s[ticket] = waited_s
        if dear:
            return Asked(3.0, Refusal("long", 1.0, ""))
        if ticket in self.late:
            return Asked(3.0, Refusal("ttft", 1.0, ""), final=True)
        if self.slow or ticket in self.strict:
            return Asked(3.0, Refusal("gap", 1.0, ""))
        if send is Send.NOW:
            self.sent.append(ticket)
            self.room -= 1
            self.free = self.room > 0
        return Asked(3.0, None, sent=send is Send.NOW, prompt=100)


def why(found: tuple[Refusal | None, object]) -> str:
    return "" if found[0] is None else found[0].reason


def test_without_a_queue_all_is_decided_at_once() -> None:
    engine = Engine(slow=True)
    gate: Gate[int] = Gate(engine, 0, 10.0)
    assert why(gate.arrive(1, "g", "", 0, 30.0, 0.0)) == "gap"
    engine.slow = engine.free = False
    assert why(gate.arrive(2, "g", "", 0, 30.0, 0.0)) == ""
    assert engine.sent == [2]


def test_the_most_urgent_goes_first_then_who_must_be_there_first() -> None:
    engine = Engine(free=False)
    gate: Gate[int] = Gate(engine, 10, 60.0)
    for ticket, priority, ttft_s in ((1, 0, 50.0), (2, 0, 20.0), (3, 5, 60.0), (4, 0, 50.0)):
        assert gate.arrive(ticket, "g", "", priority, ttft_s, 0.0) == (None, None)
    assert engine.waited_s == {1: 0.0, 2: 1.5, 3: 0.0, 4: 4.5}  # what is before them, on two instances
    assert gate.release(1.0) == []
    for _ in range(4):
        engine.free = True
        (_, refusal) = gate.release(2.0)[0]
        assert refusal is None
    assert engine.sent == [3, 2, 1, 4]
    assert not gate.line


def test_nobody_passes_those_who_wait_but_the_more_urgent() -> None:
    engine = Engine(free=False)
    gate: Gate[int] = Gate(engine, 10, 60.0)
    gate.arrive(1, "g", "", 0, 30.0, 0.0)
    engine.free = True
    gate.arrive(2, "g", "", 0, 30.0, 0.0)
    assert engine.sent == []
    gate.arrive(3, "g", "", 1, 30.0, 0.0)
    assert engine.sent == [3]
    engine.free = True
    gate.arrive(4, "other", "", 0, 30.0, 0.0)  # another model's
    assert engine.sent == [3, 4]


def test_who_is_computed_where_nobody_waits_for_does_not_wait() -> None:
    engine = Engine(free=False, beside={2, 3, 5})
    gate: Gate[int] = Gate(engine, 10, 60.0)
    gate.arrive(1, "g", "", 0, 30.0, 0.0)
    assert gate.arrive(2, "g", "", 0, 30.0, 0.0) == (None, None)
    assert (engine.sent, len(gate.line)) == ([2], 1)
    engine.slow = engine.free = True  # 1 is set aside, for decode's sake
    gate.release(1.0)
    engine.slow = engine.free = False
    gate.arrive(3, "g", "", 0, 30.0, 1.0)
    assert engine.sent == [2]  # it waits for the same
    gate.arrive(4, "g", "", 1, 30.0, 1.0)
    gate.arrive(5, "g", "", 1, 30.0, 1.0)  # the more urgent has only 4 before it
    assert engine.sent == [2, 5]


def test_who_cannot_be_in_time_does_not_wait() -> None:
    engine = Engine(free=False, late={1})
    gate: Gate[int] = Gate(engine, 10, 60.0)
    assert why(gate.arrive(1, "g", "", 0, 30.0, 0.0)) == "ttft"
    gate.arrive(2, "g", "", 0, 30.0, 0.0)
    gate.arrive(3, "g", "", 0, 30.0, 0.0)
    engine.late, engine.free = {2}, True
    assert [(ticket, refusal and refusal.reason) for ticket, refusal in gate.release(5.0)] == [
        (2, "ttft"),
        (3, None),
    ]


def test_a_decode_that_is_too_slow_is_waited_for() -> None:
    engine = Engine(slow=True)
    gate: Gate[int] = Gate(engine, 10, 60.0)
    assert gate.arrive(1, "g", "", 0, 30.0, 0.0) == (None, None)
    assert gate.release(1.0) == []
    engine.slow = False
    assert gate.release(2.0) == [(1, None)]


def test_who_wants_more_than_decode_gives_now_keeps_nobody_from_an_engine() -> None:
    engine = Engine(strict=set(range(40)), room=1_000)
    gate: Gate[int] = Gate(engine, 100, 60.0)
    for ticket in range(40):
        gate.arrive(ticket, "g", f"t{ticket}", 5, 30.0, 0.0)
    for ticket in range(40, 44):
        gate.arrive(ticket, "g", "", 0, 30.0, 0.0)
    assert engine.waited_s[43] == 43 * 1.5
    assert gate.release(0.05) == [(each, None) for each in range(40, 44)]
    gate.line.check_integrity()
    gate.arrive(50, "g", "", 0, 30.0, 1.0)
    assert engine.sent[-1] == 50  # at once: nobody who wants less is before it
    assert len(gate.line) == 40
    engine.waited_s.clear()
    for tick in range(40):
        gate.release(1.0 + tick * TURN_EVERY_S)
    assert set(engine.waited_s) == set(range(40))  # each has its turn
    engine.strict = set(range(39))
    assert [ticket for tick in range(40) for ticket, _ in gate.release(50.0 + tick * TURN_EVERY_S)] == [39]
    engine.strict.clear()
    engine.want_as_much = {60}
    gate.arrive(60, "g", "", 5, 30.0, 100.0)
    found = [ticket for _ in range(5) for ticket, _ in gate.release(100.0)]
    assert sorted(found) == [*range(39), 60]
    assert found.index(60) >= 16  # those who were aside before it are asked first
    assert not gate.line
    gate.line.check_integrity()


def test_who_wants_no_less_keeps_behind_but_has_its_turn() -> None:
    engine = Engine(slow=True, room=1_000)
    gate: Gate[int] = Gate(engine, 100, 60.0)
    for ticket in range(10):
        gate.arrive(ticket, "g", "", 0, 30.0, 0.0)
    gate.release(1.0)
    engine.waited_s.clear()
    for tick in range(20):
        gate.release(2.0 + tick * TURN_EVERY_S / 20)
    assert len(engine.waited_s) <= 2  # the first, and one in turn: what is in vain for one is for most
    engine.slow, engine.strict = False, {0}  # the first is a prompt too long
    sent = [ticket for tick in range(10) for ticket, _ in gate.release(3.0 + tick)]
    assert sorted(sent) == list(range(1, 10))
    engine.strict.clear()
    assert gate.release(20.0) == [(0, None)]


def test_who_takes_the_place_of_several_goes_behind_them_and_without_a_queue_not_at_all() -> None:
    engine = Engine(free=False, dear={1, 2, 5, 9})
    gate: Gate[int] = Gate(engine, 6, 60.0)
    for ticket in range(1, 7):
        gate.arrive(ticket, "g", "other" if ticket == 5 else "", 0, 30.0 + ticket, 0.0)
    while gate.line:
        engine.free = True
        gate.release(1.0)
        if len(engine.sent) == 3:
            gate.arrive(7, "g", "", 0, 90.0, 1.0)
    assert [each for each in engine.sent if each != 5] == [3, 4, 6, 7, 1, 2]
    assert engine.sent.index(5) < 3  # its tenant has no less than the others
    gate.line.check_integrity()
    without: Gate[int] = Gate(engine, 0, 60.0)
    assert why(without.arrive(9, "g", "", 0, 30.0, 2.0)) == "long"
    assert 9 not in engine.sent


def test_groups_take_turns_and_all_who_may_go_do() -> None:
    engine = Engine(free=False, room=1_000)
    gate: Gate[int] = Gate(engine, 1_000, 60.0)
    for ticket in range(200):
        gate.arrive(ticket, "many", "", 0, 60.0, 0.0)
    for ticket in range(200, 240):
        gate.arrive(ticket, f"group {ticket}", "", 0, 60.0, 0.0)
    engine.free = True
    seen: list[int] = []
    while left := gate.release(1.0):
        assert len(left) == RELEASED_MAX or not gate.line
        seen += [ticket for ticket, _ in left]
    assert sorted(seen) == list(range(240))
    assert max(seen.index(ticket) for ticket in range(200, 240)) < 50


def test_who_leaves_while_it_is_aside_is_kept_nowhere() -> None:
    engine = Engine(slow=True)
    gate: Gate[int] = Gate(engine, 20, 1e9)
    gate.arrive(0, "g", "", 0, 1e9, 0.0)
    for tick in range(1, 50):
        for ticket in range(tick * 10, tick * 10 + 10):
            gate.arrive(ticket, "g", "", 0, 1e9, tick / 20)
            engine.gone.add(ticket)
        gate.release(tick / 20)  # they are set aside: 0 waits before them
        assert all(entry.aside for entry in gate.line)
        gate.expire(tick / 20)
        gate.line.check_integrity()
    assert [entry.ticket for entry in gate.line._groups["g"].turn] == [0]


def test_who_leaves_while_it_is_aside_is_not_sent() -> None:
    engine = Engine(slow=True, room=10)
    gate: Gate[int] = Gate(engine, 20, 60.0)
    for ticket in range(6):
        gate.arrive(ticket, "g", "", 0, 60.0 + ticket, 0.0)
    gate.release(0.0)
    engine.slow, engine.strict, engine.gone = False, {1}, {0, 2, 4}
    assert gate.release(TURN_EVERY_S) == []  # 1 is the first of them, and the turn is its own
    assert gate.release(2 * TURN_EVERY_S) == [(3, None), (5, None)]
    assert engine.sent == [3, 5]
    assert [entry.ticket for entry in gate.line] == [1]
    gate.line.check_integrity()


def test_more_tenants_than_are_told_apart_share_a_place_in_line() -> None:
    gate: Gate[int] = Gate(Engine(free=False), 5_000, 60.0)
    for ticket in range(4_000):
        gate.arrive(ticket, "g", f"t{ticket}", ticket % 2, 60.0, 0.0)
    tenants = {entry.tenant for entry in gate.line}
    assert len(tenants) == TENANTS_MAX + 1
    assert sum(entry.tenant == "" for entry in gate.line) == 4_000 - TENANTS_MAX
    gate.line.check_integrity()


def test_deadlines_who_is_gone_and_an_end() -> None:
    engine = Engine(free=False)
    gate: Gate[int] = Gate(engine, 10, 60.0)
    for ticket, ttft_s in ((1, 10.0), (2, 1e9), (3, 1e9), (4, 1e9)):
        gate.arrive(ticket, "g", "", 0, ttft_s, 0.0)
    engine.gone = {3}
    assert [(ticket, refusal.reason) for ticket, refusal in gate.expire(10.0)] == [(1, "deadline")]
    assert len(gate.line) == 2
    gate.hurry(30.0)
    gate.arrive(5, "g", "", 0, 1e9, 20.0)
    assert gate.expire(29.0) == []
    assert sorted(ticket for ticket, _ in gate.expire(31.0)) == [2, 4, 5]
    assert not gate.line
    gate.line.check_integrity()


def test_a_full_line_lets_only_the_more_urgent_in() -> None:
    engine = Engine(free=False)
    gate: Gate[int] = Gate(engine, 2, 60.0)
    gate.arrive(1, "g", "", 0, 30.0, 0.0)
    gate.arrive(2, "h", "", 1, 30.0, 0.0)
    assert why(gate.arrive(3, "g", "", 0, 30.0, 0.0)) == "queue_full"
    refusal, out = gate.arrive(4, "g", "", 1, 30.0, 0.0)
    assert refusal is None
    assert out is not None
    assert (out[0], out[1].reason) == (1, "queue_full")
    assert why(gate.arrive(5, "h", "", 1, 30.0, 0.0)) == "queue_full"
    gate.line.check_integrity()


def test_a_tenant_that_asks_much_makes_no_other_wait_longer() -> None:
    engine = Engine(free=False)
    gate: Gate[int] = Gate(engine, 100, 60.0)
    for ticket in range(40):
        gate.arrive(ticket, "g", "many", 0, 60.0, 0.0)
    for ticket in range(100, 104):
        gate.arrive(ticket, "g", "few", 0, 60.0, 1.0)
    gate.arrive(200, "g", "many", 1, 60.0, 2.0)
    while gate.line:
        engine.free = True
        assert len(gate.release(3.0)) == 1
    assert engine.sent[0] == 200  # the more urgent first, whoever it is
    assert {100, 101, 102, 103} <= set(engine.sent[1:10])
    assert [each for each in engine.sent if each < 100] == list(range(40))


def test_what_was_served_while_nobody_waited_is_nobodys_debt() -> None:
    engine = Engine(room=1_000_000)
    gate: Gate[int] = Gate(engine, 1_000, 60.0)
    for ticket in range(-10_000, 0):
        assert gate.arrive(ticket, "g", "regular", 0, 60.0, 0.0) == (None, None)
    engine.sent.clear()
    engine.free, engine.room = False, 0
    for ticket in range(0, 200, 4):  # each second both of them more than the engine serves
        for number, tenant in enumerate(("new", "new", "regular", "regular")):
            gate.arrive(ticket + number, "g", tenant, 0, 60.0, ticket / 4)
        engine.free, engine.room = True, 1
        assert len(gate.release(ticket / 4)) == 1
    of_regular = sum(ticket % 4 >= 2 for ticket in engine.sent)
    assert len(engine.sent) == 50
    assert 24 <= of_regular <= 26


@pytest.mark.parametrize(("group", "priority"), [("another model", 0), ("g", -1)])
def test_who_waits_for_something_else_is_no_measure_of_what_one_that_comes_may_have(
    group: str, priority: int
) -> None:
    engine = Engine(free=False)
    gate: Gate[int] = Gate(engine, 1_000, 1e9)
    gate.arrive(-1, group, "never served", priority, 1e9, 0.0)
    engine.strict.add(-1)
    for ticket in range(0, 400, 2):
        gate.arrive(ticket, "g", "regular", 0, 1e9, 0.0)
        gate.arrive(ticket + 1, "g", "regular" if ticket < 200 else "new", 0, 1e9, 0.0)
        engine.free, engine.room = True, 1
        gate.release(1.0)
    late = engine.sent[100:]
    assert len(late) == 100
    assert 45 <= sum(ticket % 2 for ticket in late if ticket > 200) <= 55


def test_groups_and_priorities_leave_nothing_behind() -> None:
    engine = Engine(room=1_000_000)
    gate: Gate[int] = Gate(engine, 1_000, 60.0)
    for ticket in range(1_000):
        engine.free = False
        gate.arrive(ticket, f"g{ticket}", "", ticket % 200 - 100, 60.0, 0.0)
        engine.free = True
        assert len(gate.release(0.0)) == 1
    assert len(gate.line._fairness) <= FAIRNESSES_MAX


def test_a_tenant_that_fills_the_line_makes_room_for_others() -> None:
    gate: Gate[int] = Gate(Engine(free=False), 4, 60.0)
    for ticket in range(4):
        gate.arrive(ticket, "g", "many", 0, 60.0, float(ticket))
    _, out = gate.arrive(10, "g", "few", 0, 60.0, 5.0)
    assert out is not None
    assert out[0] == 3
    _, out = gate.arrive(11, "g", "few", 0, 60.0, 5.0)
    assert out is not None
    assert out[0] == 2
    assert why(gate.arrive(12, "g", "few", 0, 60.0, 5.0)) == "queue_full"  # two each
    gate.line.check_integrity()


def test_dear_ones_that_fill_the_line_make_room_for_others_of_their_tenant() -> None:
    gate: Gate[int] = Gate(Engine(free=False, dear={0, 1, 2, 3, 20}), 4, 60.0)
    for ticket in range(4):
        gate.arrive(ticket, "g", "", int(ticket == 3), 60.0, float(ticket))
    assert why(gate.arrive(20, "g", "", 0, 60.0, 4.0)) == "queue_full"  # dear, too
    out = [gate.arrive(ticket, "g", "", 0, 60.0, 5.0)[1] for ticket in (10, 11, 12)]
    assert [each and (each[0], each[1].reason) for each in out] == [(i, "queue_full") for i in (2, 1, 0)]
    assert why(gate.arrive(13, "g", "", 0, 60.0, 6.0)) == "queue_full"  # more urgent, or not dear
    gate.line.check_integrity()
    few: Gate[int] = Gate(Engine(free=False, dear={0, 1}), 4, 60.0)
    for ticket in range(4):
        few.arrive(ticket, "g", "ab"[ticket // 2], 0, 60.0, 0.0)
    assert why(few.arrive(4, "g", "b", 0, 60.0, 0.0)) == "queue_full"  # another tenant's share is its own


def test_of_a_length_that_decode_can_take_in_part_they_are_between_the_shorter_and_the_longer() -> None:
    engine = Engine(free=False, dear={1}, dearer={2, 5, 9})
    gate: Gate[int] = Gate(engine, 3, 60.0)
    for ticket in range(1, 4):
        gate.arrive(ticket, "g", "", 0, 60.0, float(ticket))
    out = [gate.arrive(ticket, "g", "", 0, 60.0, 4.0)[1] for ticket in (4, 5, 6, 7)]
    assert [each and each[0] for each in out] == [1, None, 2, None]  # for 4 and 6; 5 and 7 get no place
    gate.line.check_integrity()
    without: Gate[int] = Gate(Engine(dearer={9}), 0, 60.0)
    assert why(without.arrive(9, "g", "", 0, 30.0, 0.0)) == ""  # decode itself decides


@pytest.mark.parametrize("dear", ["dear", "dearer"])
def test_however_many_dear_ones_come_a_short_line_serves_the_others(dear: str) -> None:
    """Five a second can be served, of 4.5 that are not dear and ten that are."""
    engine = Engine(**{dear: set(range(0, 100_000, 2))})  # type: ignore[arg-type]
    gate: Gate[int] = Gate(engine, 50, 30.0)
    came: list[int] = []
    for tick in range(20 * 100):
        now_s = tick / 20
        engine.room = min(engine.room, 0) + int(tick % 4 == 0)
        engine.free = engine.room > 0
        gate.release(now_s)
        gate.expire(now_s)
        come = [tick * 2] * (tick % 2) + [tick * 2 + 1] * (tick % 40 < 9)
        came += [ticket for ticket in come if ticket % 2]
        for ticket in come:
            gate.arrive(ticket, "g", "", 0, 30.0, now_s)
    sent = [ticket for ticket in engine.sent if ticket % 2]
    waiting = [entry.ticket for entry in gate.line if entry.ticket % 2]
    assert sorted(sent + waiting) == came
    assert 400 < len(sent) < len(engine.sent) < 520  # and the dear ones have what is left


@pytest.mark.parametrize("seed", range(3))
def test_each_leaves_once_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    engine = Engine()
    gate: Gate[int] = Gate(engine, 40, 30.0)
    left: list[int] = []
    now_s, arrived = 0.0, 3_000
    for ticket in range(arrived):
        now_s += chance.choice((0.0, 0.1, 1.0, -0.5, 100.0 if chance.random() < 0.01 else 0.2))
        engine.free, engine.slow = chance.random() < 0.5, chance.random() < 0.2
        if chance.random() < 0.05:
            engine.late.add(chance.randrange(ticket + 1))
        before = len(engine.sent)
        refusal, out = gate.arrive(
            ticket,
            chance.randrange(3),
            chance.choice("abc"),
            chance.randrange(-2, 3),
            chance.uniform(1, 60),
            now_s,
        )
        left += [ticket] * (refusal is not None) + ([out[0]] if out else []) + engine.sent[before:]
        left += [each for each, _ in (*gate.expire(now_s), *gate.release(now_s))]
        gate.line.check_integrity()
    waiting = [entry.ticket for entry in gate.line]
    assert sorted(left + waiting) == list(range(arrived)), seed
    assert len(waiting) <= 40


def test_ten_thousand_that_wait_cost_little_time_and_memory() -> None:
    chance = random.Random(1)
    line: Line[int] = Line(10_000)
    tracemalloc.start()
    began_s = time.process_time()
    entries = [
        Waiting(number, "g", "", chance.randrange(3), 0.0, chance.uniform(1, 60), 0.5)
        for number in range(20_000)
    ]
    out = [line.add(entry) for entry in entries]
    assert len(line) == 10_000
    assert sum(each is not None for each in out) == 10_000
    assert line.ahead_s("g", 1) <= 5_000.0
    order = []
    while (first := line.first("g")) is not None:
        order.append((-first.priority, first.deadline_s))
        line.remove(first)
    took_s = time.process_time() - began_s
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert order == sorted(order)
    assert took_s < 5.0, f"{took_s:.1f} s"  # under tracemalloc, which makes it several times slower
    assert peak < 20_000_000, peak
