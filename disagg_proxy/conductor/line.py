"""Requests that wait in the proxy: by priority, then by tenant, then by deadline; of bounded number. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from moonpool.disagg_proxy.conductor.fairness import Fairness

T = TypeVar("T")
K = TypeVar("K")


@dataclass(slots=True, eq=False)
class Waiting(Generic[T]):
    """group: those who wait for the same instances. priority: higher is more urgent. work_s: seconds of
    prefill that it will take."""

    ticket: T
    group: Hashable
    tenant: str
    priority: int
    since_s: float
    deadline_s: float
    work_s: float = 0.0
    number: int = 0  # of equal deadlines the first to come goes first


_Key = tuple[int, str]  # priority and tenant


class Line(Generic[T]):
    """Within a group nobody passes who is further behind. fairness: whose turn it is among tenants."""

    def __init__(self, waiting_max: int, fairness: Fairness) -> None:
        self.waiting_max = waiting_max
        self._fairness = fairness
        self._groups: dict[Hashable, dict[_Key, list[Waiting[T]]]] = {}  # each in the order of deadlines
        self._work_s: dict[Hashable, dict[int, float]] = {}  # by priority
        self._priorities: Counter[int] = Counter()
        self._tenants: Counter[str] = Counter()
        self._count = 0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiting[T]]:
        """In no order."""
        return itertools.chain.from_iterable(
            itertools.chain.from_iterable(lists.values()) for lists in self._groups.values()
        )

    @property
    def groups(self) -> list[Hashable]:
        return list(self._groups)

    def add(self, entry: Waiting[T]) -> Waiting[T] | None:
        """Returns who has to go for it, perhaps itself; None: there is room."""
        out = None
        if self._count >= self.waiting_max:
            out = self._least_wanted(entry)
            if out is entry:
                return entry
            self.remove(out)
        entry.number = next(self._numbers)
        waiting = self._groups.setdefault(entry.group, {}).setdefault((entry.priority, entry.tenant), [])
        bisect.insort(waiting, entry, key=_order)
        work_s = self._work_s.setdefault(entry.group, {})
        work_s[entry.priority] = work_s.get(entry.priority, 0.0) + entry.work_s
        self._priorities[entry.priority] += 1
        self._tenants[entry.tenant] += 1
        self._fairness.waits(entry.tenant)
        self._count += 1
        return out

    def first(self, group: Hashable) -> Waiting[T] | None:
        """The next of these."""
        lists = self._groups.get(group)
        if not lists:
            return None
        served = self._fairness.served
        return min(
            (waiting[0] for waiting in lists.values()),
            key=lambda each: (-each.priority, served(each.tenant), each.deadline_s, each.number),
        )

    def remove(self, entry: Waiting[T]) -> None:
        lists, key = self._groups[entry.group], (entry.priority, entry.tenant)
        waiting = lists[key]
        place = bisect.bisect_left(waiting, _order(entry), key=_order)
        assert waiting[place] is entry
        del waiting[place]
        self._work_s[entry.group][entry.priority] -= entry.work_s
        if not waiting:
            del lists[key]
        if not lists:
            del self._groups[entry.group], self._work_s[entry.group]
        _less(self._priorities, entry.priority)
        _less(self._tenants, entry.tenant)
        self._fairness.goes(entry.tenant)
        self._count -= 1

    def ahead_s(self, group: Hashable, priority: int) -> float:
        """Seconds of prefill of those whom one that came now would wait for."""
        work_s = self._work_s.get(group)
        return max(sum(s for own, s in work_s.items() if own >= priority), 0.0) if work_s else 0.0

    def overdue(self, now_s: float) -> list[Waiting[T]]:
        """Those whose deadline has passed; they stay in the line."""
        return [entry for entry in self if entry.deadline_s <= now_s]

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        every = list(self)
        if self._count != len(every) or self._tenants != Counter(entry.tenant for entry in every):
            raise AssertionError("those who wait do not add up")
        for group, lists in self._groups.items():
            for waiting in lists.values():
                if not waiting or waiting != sorted(waiting, key=_order):
                    raise AssertionError("the line is not in order")
            total_s = sum(entry.work_s for waiting in lists.values() for entry in waiting)
            if abs(total_s - sum(self._work_s[group].values())) > 1e-6 * max(total_s, 1.0):
                raise AssertionError("their work does not add up")

    def _least_wanted(self, entry: Waiting[T]) -> Waiting[T]:
        """Of the least urgent the last one of the tenant that has most in line. A newcomer that is no more
        urgent takes such a place only for a tenant that has fewer."""
        if not self._count:
            return entry
        priority = min(self._priorities)
        if entry.priority < priority:
            return entry
        last = [
            waiting[-1]
            for lists in self._groups.values()
            for key, waiting in lists.items()
            if key[0] == priority
        ]
        out = max(last, key=lambda each: (self._tenants[each.tenant], each.deadline_s, each.number))
        if entry.priority > priority or self._tenants[out.tenant] > self._tenants[entry.tenant] + 1:
            return out
        return entry


def _less(counts: Counter[K], value: K) -> None:
    counts[value] -= 1
    if not counts[value]:
        del counts[value]


def _order(entry: Waiting[T]) -> tuple[float, int]:
    return entry.deadline_s, entry.number
