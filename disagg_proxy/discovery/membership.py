"""Decides which engines the fleet has, from the reports of the sources: duplicates, absences, maxima. Pure.

    offered --room--> member --missing for the grace, or ended--> gone
                        ^ '--missing--> in grace --offered again--' |
                        '------------offered again------------------'

The first one stays: a member is not replaced by an engine that another source offers under the same name or
address. Its own source may report another address for the name; then that is another engine, and the old one
leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.disagg_proxy.discovery.source import DiscoveredEngine
from moonpool.disagg_proxy.settings import EngineSpec

OFFERED_MAX = 65_536  # engines of one source; the rest is ignored


class MembershipChanges(NamedTuple):
    """What the caller does now, in this order. leave: (name, reason) pairs."""

    leave: tuple[tuple[str, str], ...]
    join: tuple[DiscoveredEngine, ...]


@dataclass(slots=True)
class SourceState:
    """The last report of one source.

    engines:           the engines of that report, by name.
    at_s:              its time; None: there was none.
    why:               the reason of a failure since; "": the source works.
    updates, failures: number of reports, and of failures.
    invalid:           engines of the last report that were dropped: duplicates, and those beyond the maximum.
    """

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
    missing_s: float | None = None  # missing from its source since; None: listed
    ended: bool = False


class Membership:
    """The members: engines that were discovered and joined.

    sources:     names of the sources; if two offer the same engine, the first one counts.
    fixed:       engines that exist whatever the sources report.
    grace_s:     seconds that a missing engine stays a member.
    engines_max: maximum of members and fixed engines together.
    """

    def __init__(
        self,
        sources: Sequence[str],
        *,
        fixed: Sequence[EngineSpec] = (),
        grace_s: float = 10.0,
        engines_max: int = 1024,
    ) -> None:
        self.sources = {name: SourceState(name) for name in sources}
        self.refused: Counter[str] = Counter()  # engines that are offered and not accepted, by reason
        self._fixed = tuple(fixed)
        self._grace_s = grace_s
        self._engines_max = engines_max
        self._members: dict[str, _Member] = {}

    @property
    def missing(self) -> int:
        """Number of members that their source does not list."""
        return sum(member.missing_s is not None for member in self._members.values())

    def found(self, source: str, engines: Sequence[DiscoveredEngine], ended: Set[str], now_s: float) -> None:
        """Stores the report of a source."""
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
        """Stores the failure of a source: its last report stays in force."""
        state = self.sources[source]
        state.why = why
        state.failures += 1

    def changes(self, now_s: float, room: int) -> MembershipChanges:
        """The changes that are due; the caller applies them. room: number of engines that may join."""
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
        """Takes back a join that the fleet refused."""
        del self._members[name]
        self.refused["broken"] += 1

    def next_s(self) -> float | None:
        """The time of the next change without a new report; None: there is none."""
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
