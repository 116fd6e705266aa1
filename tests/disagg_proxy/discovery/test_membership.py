"""What becomes of what sources say, with a clock of the test's own."""

from __future__ import annotations

import random

import pytest

from moonpool.disagg_proxy.discovery.membership import Membership, MembershipChanges
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.settings import EngineSpec

NOBODY: frozenset[str] = frozenset()


def engine(name: str, port: int = 0, **more: str) -> DiscoveredEngine:
    return DiscoveredEngine(EngineSpec(name, f"http://h:{port or abs(hash(name)) % 60_000 + 1}", **more))


A, B, C = engine("a", 1), engine("b", 2), engine("c", 3)


def leaves(changes: MembershipChanges) -> list[str]:
    return [name for name, _ in changes.leave]


def test_engines_join_at_once_and_leave_after_the_grace() -> None:
    members = Membership(["s"], grace_s=10)
    members.found("s", [A, B], NOBODY, 0)
    assert members.changes(0, 9) == MembershipChanges((), (A, B))
    assert members.changes(0, 9) == MembershipChanges((), ())
    members.found("s", [A], NOBODY, 100)
    assert members.changes(100, 9) == MembershipChanges((), ())
    assert members.missing == 1
    assert members.next_s() == 110
    assert members.changes(109.9, 9) == MembershipChanges((), ())
    assert members.changes(110, 9) == MembershipChanges((("b", "s has not named it for 10 s"),), ())
    assert members.next_s() is None


def test_an_engine_that_is_away_for_a_moment_never_leaves() -> None:
    members = Membership(["s"], grace_s=10)
    members.found("s", [A, B], NOBODY, 0)
    members.changes(0, 9)
    for now in range(0, 1000, 9):  # it flaps, and is there at least once in ten seconds
        members.found("s", [A], NOBODY, now)
        assert members.changes(now, 9) == MembershipChanges((), ())
        members.found("s", [A, B], NOBODY, now + 8)
        assert members.changes(now + 8, 9) == MembershipChanges((), ())


def test_an_engine_that_has_ended_leaves_at_once() -> None:
    members = Membership(["s"], grace_s=10)
    members.found("s", [A, B], NOBODY, 0)
    members.changes(0, 9)
    members.found("s", [A], frozenset("b"), 1)
    assert leaves(members.changes(1, 9)) == ["b"]


def test_a_source_that_fails_changes_nothing() -> None:
    members = Membership(["s"], grace_s=10)
    members.found("s", [A, B], NOBODY, 0)
    members.changes(0, 9)
    members.failed("s", "it is away")
    assert members.changes(10_000, 9) == MembershipChanges((), ())
    assert (members.sources["s"].why, len(members.sources["s"].engines)) == ("it is away", 2)


def test_another_address_is_another_engine() -> None:
    members = Membership(["s"])
    members.found("s", [A], NOBODY, 0)
    members.changes(0, 9)
    moved = engine("a", 4)
    members.found("s", [moved], NOBODY, 1)
    assert members.changes(1, 9) == MembershipChanges((("a", "s describes it otherwise now"),), (moved,))
    told = DiscoveredEngine(moved.spec, EventSource("a", "tcp://h:5557"))
    members.found("s", [told], NOBODY, 2)
    assert members.changes(2, 9).join == (told,)


def test_another_name_for_an_address_waits_for_nobody() -> None:
    members = Membership(["s"], grace_s=10)
    members.found("s", [A], NOBODY, 0)
    members.changes(0, 9)
    renamed = engine("z", 1)
    members.found("s", [renamed], NOBODY, 1)
    assert members.changes(1, 9) == MembershipChanges((("a", "it is called z now"),), (renamed,))


def test_of_duplicates_the_first_stays() -> None:
    members = Membership(["s", "t"], fixed=[C.spec])
    members.found("s", [A, engine("a", 9), engine("b", 1), engine("c", 7), engine("d", 3)], NOBODY, 0)
    members.found("t", [engine("a", 8), B], NOBODY, 0)
    assert members.changes(0, 9).join == (A, B)
    assert members.refused["duplicate"] == 4  # b at a's address, c and d of the fixed one, t's a
    members.found("s", [], frozenset("a"), 1)
    changes = members.changes(1, 9)
    assert (leaves(changes), changes.join) == (["a"], (engine("a", 8),))


def test_of_too_many_those_that_are_there_stay() -> None:
    members = Membership(["s"], engines_max=1024)
    offered = [engine(f"e{number}", number + 1) for number in range(2000)]
    members.found("s", offered, NOBODY, 0)
    assert members.changes(0, 1024).join == tuple(offered[:1024])
    assert members.refused["no_room"] == 976
    members.found("s", offered[::-1], NOBODY, 1)
    assert members.changes(1, 0) == MembershipChanges((), ())
    members.found("s", offered[5:], frozenset(each.name for each in offered[:5]), 2)
    changes = members.changes(2, 0)  # the places of those that leave are not free yet
    assert (len(changes.leave), changes.join) == (5, ())
    assert members.changes(3, 5).join == tuple(offered[1024:1029])


@pytest.mark.parametrize("sources", [1, 3])
def test_it_settles_to_what_is_said_whatever_was_said_before(rng: random.Random, sources: int) -> None:
    """Against the plain rule: after the grace exactly those are there that are offered."""
    names = [f"s{number}" for number in range(sources)]
    members = Membership(names, grace_s=5, engines_max=8)
    there: dict[str, DiscoveredEngine] = {}
    now = 0.0
    for _ in range(2000):
        now += rng.choice((0.0, 0.5, 3.0, 9.0))
        source = rng.choice(names)
        offered = [engine(each, rng.randrange(1, 9)) for each in rng.sample("abcdefghijkl", rng.randrange(7))]
        if rng.random() < 0.2:
            members.failed(source, "away")
        else:
            members.found(source, offered, frozenset(rng.sample("abcdef", rng.randrange(3))), now)
        changes = members.changes(now, max(0, 8 - len(there)))
        for name, _ in changes.leave:
            there.pop(name)
        for each in changes.join:
            assert each.name not in there
            there[each.name] = each
        members.check_integrity()
        assert len({each.spec.address for each in there.values()}) == len(there) <= 8
    for name in names:
        members.found(name, [A, B] if name == "s0" else [], NOBODY, now)
    for now_s in (now, now + 5, now + 5):
        changes = members.changes(now_s, 8)
        for name, _ in changes.leave:
            there.pop(name)
        there |= {each.name: each for each in changes.join}
    assert there == {"a": A, "b": B}
