"""What the subscriber knows of one stream. Values only, of the subscriber's thread; other threads read single
fields of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from moonpool import _native
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.events.stream import Stream


@dataclass(slots=True)
class SourceCounts:
    """Of one source, beyond what its stream counts. Blocks, but for ``malformed``, which are messages."""

    malformed: int = 0
    stored: int = 0
    removed: int = 0
    unknown: int = 0
    skipped: int = 0
    forgets: int = 0
    rests: int = 0  # times that it was cut off, for more came of it than could be looked at
    connected: bool = False
    lag_s: float = 0.0  # between the sender's clock and ours, of the last batch that was not asked for again
    lag_max_s: float = 0.0


@dataclass(slots=True)
class StreamLink:
    """A source with its sockets; all of it belongs to the thread."""

    source: EventSource
    place: int
    model: str
    sub: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    counts: SourceCounts = field(default_factory=SourceCounts)
    index: _native.PrefixIndex | None = None
    index_before: _native.PrefixIndex | None = None  # that it followed, or follows
    asking: zmq.Socket[bytes] | None = None
    answer_due_s: float = 0.0
    given_up: bool = False
    lost_since_s: float | None = None  # None: it is connected
    lost: bool = False  # it was without a connection for lost_s
    live: bool = False  # an engine's: its index follows it
    behind_since_s: float | None = None  # since when it has had more than could be looked at
    largest_bytes: int = 0  # of its messages meanwhile
    rests_until_s: float | None = None  # None: it does not
    stream: Stream = field(init=False)

    @property
    def is_heard(self) -> bool:
        """Whether what it told counts now."""
        return self.counts.connected and self.stream.sequence >= 0


class StreamState(NamedTuple):
    """lost_s: since when there is no connection, in seconds of age; None: there is one. heard: what it told
    counts now. rests: it was cut off, because too much came of it."""

    source: EventSource
    place: int
    lost_s: float | None
    heard: bool
    rests: bool = False
