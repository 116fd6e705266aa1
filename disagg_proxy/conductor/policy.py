"""Policies: small classes that choose one of the engines that may be chosen now.

A policy never sees an engine that is dead, resting or already tried for this request: that is the data
plane's part. Called on the data plane's thread with the GIL, once for each choice: it must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from moonpool.core.errors import ConfigError


class RequestView(Protocol):
    """What a policy may know of a request (``_native.ProxyRequest`` has more), made on demand."""

    @property
    def path(self) -> bytes: ...
    @property
    def body(self) -> memoryview: ...


class EngineView(Protocol):
    """What a policy may know of an engine. ``place`` is its stable position among all engines."""

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> int: ...
    @property
    def in_flight(self) -> int: ...


E = TypeVar("E", bound=EngineView)


class Policy(Protocol):
    def choose(self, request: RequestView, engines: Sequence[E], now: float) -> E:
        """One of engines (never empty, ordered by place). now: seconds of a monotonic clock."""
        ...


class RoundRobin:
    """Each engine in its turn. The turn goes by place, so that an engine that leaves or returns moves no
    other's."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: RequestView, engines: Sequence[E], now: float) -> E:
        for engine in engines:
            if engine.place > self._last:
                self._last = engine.place
                return engine
        chosen = engines[0]
        self._last = chosen.place
        return chosen


POLICIES: Mapping[str, Callable[[], Policy]] = {"round_robin": RoundRobin}


def make_policy(name: str) -> Policy:
    """A fresh policy of that name. Raises ConfigError that lists the names."""
    if name not in POLICIES:
        raise ConfigError(
            f"proxy: there is no policy {name!r}; choose one of {', '.join(sorted(POLICIES))}",
            operation="config",
            key="proxy.policy",
        )
    return POLICIES[name]()
