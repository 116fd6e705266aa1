"""Takes a request, lets it wait, or refuses it. The proxy and the simulator keep one each.

    arrival  --hopeless--------------------------------> refused: ttft
             --nothing speaks against it---------------> sent
             --instances are busy, others wait, or
               decode would be too slow----------------> waits: no line, or it is full -> refused
               but computed where no request waits-----> sent
    waiting  --its turn, and nothing speaks against it-> sent
             --its turn, decode would be too slow------> is set aside; asked about again, others go on
             --it would be too late--------------------> refused: ttft
             --its deadline----------------------------> refused: deadline

Requests wait here rather than at an engine, where the first to come is the first served: so the more urgent
passes, each tenant gets its share, where a request goes is decided when it is sent, and what is too late is
not computed. Pure: the owner is asked, and time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar

from moonpool.disagg_proxy.conductor.admission import Refusal
from moonpool.disagg_proxy.conductor.demand import Dear
from moonpool.disagg_proxy.conductor.line import Line, Waiting

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

HOLD_S = 1.0  # of prefill that each engine has in line: less would let it run dry, more lets none pass
RELEASE_EVERY_S = 0.05  # while a request waits
RELEASED_MAX = 16  # at one time, so that others get the lock
ASIDE_MAX = 16  # of a group that at one time are asked about in vain
TURN_EVERY_S = (
    1.0  # that one of those aside is asked about out of order: it takes room that the first waits for
)
UNASKED_MAX = 256  # that are set aside without being asked about


class Send(Enum):
    """When one that is asked about is sent, if nothing speaks against it."""

    NOW = "now"
    BESIDE = "beside"  # if none of the instances of ``is_busy`` would compute it: then it has not waited
    NEVER = "never"


class Asked(NamedTuple):
    """work_s: seconds of prefill that it will take; refusal: what speaks against it; sent: whether it was;
    final: waiting would not help; prompt, answer: tokens that are to be computed for it."""

    work_s: float
    refusal: Refusal | None
    sent: bool = False
    final: bool = False
    prompt: int = 0
    answer: int = 0


class Owner(Protocol[T_contra]):
    def is_busy(self, ticket: T_contra, now_s: float) -> bool:
        """Whether every instance that could compute it has HOLD_S in line."""

    def share(self, ticket: T_contra) -> int:
        """How many instances compute the prompts that wait with it."""

    def gap_s(self, ticket: T_contra) -> float:
        """Its own objective."""

    def how_dear(self, ticket: T_contra, now_s: float) -> Dear:
        """Whether it takes the place of several others; asked once, when it comes."""

    def ask(
        self, ticket: T_contra, waited_s: float, now_s: float, send: Send, *, dear: bool = False
    ) -> Asked:
        """Predicts, and sends it or not. dear: only where there is room to spare."""

    def is_gone(self, ticket: T_contra) -> bool:
        """Whether the client wants the answer no more."""


class Gate(Generic[T]):
    """waiting_max: of requests, 0: none waits; deadline_s: the longest wait. Not thread safe."""

    def __init__(self, owner: Owner[T], waiting_max: int, deadline_s: float) -> None:
        self.line: Line[T] = Line(waiting_max)
        self.deadline_s = deadline_s
        self._owner = owner
        self._next: Hashable = None  # the group that is first at the next release
        self._until_s = math.inf

    def arrive(
        self, ticket: T, group: Hashable, tenant: str, priority: int, ttft_s: float, now_s: float
    ) -> tuple[Refusal | None, tuple[T, Refusal] | None]:
        """(why it is refused, which other is, for its sake). group, tenant, priority: see Waiting; ttft_s:
        after which the client does not want its first token."""
        owner = self._owner
        dear = owner.how_dear(ticket, now_s)
        if not self.line.waiting_max:
            return owner.ask(ticket, 0.0, now_s, Send.NOW, dear=dear is Dear.NONE).refusal, None
        ahead_s = self.line.ahead_s(group, priority) / max(owner.share(ticket), 1)
        gap_s = owner.gap_s(ticket)
        waits = self.line.has_before(group, priority, gap_s) or owner.is_busy(ticket, now_s)
        send = Send.NOW
        if waits:
            send = Send.NEVER if self.line.has_before(group, priority, gap_s, aside=True) else Send.BESIDE
        asked = owner.ask(ticket, ahead_s, now_s, send)
        if asked.sent:
            return None, None  # no request waits for its sake: its tenant is not charged
        if asked.final:
            return asked.refusal, None
        deadline_s = min(now_s + min(self.deadline_s, ttft_s), self._until_s)
        out = self.line.add(
            Waiting(ticket, group, tenant, priority, now_s, deadline_s, asked.work_s, gap_s, dear)
        )
        if out is None:
            return None, None
        refusal = Refusal(
            "queue_full",
            ahead_s,
            f"{self.line.waiting_max} requests wait already, and it is none of those that go first",
        )
        return (refusal, None) if out.ticket is ticket else (None, (out.ticket, refusal))

    def release(self, now_s: float) -> list[tuple[T, Refusal | None]]:
        """Those that wait no longer: sent, or why not; the groups by turns. Call it again while there are
        RELEASED_MAX: fewer, and none is left that may go now."""
        left: list[tuple[T, Refusal | None]] = []
        groups = self.line.groups
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
        """Those of a group, until its engines are busy. One that wants no less than one that was asked
        about in vain keeps behind it, except that each has its turn: one that asks too much, or is too long,
        would keep them for good."""
        line, owner, in_vain, unasked = self.line, self._owner, 0, 0
        too_much_s = -math.inf
        while (entry := self._who(line.first_aside, group)) is not None:
            if owner.is_busy(entry.ticket, now_s):
                return
            if (gone := self._try(entry, now_s)) is None:
                too_much_s = entry.gap_s
                break
            yield gone
        if line.is_turn(group, now_s, TURN_EVERY_S):
            while (entry := self._who(line.turn, group)) is not None:
                if owner.is_busy(entry.ticket, now_s):
                    return
                if (gone := self._try(entry, now_s)) is None:
                    break
                yield gone
        while (
            in_vain < ASIDE_MAX
            and unasked < UNASKED_MAX
            and (entry := self._who(line.first, group)) is not None
        ):
            if entry.gap_s <= too_much_s:
                line.set_aside(entry)
                unasked += 1
                continue
            if owner.is_busy(entry.ticket, now_s):
                return
            if (gone := self._try(entry, now_s)) is not None:
                yield gone
                continue
            line.set_aside(entry)
            too_much_s = max(too_much_s, entry.gap_s)
            in_vain += 1

    def _who(self, find: Callable[[Hashable], Waiting[T] | None], group: Hashable) -> Waiting[T] | None:
        """The one that ``find`` says, unless it has left: then the next."""
        while (entry := find(group)) is not None and self._owner.is_gone(entry.ticket):
            self.line.remove(entry)
        return entry

    def _try(self, entry: Waiting[T], now_s: float) -> tuple[T, Refusal | None] | None:
        """None: not yet."""
        waited_s = max(now_s - entry.since_s, 0.0)
        asked = self._owner.ask(entry.ticket, waited_s, now_s, Send.NOW)
        if asked.refusal is not None and not asked.final:
            return None
        self.line.remove(entry)
        if asked.refusal is None:
            self.line.charge(entry, asked.prompt, asked.answer)
        return entry.ticket, asked.refusal

    def expire(self, now_s: float) -> list[tuple[T, Refusal]]:
        """Those whose deadline has passed; one whose client is gone leaves, too."""
        late = []
        for entry in list(self.line):
            if self._owner.is_gone(entry.ticket):
                self.line.remove(entry)
            elif entry.deadline_s <= now_s:
                self.line.remove(entry)
                late.append(entry)
        return [(entry.ticket, self._too_long(entry, now_s)) for entry in late]

    def hurry(self, deadline_s: float) -> None:
        """No request waits beyond this time: the proxy ends."""
        self._until_s = deadline_s
        waiting = list(self.line)
        for entry in waiting:
            self.line.remove(entry)
        for entry in waiting:
            entry.deadline_s = min(entry.deadline_s, deadline_s)
            self.line.add(entry)

    def _too_long(self, entry: Waiting[T], now_s: float) -> Refusal:
        waited_s = now_s - entry.since_s
        ahead_s = self.line.ahead_s(entry.group, entry.priority) / max(self._owner.share(entry.ticket), 1)
        return Refusal("deadline", ahead_s, f"it waited for {waited_s:.1f} s, and its turn did not come")
