"""Requests that wait in the proxy: by priority, then by deadline; of bounded number. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Waiting(Generic[T]):
    """group: those who wait for the same instances; within one nobody passes who is further behind. priority:
    higher is more urgent. work_s: seconds of prefill that it will take.
    """

    ticket: T
    group: Hashable
    priority: int
    since_s: float
    deadline_s: float
    work_s: float = 0.0
    rank: tuple[float, ...] = ()  # the least is last in the lists below, so that it goes out in no time


class Line(Generic[T]):
    """A list for each group, in order; 10,000 waiting are 80 kB to move in the worst case."""

    def __init__(self, waiting_max: int) -> None:
        self.waiting_max = waiting_max
        self._groups: dict[Hashable, list[Waiting[T]]] = {}
        self._work_s: dict[Hashable, dict[int, float]] = {}  # by group and priority
        self._count = 0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiting[T]]:
        """No order."""
        return itertools.chain.from_iterable(self._groups.values())

    @property
    def groups(self) -> list[Hashable]:
        return list(self._groups)

    def add(self, entry: Waiting[T]) -> Waiting[T] | None:
        """Returns who has to go for it, perhaps itself; None: there is room."""
        entry.rank = (entry.priority, -entry.deadline_s, -next(self._numbers))
        out = None
        if self._count >= self.waiting_max:
            out = min((group[0] for group in self._groups.values()), key=_rank, default=entry)
            if out.rank >= entry.rank or out.priority >= entry.priority:
                return entry  # who waits already goes only for somebody more urgent
            self.remove(out)
        bisect.insort(self._groups.setdefault(entry.group, []), entry, key=_rank)
        work_s = self._work_s.setdefault(entry.group, {})
        work_s[entry.priority] = work_s.get(entry.priority, 0.0) + entry.work_s
        self._count += 1
        return out

    def first(self, group: Hashable) -> Waiting[T] | None:
        """The next of these."""
        waiting = self._groups.get(group)
        return waiting[-1] if waiting else None

    def remove(self, entry: Waiting[T]) -> None:
        waiting = self._groups[entry.group]
        place = bisect.bisect_left(waiting, entry.rank, key=_rank)
        assert waiting[place] is entry
        del waiting[place]
        self._work_s[entry.group][entry.priority] -= entry.work_s
        if not waiting:
            del self._groups[entry.group], self._work_s[entry.group]
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
        if self._count != sum(map(len, self._groups.values())):
            raise AssertionError("those who wait do not add up")
        for group, waiting in self._groups.items():
            if [entry.rank for entry in waiting] != sorted(entry.rank for entry in waiting):
                raise AssertionError("the line is not in order")
            total_s = sum(entry.work_s for entry in waiting)
            if abs(total_s - sum(self._work_s[group].values())) > 1e-6 * max(total_s, 1.0):
                raise AssertionError("their work does not add up")


def _rank(entry: Waiting[T]) -> tuple[float, ...]:
    return entry.rank
