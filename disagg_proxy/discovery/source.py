"""What a source of engines is, and what it yields."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.settings import EngineSpec


@dataclass(frozen=True, slots=True)
class DiscoveredEngine:
    """One engine. events: its stream of KV events, None where it has none. model: what it serves, until its
    /v1/models says so; "": not known."""

    spec: EngineSpec
    events: EventSource | None = None
    model: str = ""

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.spec.name


class SourceListener(Protocol):
    """What hears of a source."""

    def found(self, engines: Sequence[DiscoveredEngine], ended: Set[str] = frozenset()) -> None:
        """These are all there are now. ended: names of which is known that they are gone for good; of others
        that are missing it may be a flaw of the source."""

    def failed(self, why: str) -> None:
        """The source cannot say what there is, in one clause."""


class Source(Protocol):
    """name: for people, such as ``file:/etc/engines.yaml``."""

    name: str

    async def run(self, listener: SourceListener) -> None:
        """Tells the listener, again and again, until it is cancelled. Never ends by itself and never raises
        for what another process did."""
