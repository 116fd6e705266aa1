"""What a source that hears of one key at a time (a pod, a key in etcd) knows of all of them, and when its
listener is told.

A rollout of a thousand pods is thousands of changes, and a listener that hears a full set looks at all of it:
so changes that come within GATHER_S are told together, and what changes nothing is not told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import TracebackType

from moonpool.disagg_proxy.discovery.membership import OFFERED_MAX
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine, SourceListener

DEBOUNCE_S = 0.05


class Debounce:
    """On the event loop. As a context: at its end what was not told yet is told, unless the source is
    cancelled."""

    def __init__(self, listener: SourceListener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._at: dict[str, DiscoveredEngine | None] = {}  # by key; None: it is known, and no engine
        self._ended: set[str] = set()  # names, since it was told last
        self._told_s = -DEBOUNCE_S
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Debounce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            if kind is None or issubclass(kind, Exception):
                self._tell()

    def all(self, engines: Mapping[str, DiscoveredEngine | None], ended: Iterable[str] = ()) -> None:
        """These are all keys there are; told at once. ended: names of engines that are gone for good."""
        self._at = dict(engines)
        self._ended.update(ended)
        self._tell()

    def put(self, key: str, found: DiscoveredEngine | None) -> None:
        """found: the engine that it is now, None for one that is none."""
        if key not in self._at and len(self._at) >= OFFERED_MAX:
            return
        before = self._at.get(key)
        self._at[key] = found
        if found != before:
            self._changed()

    def drop(self, key: str) -> None:
        """It is no more."""
        if self._at.pop(key, None) is not None:
            self._changed()

    def ended(self, name: str) -> None:
        """The engine of this name is gone for good, unless it is offered again."""
        self._ended.add(name)
        self._changed()

    def _changed(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(self._told_s + DEBOUNCE_S, self._tell)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._told_s = self._loop.time()
        ended, self._ended = self._ended, set()
        self._listener.found([found for _, found in sorted(self._at.items()) if found is not None], ended)
