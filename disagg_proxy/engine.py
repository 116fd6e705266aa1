"""Everything the proxy holds about one engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from moonpool.disagg_proxy.conductor.breaker import Breaker
from moonpool.disagg_proxy.conductor.liveness import Liveness
from moonpool.disagg_proxy.metrics import EngineCounts, EngineGauges
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings
from moonpool.disagg_proxy.upstream import Clock, UpstreamPool

if TYPE_CHECKING:
    from moonpool.disagg_proxy.relay import Relay

_log = logging.getLogger("moonpool.proxy")


class Engine:
    """Owns the pool of connections; liveness and breaker say whether it may be chosen.

    place:  its position in the settings, stable.
    relays: the requests that are there now.
    host:   what goes into the Host field.
    """

    def __init__(self, place: int, spec: EngineSpec, settings: ProxySettings, clock: Clock) -> None:
        address = spec.address
        self.place = place
        self.name = spec.name
        self.url = spec.url
        self.label = spec.name.encode()
        self.host = _host_field(*address)
        self.liveness = Liveness(settings.health.timeouts_max)
        self.breaker = Breaker(
            settings.breaker.failures_max, settings.breaker.open_s, settings.breaker.open_s_max
        )
        self.pool = UpstreamPool(address, settings.limits.idle_upstreams_max, settings.deadlines, clock)
        self.relays: set[Relay] = set()
        self.counts = EngineCounts()

    @property
    def in_flight(self) -> int:
        return len(self.relays)

    def answered_well(self, now: float) -> None:
        """A health check came back well."""
        if self.liveness.succeeded(now):
            _log.info("engine %s (%s) is healthy", self.name, self.url)

    def answered_late(self, now: float, why: str) -> None:
        """A health check was not answered in time."""
        if self.liveness.timed_out(now, why):
            _log.warning("engine %s (%s) leaves the rotation: %s", self.name, self.url, why)

    def refused(self, now: float, why: str) -> None:
        """The engine is certainly not serving."""
        if self.liveness.refused(now, why):
            _log.warning("engine %s (%s) leaves the rotation: %s", self.name, self.url, why)

    def gauges(self) -> EngineGauges:
        return EngineGauges(
            name=self.name,
            healthy=self.liveness.healthy,
            breaker_open=not self.breaker.closed,
            in_flight=self.in_flight,
            connections=len(self.pool),
            counts=self.counts,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of a part is broken."""
        self.liveness.check_integrity()
        self.breaker.check_integrity()
        self.pool.check_integrity()


def _host_field(host: str, port: int) -> bytes:
    name = f"[{host}]" if ":" in host else host
    return f"{name}:{port}".encode("idna" if not name.isascii() else "ascii")
