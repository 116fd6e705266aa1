"""The engines of one proxy, which join and leave while it runs. The fleet gives each a place and updates
every part that keeps state of it.

    free --join--> there --leave--> leaving --its last request is over--> free

A place is a small number that stands for an engine everywhere. It is reused only when no request of its
former engine is in flight. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable

import msgspec

from moonpool._native import Relay
from moonpool.core.errors import ConfigError, InvalidArgument, Unavailable
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine
from moonpool.disagg_proxy.dispatch.dispatcher import Dispatcher
from moonpool.disagg_proxy.dispatch.prefix_locator import PrefixLocator
from moonpool.disagg_proxy.engine_api_keys import read_engine_keys
from moonpool.disagg_proxy.engines.bootstrap import Bootstrap
from moonpool.disagg_proxy.engines.bootstrap_conflicts import BootstrapConflicts
from moonpool.disagg_proxy.engines.engine import Engine, bootstrap_of
from moonpool.disagg_proxy.engines.health import HealthChecker
from moonpool.disagg_proxy.events.subscriber import Subscriber
from moonpool.disagg_proxy.settings import ProxySettings
from moonpool.disagg_proxy.tls import EngineTls
from moonpool.disagg_proxy.tracing.recorder import Recorder

_log = logging.getLogger("moonpool.proxy")


class Fleet:
    """``start`` begins the health checks, ``close`` ends them; engines may join before ``start``."""

    def __init__(
        self,
        settings: ProxySettings,
        relay: Relay,
        dispatcher: Dispatcher,
        locator: PrefixLocator,
        subscriber: Subscriber | None,
        recorder: Recorder | None,
        tls: EngineTls,
    ) -> None:
        self._settings = settings
        self._tls = tls
        self._relay = relay
        self._dispatcher = dispatcher
        self._locator = locator
        self._subscriber = subscriber
        self._recorder = recorder
        self._keys = read_engine_keys(settings.engine_key_file)
        self._free = list(range(settings.places))
        self._there: dict[str, tuple[DiscoveredEngine, Engine]] = {}
        self._leaving: dict[int, Engine] = {}  # by place
        self._failed: set[int] = set()  # places of engines that leave because their join failed
        self._pages: dict[int, Bootstrap] = {}  # by place
        self._conflicts = BootstrapConflicts(settings.engines)  # engines of the settings have joined, or will
        self._checkers: dict[int, HealthChecker] = {}  # by place
        self._checks: dict[int, asyncio.Task[None]] = {}
        self._started = False
        self.freed: Callable[[], None] = lambda: None  # a place has become free

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines by place, without those that are leaving."""
        return self._dispatcher.engines

    @property
    def leaving(self) -> tuple[Engine, ...]:
        """Removed engines that still have requests in flight."""
        return tuple(self._leaving.values())

    @property
    def room(self) -> int:
        """Number of engines that may join now."""
        return len(self._free)

    def find(self, name: str) -> DiscoveredEngine | None:
        """The engine of this name; None: there is none, or it is leaving."""
        there = self._there.get(name)
        return None if there is None else there[0]

    def engine(self, place: int) -> Engine | None:
        """The engine at this place; None: there is none, or it is leaving."""
        return None if place in self._leaving else self._dispatcher.at[place]

    def join(self, found: DiscoveredEngine) -> Engine:
        """Adds an engine. Raises LookupError when the name is taken or no place is free. After any error the
        engine is not in the fleet and its place is free."""
        spec = found.spec
        if spec.name in self._there:
            raise LookupError(f"there is an engine called {spec.name} already")
        if not self._free:
            raise LookupError(f"there are {self._settings.places} engines, and no place for {spec.name}")
        place = heapq.heappop(self._free)
        touched = self._conflicts.add(spec)
        try:
            engine = self._enter(found, place)
        except Exception:
            self._undo(found, place)
            raise
        try:
            engine.attach_relay(self._relay)
            engine.set_models(None)
            self._look_at_page(engine)
            self._look_at_pages(touched)
            if self._started:
                self._check(engine)
        except Exception:
            self._failed.add(place)
            self.leave(spec.name)
            raise
        return engine

    def _enter(self, found: DiscoveredEngine, place: int) -> Engine:
        """Enters the engine into all parts; the relay comes last, since requests may follow at once."""
        spec = found.spec
        engine = Engine(place, spec, self._settings, self._conflicts)
        if found.model:
            engine.named = {found.model: msgspec.json.encode({"id": found.model, "object": "model"})}
        engine.turned = self._turned
        engine.became = self._dispatcher.became
        self._there[spec.name] = found, engine
        if self._recorder is not None:
            names = list(self._recorder.engines)
            names[place] = spec.name
            self._recorder.engines = tuple(names)
        self._locator.join(place)
        if self._subscriber is not None and found.events is not None:
            self._subscriber.follow(found.events, place)
        self._dispatcher.join(engine)
        engine.key = self._keys.of(spec, given=spec in self._settings.engines)
        if spec.is_https:
            engine.tls = self._tls
        try:
            self._relay.add_engine(place, engine.name, engine.host, engine.role, engine.key, spec.is_https)
        except (InvalidArgument, Unavailable) as error:
            raise ConfigError(str(error), operation="tls", key="proxy.engine_tls_ca", cause=error) from error
        return engine

    def _undo(self, found: DiscoveredEngine, place: int) -> None:
        """Takes back ``_enter``; the relay never knew the engine, so no request was sent to it."""
        name = found.spec.name
        self._there.pop(name, None)
        self._conflicts.remove(name)
        if self._subscriber is not None and found.events is not None:
            self._subscriber.drop(found.events.name, place)
        engine = self._dispatcher.at[place]
        if engine is not None:
            self._dispatcher.part(engine)
            self._dispatcher.leave(engine)
        self._locator.leave(place)
        heapq.heappush(self._free, place)

    def leave(self, name: str) -> None:
        """Removes an engine, if present: it gets no further requests, and those in flight have drain_s
        seconds to finish."""
        there = self._there.pop(name, None)
        if there is None:
            return
        found, engine = there
        self._leaving[engine.place] = engine
        self._stop_checking(engine)
        self._dispatcher.part(engine)
        if self._subscriber is not None and found.events is not None:
            self._subscriber.drop(found.events.name, engine.place)
        self._pages.pop(engine.place, None)
        self._look_at_pages(self._conflicts.remove(name))
        self._relay.remove_engine(engine.place, self._settings.deadlines.drain_s)

    def gone(self, place: int) -> None:
        """Frees the place of an engine that has left: its last request is over."""
        engine = self._leaving.pop(place, None)
        if engine is None:
            return
        self._dispatcher.leave(engine)
        self._locator.leave(place)
        heapq.heappush(self._free, place)
        _log.info("engine %s (%s) is gone", engine.name, engine.url)
        if place in self._failed:
            self._failed.remove(place)  # else it would be tried again at once, endlessly
        else:
            self.freed()

    async def start(self) -> None:
        """Starts the health checks; returns when each engine was checked once."""
        self._started = True
        for engine in self.engines:
            self._check(engine)
        await self.checked()

    async def checked(self) -> None:
        """Returns when each present engine was checked once, or has left."""
        first = [checker.first for checker in self._checkers.values()]
        if first:
            await asyncio.wait(first)

    async def close(self) -> None:
        """Stops all health checks."""
        tasks = list(self._checks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        places = [*self._free, *self._leaving, *(engine.place for _, engine in self._there.values())]
        if sorted(places) != list(range(self._settings.places)):
            raise AssertionError("a place has no engine, or two")
        for engine in self.engines:
            engine.check_integrity()

    def _check(self, engine: Engine) -> None:
        checker = HealthChecker(engine, self._settings.health, self._pages.values())
        self._checkers[engine.place] = checker
        self._checks[engine.place] = asyncio.get_running_loop().create_task(checker.run())

    def _stop_checking(self, engine: Engine) -> None:
        checker = self._checkers.pop(engine.place, None)
        if checker is not None:
            checker.first.cancel()
        task = self._checks.pop(engine.place, None)
        if task is not None:
            task.cancel()

    def _look_at_pages(self, names: Iterable[str]) -> None:
        for name in names:
            there = self._there.get(name)
            if there is not None:
                self._look_at_page(there[1])

    def _look_at_page(self, engine: Engine) -> None:
        """Recomputes whether the bootstrap page is usable, after engines have joined or left."""
        address = engine.spec.bootstrap_address
        if address is None or self._settings.handover not in ("auto", "concurrent"):
            return
        usable = not self._conflicts.is_shared(address) and self._conflicts.cut_off(address) is None
        if usable != (engine.bootstrap is not None):
            if self._conflicts.is_shared(address):
                _log.warning(
                    "engine %s: prefill and decode take two steps from now on, because an engine has joined "
                    "that would have its bootstrap page at %s:%d, too; give each its own (`bootstrap`)",
                    engine.name,
                    *address,
                )
            engine.bootstrap = bootstrap_of(engine.spec, self._settings, self._conflicts)  # logs the reason
        if engine.bootstrap is not None:
            self._pages[engine.place] = engine.bootstrap
        else:
            self._pages.pop(engine.place, None)

    def _turned(self, engine: Engine, healthy: bool) -> None:
        """Reports to the other parts that an engine left or entered the rotation."""
        if not healthy:
            self._dispatcher.forget(engine)
        there = self._there.get(engine.name)
        events = None if there is None else there[0].events
        if self._subscriber is not None and events is not None:
            self._subscriber.in_rotation(events.name, healthy)
