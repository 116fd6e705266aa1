"""Admits a request, lets it wait, or refuses it. The scheduler has one.

    arrival  --hopeless--------------------------------> refused: ttft
             --no objection----------------------------> sent
             --workers are busy, others wait, or
               decode would be too slow----------------> waits: no queue, or it is full -> refused
               but computed where no request waits-----> sent
    waiting  --its turn, no objection------------------> sent
             --its turn, decode would be too slow------> is deferred; retried later, others go on
             --it would be too late--------------------> refused: ttft
             --its deadline----------------------------> refused: deadline

An engine serves the first request to come first. Requests therefore wait here: the more urgent one passes,
each tenant gets its share, the engine is chosen when the request is sent, and a request that is too late is
not computed. Pure: a ``DispatchBackend`` predicts and sends, and time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar

from moonpool.disagg_proxy.conductor.admission import Refusal
from moonpool.disagg_proxy.conductor.demand import Capacity
from moonpool.disagg_proxy.conductor.wait_queue import QueuedRequest, WaitQueue

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

HOLD_S = 1.0  # of prefill queued at each engine: less leaves engines idle, more makes the order final sooner
RELEASE_EVERY_S = 0.05  # while a request waits
RELEASED_MAX = 16  # in one call, so that the driver can let go of its lock
DEFERRED_MAX = 16  # requests of a group that one call asks about without success
RETRY_EVERY_S = 1.0  # between retries out of order: each takes room that the first request waits for
UNASKED_MAX = 256  # requests that one call defers without a prediction


class Send(Enum):
    """When a request is sent, if there is no objection."""

    NOW = "now"
    BYPASS = "bypass"  # if a worker would compute it that no request waits for: then it passes the queue
    NEVER = "never"


class AdmissionResult(NamedTuple):
    """work_s: predicted seconds of prefill. refusal: the objection; None: there is none. sent: it was sent.
    final: to wait would not help. prompt, answer: tokens that are to be computed for it."""

    work_s: float
    refusal: Refusal | None
    sent: bool = False
    final: bool = False
    prompt: int = 0
    answer: int = 0


class DispatchBackend(Protocol[T_contra]):
    """What the controller asks of the scheduler. All but ``ask`` change nothing; times in seconds of a
    monotonic clock."""

    def is_busy(self, pending: T_contra, now_s: float) -> bool:
        """Whether every worker that could compute it has HOLD_S of prefill queued."""

    def share(self, pending: T_contra) -> int:
        """How many workers compute the prompts that wait with it."""

    def gap_s(self, pending: T_contra) -> float:
        """Its own objective, in seconds."""

    def capacity_class(self, pending: T_contra, now_s: float) -> Capacity:
        """Whether it takes the room of several other requests. Called once, when it comes."""

    def ask(
        self, pending: T_contra, waited_s: float, now_s: float, send: Send, *, only_if_spare: bool = False
    ) -> AdmissionResult:
        """Predicts, and sends it or not. only_if_spare: refuse it unless there is room to spare."""

    def is_gone(self, pending: T_contra) -> bool:
        """Whether the client has left."""


class AdmissionController(Generic[T]):
    """Not thread safe. waiting_max: requests that may wait; 0: none does. deadline_s: the longest wait."""

    def __init__(self, backend: DispatchBackend[T], waiting_max: int, deadline_s: float) -> None:
        self.queue: WaitQueue[T] = WaitQueue(waiting_max)
        self.deadline_s = deadline_s
        self._backend = backend
        self._next: Hashable = None  # the group that is first at the next release
        self._until_s = math.inf

    def arrive(
        self, pending: T, group: Hashable, tenant: str, priority: int, ttft_s: float, now_s: float
    ) -> tuple[Refusal | None, tuple[T, Refusal] | None]:
        """Returns (why the request is refused, another request that is refused in its favour). group, tenant
        and priority: see QueuedRequest. ttft_s: seconds after which the client has no use for its first
        token."""
        backend = self._backend
        capacity = backend.capacity_class(pending, now_s)
        if not self.queue.waiting_max:
            spare = capacity is Capacity.EXCEEDS
            return backend.ask(pending, 0.0, now_s, Send.NOW, only_if_spare=spare).refusal, None
        ahead_s = self.queue.ahead_s(group, priority) / max(backend.share(pending), 1)
        gap_s = backend.gap_s(pending)
        waits = self.queue.has_before(group, priority, gap_s) or backend.is_busy(pending, now_s)
        send = Send.NOW
        if waits:
            send = Send.NEVER if self.queue.has_before(group, priority, gap_s, deferred=True) else Send.BYPASS
        result = backend.ask(pending, ahead_s, now_s, send)
        if result.sent:
            return None, None  # it delays no request: its tenant is not charged
        if result.final:
            return result.refusal, None
        deadline_s = min(now_s + min(self.deadline_s, ttft_s), self._until_s)
        out = self.queue.add(
            QueuedRequest(pending, group, tenant, priority, now_s, deadline_s, result.work_s, gap_s, capacity)
        )
        if out is None:
            return None, None
        refusal = Refusal(
            "queue_full",
            ahead_s,
            f"{self.queue.waiting_max} requests wait already, and it is none of those that go first",
        )
        return (refusal, None) if out.pending is pending else (None, (out.pending, refusal))

    def release(self, now_s: float) -> list[tuple[T, Refusal | None]]:
        """The requests that leave the queue: sent (None), or why they are refused; groups take turns. After
        RELEASED_MAX of them it must be called again; with fewer, no further request can leave now."""
        left: list[tuple[T, Refusal | None]] = []
        groups = self.queue.groups
        start = groups.index(self._next) if self._next in groups else 0
        turns = deque((group, self._release(group, now_s)) for group in groups[start:] + groups[:start])
        while turns and len(left) < RELEASED_MAX:
            group, going = turns.popleft()
            gone = next(going, None)
            if gone is not None:
                left.append(gone)
                turns.append((group, going))
        self._next = turns[0][0] if turns else None
        return left

    def _release(self, group: Hashable, now_s: float) -> Iterator[tuple[T, Refusal | None]]:
        """Yields the requests of ``group`` that leave the queue, until its workers are busy. When a request
        is refused, requests with an equal or stricter gap objective are deferred unasked, since they would be
        refused too. Deferred requests are retried in turn every RETRY_EVERY_S, so that one that wants too
        much, or is too long, does not block the group."""
        queue, backend, in_vain, unasked = self.queue, self._backend, 0, 0
        too_much_s = -math.inf
        while (entry := self._present(queue.first_deferred, group)) is not None:
            if backend.is_busy(entry.pending, now_s):
                return
            if (gone := self._try(entry, now_s)) is None:
                too_much_s = entry.gap_s
                break
            yield gone
        if queue.is_retry_due(group, now_s, RETRY_EVERY_S):
            while (entry := self._present(queue.retry_deferred, group)) is not None:
                if backend.is_busy(entry.pending, now_s):
                    return
                if (gone := self._try(entry, now_s)) is None:
                    break
                yield gone
        while (
            in_vain < DEFERRED_MAX
            and unasked < UNASKED_MAX
            and (entry := self._present(queue.first, group)) is not None
        ):
            if entry.gap_s <= too_much_s:
                queue.defer(entry)
                unasked += 1
                continue
            if backend.is_busy(entry.pending, now_s):
                return
            if (gone := self._try(entry, now_s)) is not None:
                yield gone
                continue
            queue.defer(entry)
            too_much_s = max(too_much_s, entry.gap_s)
            in_vain += 1

    def _present(
        self, find: Callable[[Hashable], QueuedRequest[T] | None], group: Hashable
    ) -> QueuedRequest[T] | None:
        """The request that ``find`` returns; one whose client has left is removed, and the next one taken."""
        while (entry := find(group)) is not None and self._backend.is_gone(entry.pending):
            self.queue.remove(entry)
        return entry

    def _try(self, entry: QueuedRequest[T], now_s: float) -> tuple[T, Refusal | None] | None:
        """None: it goes on waiting."""
        waited_s = max(now_s - entry.since_s, 0.0)
        result = self._backend.ask(entry.pending, waited_s, now_s, Send.NOW)
        if result.refusal is not None and not result.final:
            return None
        self.queue.remove(entry)
        if result.refusal is None:
            self.queue.charge(entry, result.prompt, result.answer)
        return entry.pending, result.refusal

    def expire(self, now_s: float) -> list[tuple[T, Refusal]]:
        """Removes the requests whose client has left, and those whose deadline has passed: returns these."""
        late = []
        for entry in list(self.queue):
            if self._backend.is_gone(entry.pending):
                self.queue.remove(entry)
            elif entry.deadline_s <= now_s:
                self.queue.remove(entry)
                late.append(entry)
        return [(entry.pending, self._too_long(entry, now_s)) for entry in late]

    def limit_wait(self, deadline_s: float) -> None:
        """No request waits beyond this time: the proxy is stopping."""
        self._until_s = deadline_s
        waiting = list(self.queue)
        for entry in waiting:
            self.queue.remove(entry)
        for entry in waiting:
            entry.deadline_s = min(entry.deadline_s, deadline_s)
            self.queue.add(entry)

    def _too_long(self, entry: QueuedRequest[T], now_s: float) -> Refusal:
        waited_s = now_s - entry.since_s
        ahead_s = self.queue.ahead_s(entry.group, entry.priority) / max(self._backend.share(entry.pending), 1)
        return Refusal("deadline", ahead_s, f"it waited for {waited_s:.1f} s, and its turn did not come")
