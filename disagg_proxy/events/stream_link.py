"""The subscriber's state of one stream. Values only; the subscriber's thread writes them, other threads read
single fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from moonpool import _native
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.events.stream import Stream


@dataclass(slots=True)
class SourceCounts:
    """Counters of one source, besides those of its stream: blocks; ``malformed`` counts messages."""

    malformed: int = 0
    stored: int = 0
    removed: int = 0
    unknown: int = 0
    skipped: int = 0
    forgets: int = 0
    probes: int = 0  # questions whether a silent publisher still answers
    rests: int = 0  # pauses, because more arrived than could be processed
    connected: bool = False
    lag_s: float = 0.0  # sender's clock to ours, of the last batch that was not replayed
    lag_max_s: float = 0.0


@dataclass(slots=True)
class StreamLink:
    """A source with its sockets; only the subscriber's thread uses it."""

    source: EventSource
    place: int
    sub: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    secret: bytes = field(default=b"", repr=False)  # by which it was asked; b"": in plain
    dialed_s: float = 0.0  # when
    counts: SourceCounts = field(default_factory=SourceCounts)
    index: _native.PrefixIndex | None = None
    index_before: _native.PrefixIndex | None = None  # the index of its former block size, or its present one
    asking: zmq.Socket[bytes] | None = None
    answer_due_s: float = 0.0
    given_up: bool = False
    lost_since_s: float | None = None  # time of the disconnection; None: connected
    lost: bool = False  # disconnected for lost_s
    live: bool = False  # of an engine: its index is exact
    spoke_s: float = 0.0  # time of the last message or answer, or of a question for a replay
    prompts_before: int = 0  # prompts that had been sent to engines by then
    probe: zmq.Socket[bytes] | None = None  # kept between probes: each connection costs a handshake
    probed_s: float | None = None  # time of the probe that is not answered yet; None: there is none
    mute: bool = False  # it is connected, and has not answered the last replay request or probe
    unread: bool = False  # the last replay was given up, so earlier messages may be missing
    behind_since_s: float | None = None  # unprocessed messages since; None: none
    largest_bytes: int = 0  # largest message since then
    rests_until_s: float | None = None  # end of the pause; None: not paused
    stream: Stream = field(init=False)

    @property
    def is_heard(self) -> bool:
        """Whether its blocks count now."""
        return self.counts.connected and self.stream.sequence >= 0


class StreamState(NamedTuple):
    """The state of one stream.

    lost_s: seconds without a connection; None: connected.
    heard:  whether its blocks count now.
    rests:  whether it is paused, because too much arrived.
    mute:   whether its publisher is connected and does not answer.
    """

    source: EventSource
    place: int
    lost_s: float | None
    heard: bool
    rests: bool = False
    mute: bool = False
