"""Debounces per-key watch events (pods, etcd keys) into full lists for the listener.

A rollout of a thousand pods causes thousands of events, and the listener processes the full list each time.
So events within DEBOUNCE_S are reported together, and events without an effect are not reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import TracebackType

from moonpool.disagg_proxy.discovery.membership import OFFERED_MAX
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine, SourceListener

DEBOUNCE_S = 0.05


class Debounce:
    """The engines of one source, by key. Runs on the event loop. As a context manager it reports pending
    changes at exit, unless the source was cancelled."""

    def __init__(self, listener: SourceListener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._at: dict[str, DiscoveredEngine | None] = {}  # by key; None: a known key that is no engine
        self._ended: set[str] = set()  # names, since the last report
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
        """Replaces all keys and reports at once. ended: names of engines that are certainly gone."""
        self._at = dict(engines)
        self._ended.update(ended)
        self._tell()

    def put(self, key: str, found: DiscoveredEngine | None) -> None:
        """Sets one key. found: its engine; None: the key is no engine."""
        if key not in self._at and len(self._at) >= OFFERED_MAX:
            return
        before = self._at.get(key)
        self._at[key] = found
        if found != before:
            self._changed()

    def drop(self, key: str) -> None:
        """Removes one key."""
        if self._at.pop(key, None) is not None:
            self._changed()

    def ended(self, name: str) -> None:
        """Marks an engine as certainly gone, unless it is listed again."""
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
