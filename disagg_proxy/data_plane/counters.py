"""The relay's counters (``Relay.counters``) as values. Latencies are histograms."""

from __future__ import annotations

import msgspec

from moonpool._native import Relay

BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip


Histogram = tuple[list[int], float]  # (counts between the bounds and above the last one, sum in seconds)


class EngineCounters(msgspec.Struct):
    """Counters of one engine.

    leaving:     it was removed, and has requests in flight.
    answers:     number of answers by the first digit of the status.
    failures:    by (stage, reason).
    disconnects: by stage.
    prefills:    by outcome.
    first_byte, whole, prefill: histograms of latencies in seconds.
    """

    place: int
    name: str
    leaving: bool
    healthy: bool
    breaker_closed: bool
    failures_in_a_row: int
    in_flight: int
    connections: int
    idle: int
    answers: list[int]
    failures: dict[tuple[str, str], int]
    disconnects: dict[str, int]
    prefills: dict[str, int]
    retries: int
    relayed_bytes: int
    first_byte: Histogram
    whole: Histogram
    prefill: Histogram

    @property
    def requests(self) -> int:
        """Number of answers, and of prefills for other engines."""
        return sum(self.answers) + sum(n for how, n in self.prefills.items() if how != "failed")


class Counters(msgspec.Struct):
    """Counters of the relay.

    engines:  ordered by place.
    reserved: members that clients must not send and that were dropped, by kind.
    handshake_failure: why the TLS handshake of a client failed last; "": none has.
    intact:   whether the relay's invariants hold.
    """

    engines: list[EngineCounters]
    rejected: dict[str, int]
    reserved: dict[str, int]
    handshake_failure: str
    client_connections: int
    held_body_bytes: int
    unread_bytes: int
    accepted: int
    observations_dropped: int
    log_lines_dropped: int
    policy_errors: int
    intact: bool


def look(relay: Relay) -> Counters:
    """The relay's counters, as of now."""
    return msgspec.convert(relay.counters(), Counters)
