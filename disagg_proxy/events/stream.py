"""Orders one stream of KV events: decides which messages count, when to void all, and when to request a
replay. Pure: messages in, calls of the sink out; no socket, no clock.

A publisher numbers its messages from 0 and keeps the last ones for replay. Invariant: the messages that count
are a gapless range of one incarnation of the publisher. When that is in doubt (a gap, a new connection), a
replay is requested from the last message on: if it comes back with equal bytes, it is the same incarnation,
and the following messages close the gap; otherwise all is void and read again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

_RECENT = 256


class Sink(Protocol):
    """Receives the ordered stream."""

    def take(self, payload: bytes) -> None:
        """Processes the next message."""

    def forget(self) -> None:
        """Voids all earlier messages."""

    def ask(self, start: int) -> None:
        """Requests a replay from message ``start`` on; it supersedes an earlier one."""


@dataclass(slots=True)
class StreamCounts:
    """Counters of one stream, as in ``Subscriber.stats``."""

    messages: int = 0
    taken: int = 0
    gaps: int = 0
    replays: int = 0
    repeats: int = 0
    restarts: int = 0  # new incarnations of the publisher
    lost: int = 0  # gaps that a replay could not close
    overflows: int = 0  # messages during a replay beyond the limit


class ByteBudget:
    """A limit of bytes that several streams share."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.taken = 0

    def take(self, size: int) -> bool:
        """Takes ``size`` bytes; False if they are not available."""
        if self.taken + size > self._bytes_max:
            return False
        self.taken += size
        return True

    def give(self, size: int) -> None:
        """Returns ``size`` bytes to the budget."""
        self.taken -= size


class Stream:
    """The state of one stream.

    can_replay:  whether the publisher has a replay endpoint.
    pending_max: maximum of messages that are kept during a replay.
    room:        limit of their bytes, shared with other streams.
    """

    def __init__(
        self, sink: Sink, *, can_replay: bool, pending_max: int = 10_000, room: ByteBudget | None = None
    ) -> None:
        self.counts = StreamCounts()
        self.replaying = False
        self._sink = sink
        self._can_replay = can_replay
        self._pending_max = pending_max
        self._last: int | None = None  # number of the last message that counts
        self._recent: OrderedDict[int, bytes] = OrderedDict()  # number -> digest of the message
        self._proof_due = False  # the next replayed message must equal the last one
        self._start = 0  # first message of the replay
        self._pending: deque[tuple[int, bytes]] = deque()
        self._room = room or ByteBudget(1 << 62)

    @property
    def sequence(self) -> int:
        """Number of the last message that counts; -1: none."""
        return -1 if self._last is None else self._last

    def connected(self) -> None:
        """A new connection: messages may be missing, or the publisher may have restarted."""
        self._drop_pending()  # of an incarnation that may have ended; the replay repeats them if they count
        if self._can_replay:
            self._replay()

    def gone(self) -> None:
        """The publisher was given up: voids all; later messages start anew."""
        self._drop_all()
        self.replaying = False
        self._drop_pending()

    def message(self, number: int, payload: bytes) -> None:
        """Processes a published message."""
        self.counts.messages += 1
        if self.replaying:
            if len(self._pending) < self._pending_max and self._room.take(len(payload)):
                self._pending.append((number, payload))
            else:
                self.counts.overflows += 1  # the gap is detected after the replay
            return
        self._in_order(number, payload)

    def replayed(self, number: int, payload: bytes) -> None:
        """Processes a replayed message."""
        if not self.replaying:
            return
        if self._proof_due:
            self._proof_due = False
            if number == self._last and self._recent.get(number) == _mark(payload):
                return
            at_last = number == self._last
            self._start = number
            self._lose()
            if at_last:  # another incarnation, which began before
                self.counts.restarts += 1
                self._replay()
                return
        if self._last is not None and number < self._last:
            self.counts.repeats += 1
            return
        if self._last is None and number > self._start:
            self.counts.lost += 1  # the start is beyond the publisher's buffer; the rest counts
        elif self._last is not None and number > self._last + 1:
            self._lose()
        self._take(number, payload)

    def replay_ended(self, complete: bool = True) -> None:
        """The end of a replay: by its end marker, or with complete=False by a timeout."""
        if not self.replaying:
            return
        self.replaying = False
        if self._proof_due and complete and self._last is not None:
            # It does not have our last message: a younger incarnation with fewer messages.
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
                self._lose()  # the replay had all messages
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
