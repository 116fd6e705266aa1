"""Requests that wait in the proxy: by priority, then by tenant, those that exceed capacity last, then by
deadline; of bounded number. Pure.

A request is deferred when a worker was free but none meets its own objective: it keeps its order, and
requests behind it with a looser objective do not wait for it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from moonpool.disagg_proxy.conductor.demand import Capacity
from moonpool.disagg_proxy.conductor.fairness import Fairness

FAIRNESSES_MAX = 64  # beyond it, those without a waiting request are dropped
TENANTS_MAX = 256  # tenants tracked separately; further tenants share one bucket

T = TypeVar("T")
K = TypeVar("K")


@dataclass(slots=True, eq=False)
class QueuedRequest(Generic[T]):
    """group: requests that wait for the same workers. priority: higher is more urgent. work_s: predicted
    seconds of its prefill. tenant: "" once there are more than TENANTS_MAX."""

    pending: T
    group: Hashable
    tenant: str
    priority: int
    since_s: float
    deadline_s: float
    work_s: float = 0.0
    gap_s: float = math.inf  # its own objective
    capacity: Capacity = Capacity.FITS  # the more it exceeds, the further back in its tenant's queue
    number: int = 0  # of equal deadlines the first to come goes first
    deferred: bool = False


class _Lane(Generic[T]):
    """Requests of one group. by: priority and tenant, each list in ``_order``, none empty."""

    def __init__(self) -> None:
        self.by: dict[int, dict[str, list[QueuedRequest[T]]]] = {}
        self.work_s: dict[int, float] = {}  # by priority

    def __iter__(self) -> Iterator[QueuedRequest[T]]:
        for tenants in self.by.values():
            yield from itertools.chain.from_iterable(tenants.values())

    def add(self, entry: QueuedRequest[T]) -> None:
        waiting = self.by.setdefault(entry.priority, {}).setdefault(entry.tenant, [])
        bisect.insort(waiting, entry, key=_order)
        self.work_s[entry.priority] = self.work_s.get(entry.priority, 0.0) + entry.work_s

    def remove(self, entry: QueuedRequest[T]) -> None:
        tenants = self.by[entry.priority]
        waiting = tenants[entry.tenant]
        place = bisect.bisect_left(waiting, _order(entry), key=_order)
        assert waiting[place] is entry
        del waiting[place]
        self.work_s[entry.priority] -= entry.work_s
        if not waiting:
            del tenants[entry.tenant]
        if not tenants:
            del self.by[entry.priority], self.work_s[entry.priority]

    def first(self, fairness: Callable[[int], Fairness]) -> QueuedRequest[T] | None:
        """fairness: by priority."""
        if not self.by:
            return None
        priority = max(self.by)
        served = fairness(priority).served
        heads = (waiting[0] for waiting in self.by[priority].values())
        return min(heads, key=lambda each: (served(each.tenant), *_order(each)))

    def check_integrity(self) -> None:
        for priority, tenants in self.by.items():
            for waiting in tenants.values():
                if not waiting or waiting != sorted(waiting, key=_order):
                    raise AssertionError("the queue is not in order")
            total_s = sum(entry.work_s for waiting in tenants.values() for entry in waiting)
            if abs(total_s - self.work_s[priority]) > 1e-6 * max(total_s, 1.0):
                raise AssertionError("their work does not add up")


class _Group(Generic[T]):
    """ready: requests that wait for an engine. retry: deferred requests, the one that was retried longest ago
    first."""

    def __init__(self) -> None:
        self.ready: _Lane[T] = _Lane()
        self.deferred: _Lane[T] = _Lane()
        self.gaps_s: list[float] = []  # objectives of the deferred requests, ascending
        self.retry: OrderedDict[QueuedRequest[T], None] = OrderedDict()
        self.retried_s = -math.inf


class WaitQueue(Generic[T]):
    """Within a group no request passes one that is further ahead. Each group and priority has its own fair
    order of tenants: requests that wait for other engines, or with another priority, say nothing about a
    tenant's share here."""

    def __init__(self, waiting_max: int) -> None:
        self.waiting_max = waiting_max
        self._fairness: dict[tuple[Hashable, int], Fairness] = {}
        self._groups: dict[Hashable, _Group[T]] = {}
        self._priorities: Counter[int] = Counter()
        self._tenants: Counter[str] = Counter()
        self._count = 0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[QueuedRequest[T]]:
        """In no order."""
        for group in self._groups.values():
            yield from group.ready
            yield from group.deferred

    @property
    def groups(self) -> list[Hashable]:
        """The groups of which a request waits, in the order in which they began to; a copy."""
        return list(self._groups)

    def add(self, entry: QueuedRequest[T]) -> QueuedRequest[T] | None:
        """Returns the entry that is removed for it, or itself if it is not added; None: there is room."""
        out = None
        if entry.tenant not in self._tenants and len(self._tenants) >= TENANTS_MAX:
            entry.tenant = ""
        if self._count >= self.waiting_max:
            out = self._least_wanted(entry)
            if out is entry:
                return entry
            self.remove(out)
        entry.number = next(self._numbers)
        self._groups.setdefault(entry.group, _Group()).ready.add(entry)
        self._priorities[entry.priority] += 1
        self._tenants[entry.tenant] += 1
        self._fair(entry.group, entry.priority).waits(entry.tenant)
        self._count += 1
        return out

    def first(self, group: Hashable) -> QueuedRequest[T] | None:
        """The next ready request of the group."""
        found = self._groups.get(group)
        return None if found is None else found.ready.first(partial(self._fair, group))

    def defer(self, entry: QueuedRequest[T]) -> None:
        """A worker was free, but the request was not sent, because it would miss its own objective."""
        group = self._groups[entry.group]
        group.ready.remove(entry)
        group.deferred.add(entry)
        bisect.insort(group.gaps_s, entry.gap_s)
        group.retry[entry] = None
        entry.deferred = True

    def first_deferred(self, group: Hashable) -> QueuedRequest[T] | None:
        """The next deferred request of the group."""
        found = self._groups.get(group)
        return None if found is None else found.deferred.first(partial(self._fair, group))

    def is_retry_due(self, group: Hashable, now_s: float, every_s: float) -> bool:
        """Whether a deferred request other than the first is due for a retry; if so, notes the time."""
        found = self._groups.get(group)
        if found is None or not found.retry or 0.0 <= now_s - found.retried_s < every_s:
            return False
        found.retried_s = now_s
        return True

    def retry_deferred(self, group: Hashable) -> QueuedRequest[T] | None:
        """The deferred request that was retried longest ago; moves it to the end of that order."""
        found = self._groups.get(group)
        if found is None or not found.retry:
            return None
        entry = next(iter(found.retry))
        found.retry.move_to_end(entry)
        return entry

    def remove(self, entry: QueuedRequest[T]) -> None:
        """The entry was sent or refused, or its client left. It must be in the queue."""
        group = self._groups[entry.group]
        if entry.deferred:
            group.deferred.remove(entry)
            del group.gaps_s[bisect.bisect_left(group.gaps_s, entry.gap_s)]
            del group.retry[entry]
            entry.deferred = False
        else:
            group.ready.remove(entry)
        if not group.ready.by and not group.deferred.by:
            del self._groups[entry.group]
        _less(self._priorities, entry.priority)
        _less(self._tenants, entry.tenant)
        self._fair(entry.group, entry.priority).goes(entry.tenant)
        self._count -= 1

    def charge(self, entry: QueuedRequest[T], prompt: int, answer: int) -> None:
        """Charges the tenant of a request that waited with the tokens that are to be computed for it."""
        self._fair(entry.group, entry.priority).charge(entry.tenant, prompt, answer)

    def _fair(self, group: Hashable, priority: int) -> Fairness:
        found = self._fairness.get((group, priority))
        if found is None:
            if len(self._fairness) >= FAIRNESSES_MAX:
                self._fairness = {key: each for key, each in self._fairness.items() if each.any_waits}
            found = self._fairness[group, priority] = Fairness()
        return found

    def has_before(self, group: Hashable, priority: int, gap_s: float, *, deferred: bool = False) -> bool:
        """Whether a waiting request goes before one that arrives now. gap_s: the new request's own objective;
        it passes deferred requests with a stricter one. deferred: look at deferred requests only."""
        found = self._groups.get(group)
        if found is None:
            return False
        lanes = [] if deferred else [found.ready]
        if found.gaps_s and gap_s <= found.gaps_s[-1]:
            lanes.append(found.deferred)
        return any(own >= priority for lane in lanes for own in lane.by)

    def ahead_s(self, group: Hashable, priority: int) -> float:
        """Seconds of prefill of the ready requests that go before one that arrives now."""
        found = self._groups.get(group)
        if found is None:
            return 0.0
        return max(sum(s for own, s in found.ready.work_s.items() if own >= priority), 0.0)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        every = list(self)
        if self._count != len(every) or self._tenants != Counter(entry.tenant for entry in every):
            raise AssertionError("the waiting requests do not add up")
        for group in self._groups.values():
            group.ready.check_integrity()
            group.deferred.check_integrity()
            if group.gaps_s != sorted(entry.gap_s for entry in group.deferred):
                raise AssertionError("the objectives of those deferred do not add up")
            if set(group.deferred) != set(group.retry) or not all(entry.deferred for entry in group.retry):
                raise AssertionError("the retries are not of the deferred requests")

    def _least_wanted(self, entry: QueuedRequest[T]) -> QueuedRequest[T]:
        """The last of the least urgent requests of the tenant with most of them. A new request that is no
        more urgent takes that place only if its tenant has fewer, or from one of its own tenant that exceeds
        capacity by more: such requests are sent last, and would fill the queue."""
        if not self._count:
            return entry
        priority = min(self._priorities)
        if entry.priority < priority:
            return entry
        last = [
            waiting[-1]
            for group in self._groups.values()
            for lane in (group.ready, group.deferred)
            for waiting in lane.by.get(priority, {}).values()
        ]
        out = max(last, key=lambda each: (self._tenants[each.tenant], *_order(each)))
        if entry.priority > priority or self._tenants[out.tenant] > self._tenants[entry.tenant] + 1:
            return out
        longer = [each for each in last if each.capacity > entry.capacity and each.tenant == entry.tenant]
        return max(longer, key=_order) if longer else entry


def _less(counts: Counter[K], value: K) -> None:
    counts[value] -= 1
    if not counts[value]:
        del counts[value]


def _order(entry: QueuedRequest[T]) -> tuple[Capacity, float, int]:
    return entry.capacity, entry.deadline_s, entry.number
