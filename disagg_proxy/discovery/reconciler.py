"""Makes the fleet equal to what the sources report."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence, Set
from typing import Protocol

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moonpool.core.service import audit
from moonpool.disagg_proxy.discovery.membership import Membership, SourceState
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine, Source
from moonpool.disagg_proxy.metric_family import Values, family, family_of_each

FIRST_S = 5.0  # longest wait of a starting proxy for the first reports of its sources
RESTART_S = 1.0  # pause before a source that raised is run again

_log = logging.getLogger("moonpool.proxy")


class Fleet(Protocol):
    """The fleet that is changed: disagg_proxy/fleet.py."""

    @property
    def room(self) -> int:
        """Number of engines that may join now."""

    def join(self, found: DiscoveredEngine) -> object:
        """Adds an engine. Raises what the addition of a broken one raises."""

    def leave(self, name: str) -> None:
        """Removes an engine; its requests finish first."""


class SourceStatus(msgspec.Struct):
    """A source in GET /engines and GET /health.

    state:   waiting (for its first report), ok, or lost: the last report stays in force.
    why:     reason of the state lost, "" otherwise.
    engines: number of engines in the last report.
    age_s:   seconds since the last report; None: there was none.
    """

    name: str
    state: str
    why: str
    engines: int
    age_s: float | None


class Reconciler(Collector):
    """Runs on one event loop. ``start``, then ``close``; ``look`` when the fleet has room again."""

    def __init__(self, sources: Sequence[Source], membership: Membership, fleet: Fleet) -> None:
        self._sources = sources
        self._membership = membership
        self._fleet = fleet
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._heard = asyncio.Event()
        self._told: set[str] = set()  # sources that were logged as lost
        self._refused_told: dict[str, int] = {}
        self.joined = self.left = 0

    async def start(self) -> None:
        """Runs the sources. Returns when each has reported, or after FIRST_S seconds."""
        self._tasks = [self._loop.create_task(self._run(source)) for source in self._sources]
        try:
            async with asyncio.timeout(FIRST_S):
                while any(state.at_s is None and not state.failures for state in self._states()):
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            _log.warning("not all sources of engines have answered within %g s; the proxy serves", FIRST_S)

    async def close(self) -> None:
        """Stops the sources' tasks and the timer."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def look(self) -> None:
        """Applies the changes that are due, and sets the timer for the next ones."""
        changes = self._membership.changes(self._loop.time(), self._fleet.room)
        for name, why in changes.leave:
            self.left += 1
            _log.info("engine %s leaves: %s", name, why)
            audit.record("engine_removed", engine=name, why=why)
            self._fleet.leave(name)
        for found in changes.join:
            try:
                self._fleet.join(found)
            except Exception:  # the others join; this one is tried again when something else changes
                _log.exception("engine %s (%s) cannot join", found.name, found.spec.url)
                self._membership.cannot_join(found.name)
                continue
            self.joined += 1
            audit.record("engine_joined", engine=found.name, url=found.spec.url, role=found.spec.role)
            _log.info("engine %s (%s, %s) joins", found.name, found.spec.url, found.spec.role)
        self._tell_refused()
        due_s = self._membership.next_s()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due_s is None else self._loop.call_at(due_s, self.look)

    def rows(self) -> list[SourceStatus]:
        """The status of each source."""
        now_s = self._loop.time()
        return [
            SourceStatus(
                state.name,
                "waiting" if state.at_s is None and not state.failures else "lost" if state.why else "ok",
                state.why,
                len(state.engines),
                None if state.at_s is None else round(now_s - state.at_s, 3),
            )
            for state in self._states()
        ]

    def collect(self) -> Iterator[Metric]:
        """Metric families of the sources and the membership."""
        rows = {row.name: row for row in self.rows()}
        states, refused = self._membership.sources, self._membership.refused
        text = "1 while the source says what there is; else what it said last is taken to be true"
        yield family_of_each("discovery_up", text, rows, lambda row: row.state == "ok", "source")
        ages: Values = {(name,): row.age_s for name, row in rows.items() if row.age_s is not None}
        yield family("discovery_age_seconds", "Since the source last said", ages, "source")
        text = "Engines that the source offers"
        yield family_of_each("discovery_engines", text, rows, lambda row: row.engines, "source")
        text = "Times at which it said"
        yield family_of_each("discovery_updates_total", text, states, lambda each: each.updates, "source")
        text = "Times at which it could not"
        yield family_of_each("discovery_failures_total", text, states, lambda each: each.failures, "source")
        counts: Values = {(reason,): refused[reason] for reason in ("duplicate", "no_room", "broken")}
        yield family(
            "discovery_refused", "Engines that are offered and not taken, by reason", counts, "reason"
        )
        text = "Engines that their source does not name, for less than discovery_grace_s"
        yield family("discovery_missing", text, self._membership.missing)
        yield family("engines_joined_total", "Engines that joined", self.joined)
        yield family("engines_left_total", "Engines that left", self.left)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self._membership.check_integrity()

    def _states(self) -> Sequence[SourceState]:
        return tuple(self._membership.sources.values())

    async def _run(self, source: Source) -> None:
        listener = _Listener(self, source.name)
        while True:
            try:
                await source.run(listener)
            except Exception as error:  # a defect of one source: the others go on, and it is run again
                _log.exception("the source of engines %s broke; it begins anew", source.name)
                listener.failed(f"it broke: {type(error).__name__}: {error}")
            await asyncio.sleep(RESTART_S)

    def _found(self, source: str, engines: Sequence[DiscoveredEngine], ended: Set[str]) -> None:
        before = len(self._membership.sources[source].engines)
        self._membership.found(source, engines, ended, self._loop.time())
        if before > 1 and not engines and not ended:  # on purpose, or the server lost its data
            _log.warning(
                "%s names no engine any more; the %d that it named leave after the grace", source, before
            )
        if source in self._told:
            self._told.discard(source)
            _log.info("%s says again which engines there are: %d", source, len(engines))
        self._heard.set()
        self.look()

    def _failed(self, source: str, why: str) -> None:
        self._membership.failed(source, why)
        if source not in self._told:
            self._told.add(source)
            kept = len(self._membership.sources[source].engines)
            _log.warning("%s: %s; the %d engines that it named last stay", source, why, kept)
        self._heard.set()

    def _tell_refused(self) -> None:
        """Warns when more engines are refused than before."""
        for reason, sentence in (
            ("duplicate", "%d engines are offered under a name or at an address that another has: left out"),
            ("no_room", "%d engines are offered beyond those that there is room for (engines_max): left out"),
        ):
            count = self._membership.refused[reason]
            if count > self._refused_told.get(reason, 0):
                _log.warning(sentence, count)
            self._refused_told[reason] = count


class _Listener:
    """The listener of one source."""

    def __init__(self, reconciler: Reconciler, source: str) -> None:
        self._follower = reconciler
        self._source = source

    def found(self, engines: Sequence[DiscoveredEngine], ended: Set[str] = frozenset()) -> None:
        self._follower._found(self._source, engines, ended)

    def failed(self, why: str) -> None:
        self._follower._failed(self._source, why)
