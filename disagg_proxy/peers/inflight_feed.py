"""Tells what one proxy has in flight in the words of ``wire.py``."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.disagg_proxy.conductor.observer import InFlight, Observer
from moonpool.disagg_proxy.peers.wire import Begun, Change, Gone, Prefilled, Sent


class InflightFeed(Observer):
    """tell: takes each change of the scheduler that it is subscribed to."""

    def __init__(self, tell: Callable[[Change], None]) -> None:
        self._tell = tell

    def on_dispatch(self, request: int, flight: InFlight, now_s: float) -> None:
        """As ``wire.Sent``."""
        self._tell(sent(request, flight, now_s))

    def on_prefilled(self, request: int) -> None:
        """As ``wire.Prefilled``."""
        self._tell(Prefilled(request))

    def on_decode(self, request: int, *, computed: bool) -> None:
        """As ``wire.Begun``."""
        self._tell(Begun(request, computed))

    def on_leave(self, request: int) -> None:
        """As ``wire.Gone``."""
        self._tell(Gone(request))


def sent(request: int, flight: InFlight, now_s: float) -> Sent:
    """A request as other proxies are told of it."""
    choice, asked = flight.choice, flight.asked
    computes = choice.computes
    return Sent(
        request,
        computes.known_as,
        choice.decode.known_as,
        asked.tokens,
        asked.own_at(computes),
        flight.pool,
        flight.prefill_s,
        flight.silent,
        max(now_s - flight.at_s, 0.0),
        flight.computed,
        flight.decoding,
        computes.site,
        choice.decode.site,
    )
