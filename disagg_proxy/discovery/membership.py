"""Which engines the fleet should have, of what sources say: duplicates, absences, maxima. Pure.

    offered --room--> member --missing for the grace, or ended--> gone
                        ^ '--missing--> in grace --offered again--' |
                        '------------offered again------------------'

The first to come stays: an engine that is a member is not driven out by another that is offered under its
name or address by another source. Its own source may say that it has another address now; then it is another
engine, and the one before leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.disagg_proxy.discovery.source import DiscoveredEngine
from moonpool.disagg_proxy.settings import EngineSpec

OFFERED_MAX = 65_536  # by one source; the rest is not looked at


class MembershipChanges(NamedTuple):
    """What is to be done, in this order. why: of each name that leaves."""

    leave: tuple[tuple[str, str], ...]
    join: tuple[DiscoveredEngine, ...]


@dataclass(slots=True)
class SourceState:
    """What is known of one source. at_s: when it last said what there is, None: never; why: it cannot now."""

    name: str
    engines: dict[str, DiscoveredEngine] = field(default_factory=dict)
    at_s: float | None = None
    why: str = "it has not answered yet"
    updates: int = 0
    failures: int = 0
    invalid: int = 0


@dataclass(slots=True)
class _Member:
    found: DiscoveredEngine
    source: str
    missing_s: float | None = None  # since when
    ended: bool = False


class Membership:
    """fixed: engines that are there whatever the sources say. sources: their names; of two that offer the
    same the first counts. engines_max: members and fixed ones."""

    def __init__(
        self,
        sources: Sequence[str],
        *,
        fixed: Sequence[EngineSpec] = (),
        grace_s: float = 10.0,
        engines_max: int = 1024,
    ) -> None:
        self.sources = {name: SourceState(name) for name in sources}
        self.refused: Counter[str] = Counter()  # engines that are offered and not taken now, by reason
        self._fixed = tuple(fixed)
        self._grace_s = grace_s
        self._engines_max = engines_max
        self._members: dict[str, _Member] = {}

    @property
    def missing(self) -> int:
        """Members that their source does not offer."""
        return sum(member.missing_s is not None for member in self._members.values())

    def found(self, source: str, engines: Sequence[DiscoveredEngine], ended: Set[str], now_s: float) -> None:
        """A source says what there is."""
        state = self.sources[source]
        offered: dict[str, DiscoveredEngine] = {}
        for each in engines[:OFFERED_MAX]:
            offered.setdefault(each.name, each)
        state.engines, state.at_s, state.why = offered, now_s, ""
        state.invalid = len(engines) - len(offered)
        state.updates += 1
        for name, member in self._members.items():
            if member.source != source:
                continue
            if name in offered:
                member.missing_s, member.ended = None, False
            else:
                member.missing_s = now_s if member.missing_s is None else member.missing_s
                member.ended = member.ended or name in ended

    def failed(self, source: str, why: str) -> None:
        """A source cannot say what there is: what it said last is taken to be true."""
        state = self.sources[source]
        state.why = why
        state.failures += 1

    def changes(self, now_s: float, room: int) -> MembershipChanges:
        """What is to be done now; taken to be done by the caller. room: engines that may join now."""
        leave = dict(self._leaving(now_s))
        for name in leave:
            del self._members[name]
        self.refused.clear()
        names = {spec.name for spec in self._fixed}
        addresses = {spec.address for spec in self._fixed}
        by_address = {member.found.spec.address: name for name, member in self._members.items()}
        join: list[DiscoveredEngine] = []
        for state in self.sources.values():
            for each in state.engines.values():
                member = self._members.get(each.name)
                if member is not None and member.source == state.name:
                    continue
                if member is not None or each.name in names or each.spec.address in addresses:
                    self.refused["duplicate"] += 1
                    continue
                there = by_address.get(each.spec.address)
                if there is not None and self._members[there].missing_s is None:
                    self.refused["duplicate"] += 1
                    continue
                after = len(self._fixed) + len(self._members) - (there is not None)
                if len(join) >= room or after >= self._engines_max:
                    self.refused["no_room"] += 1
                    continue
                if there is not None:
                    leave[there] = f"it is called {each.name} now"
                    del self._members[there]
                join.append(each)
                by_address[each.spec.address] = each.name
                self._members[each.name] = _Member(each, state.name)
        return MembershipChanges(tuple(leave.items()), tuple(join))

    def cannot_join(self, name: str) -> None:
        """The fleet could not take an engine that was to join: it is none."""
        del self._members[name]
        self.refused["broken"] += 1

    def next_s(self) -> float | None:
        """When ``changes`` may have something new, if nothing happens before."""
        missing = [each.missing_s for each in self._members.values() if each.missing_s is not None]
        return min(missing) + self._grace_s if missing else None

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        addresses = [member.found.spec.address for member in self._members.values()]
        if len(set(addresses)) != len(addresses):
            raise AssertionError("two members have one address")
        if len(self._members) + len(self._fixed) > max(self._engines_max, len(self._fixed)):
            raise AssertionError("there are more members than there may be")

    def _leaving(self, now_s: float) -> Iterator[tuple[str, str]]:
        for name, member in self._members.items():
            offered = self.sources[member.source].engines.get(name)
            if offered is not None:
                if (offered.spec, offered.events) != (member.found.spec, member.found.events):
                    yield name, f"{member.source} describes it otherwise now"
            elif member.ended:
                yield name, f"{member.source} says that it has ended"
            elif member.missing_s is not None and now_s - member.missing_s >= self._grace_s:
                yield name, f"{member.source} has not named it for {self._grace_s:g} s"
