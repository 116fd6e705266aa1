"""The interface of a source of engines, and of its listener."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.settings import EngineSpec


@dataclass(frozen=True, slots=True)
class DiscoveredEngine:
    """One engine as a source describes it.

    events: its stream of KV events; None: it publishes none.
    model:  the model it serves, used until its /v1/models answers; "": unknown.
    """

    spec: EngineSpec
    events: EventSource | None = None
    model: str = ""

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.spec.name


class SourceListener(Protocol):
    """Receives the reports of one source."""

    def found(self, engines: Sequence[DiscoveredEngine], ended: Set[str] = frozenset()) -> None:
        """Reports the full list of engines. ended: names that are certainly gone; an engine that is merely
        missing from the list may be missing by a fault of the source, and gets a grace period."""

    def failed(self, why: str) -> None:
        """Reports that the source cannot list engines; why: one clause."""


class Source(Protocol):
    """name: for logs and pages, such as ``file:/etc/engines.yaml``."""

    name: str

    async def run(self, listener: SourceListener) -> None:
        """Reports to the listener until cancelled. Never returns by itself, and never raises for faults of
        other processes."""
