"""One stream of KV events put in order: which messages are taken, when all is forgotten, when to ask for a
replay. Pure: messages in, calls of the sink out; no socket, no clock.

A publisher numbers its messages from 0 and keeps the last of them for replay. The rule: what was taken of a
stream is one life of its publisher, from some message on without a hole. Whenever that is in doubt (a gap, a
new connection), the replay begins with the message that was taken last: when it comes back with the same
bytes it is the same life, and what follows closes the gap; else everything is forgotten and read anew.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

_RECENT = 256


class Sink(Protocol):
    """What a stream is put in order for."""

    def take(self, payload: bytes) -> None:
        """The next batch."""

    def forget(self) -> None:
        """All that was taken is void."""

    def ask(self, start: int) -> None:
        """A replay from message ``start`` on; answers to an earlier one are no longer wanted."""


@dataclass(slots=True)
class StreamCounts:
    """Of one stream, since the start."""

    messages: int = 0
    taken: int = 0
    gaps: int = 0
    replays: int = 0
    repeats: int = 0
    restarts: int = 0  # another life of the publisher
    lost: int = 0  # times that a replay could not close the gap
    overflows: int = 0  # messages that came during a replay beyond the limit


class ByteBudget:
    """Bytes that streams may keep together."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.taken = 0

    def take(self, size: int) -> bool:
        """Whether there is room for so many bytes more; they are taken then."""
        if self.taken + size > self._bytes_max:
            return False
        self.taken += size
        return True

    def give(self, size: int) -> None:
        """Returns ``size`` bytes to the budget."""
        self.taken -= size


class Stream:
    """can_replay: whether the publisher has a place to ask. pending_max: messages that are kept during a
    replay; room: for their bytes, shared with other streams."""

    def __init__(
        self, sink: Sink, *, can_replay: bool, pending_max: int = 10_000, room: ByteBudget | None = None
    ) -> None:
        self.counts = StreamCounts()
        self.replaying = False
        self._sink = sink
        self._can_replay = can_replay
        self._pending_max = pending_max
        self._last: int | None = None  # the number that was taken last
        self._recent: OrderedDict[int, bytes] = OrderedDict()  # number -> what it was
        self._proof_due = False  # the next answer must be the message that was taken last
        self._start = 0  # where the replay began
        self._pending: deque[tuple[int, bytes]] = deque()
        self._room = room or ByteBudget(1 << 62)

    @property
    def sequence(self) -> int:
        """The number of the message that was taken last; -1: none counts."""
        return -1 if self._last is None else self._last

    def connected(self) -> None:
        """There is a new connection: messages may be missing, or it may be another life."""
        self._drop_pending()  # said by a life that may have ended; the replay has it, if it still counts
        if self._can_replay:
            self._replay()

    def gone(self) -> None:
        """The publisher was given up. What it says later is a new beginning."""
        self._drop_all()
        self.replaying = False
        self._drop_pending()

    def message(self, number: int, payload: bytes) -> None:
        """From the publisher itself."""
        self.counts.messages += 1
        if self.replaying:
            if len(self._pending) < self._pending_max and self._room.take(len(payload)):
                self._pending.append((number, payload))
            else:
                self.counts.overflows += 1  # the gap is seen when the replay is over
            return
        self._in_order(number, payload)

    def replayed(self, number: int, payload: bytes) -> None:
        """An answer to the last ask()."""
        if not self.replaying:
            return
        if self._proof_due:
            self._proof_due = False
            if number == self._last and self._recent.get(number) == _mark(payload):
                return
            at_last = number == self._last
            self._start = number
            self._lose()
            if at_last:  # its life is another one, and began before
                self.counts.restarts += 1
                self._replay()
                return
        if self._last is not None and number < self._last:
            self.counts.repeats += 1
            return
        if self._last is None and number > self._start:
            self.counts.lost += 1  # the beginning is beyond the buffer; what follows still counts
        elif self._last is not None and number > self._last + 1:
            self._lose()
        self._take(number, payload)

    def replay_ended(self, complete: bool = True) -> None:
        """No more answers: the end marker came, or (not ``complete``) none came for too long."""
        if not self.replaying:
            return
        self.replaying = False
        if self._proof_due and complete and self._last is not None:
            # It does not have what we took last: a younger life, which has not said as much.
            self._proof_due = False
            self.counts.restarts += 1
            self._drop_all()
            self._replay()
            return
        if self._proof_due or not complete:
            self._lose()
        self._proof_due = False
        pending, self._pending = self._pending, deque()
        self._room.give(sum(len(payload) for _, payload in pending))
        while pending:
            number, payload = pending.popleft()
            if self._last is not None and number <= self._last:
                continue
            if self._last is not None and number > self._last + 1:
                self._lose()  # a replay has just told all there is
            self._take(number, payload)

    def _in_order(self, number: int, payload: bytes) -> None:
        if self._last is not None and number <= self._last:
            if self._recent.get(number) == _mark(payload):
                self.counts.repeats += 1
                return
            self.counts.restarts += 1
            self._drop_all()
        if number == (0 if self._last is None else self._last + 1):
            self._take(number, payload)
            return
        self.counts.gaps += 1
        if self._can_replay:
            if self._room.take(len(payload)):
                self._pending.append((number, payload))
            self._replay()
            return
        if self._last is not None:
            self._lose()
        self._take(number, payload)

    def _replay(self) -> None:
        self.counts.replays += 1
        self.replaying = True
        self._proof_due = self._last is not None
        self._start = 0 if self._last is None else self._last
        self._sink.ask(self._start)

    def _take(self, number: int, payload: bytes) -> None:
        self._last = number
        self._recent[number] = _mark(payload)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        self.counts.taken += 1
        self._sink.take(payload)

    def _lose(self) -> None:
        self.counts.lost += 1
        self._drop_all()

    def _drop_pending(self) -> None:
        self._room.give(sum(len(payload) for _, payload in self._pending))
        self._pending.clear()

    def _drop_all(self) -> None:
        self._last = None
        self._recent.clear()
        self._sink.forget()


def _mark(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()
