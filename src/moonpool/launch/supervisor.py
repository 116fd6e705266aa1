"""Keeps a group of processes running: starts them stage by stage, restarts what dies, ends all of them
together.

    stage 0, e.g. the master     starts; when it is ready ...
    stage 1, e.g. the nodes      ... these start together; when all are ready ...
    stage 2, e.g. the engines    ... these; and so on; when the last stage is ready the group is up

From then on each process is on its own: one that dies is started again after a pause (backoff). One
that dies again and again before it was ever ready, or that says that it was called wrongly (exit code 2),
ends the group. run() always returns with every process and all descendants gone. Everything here belongs to
one event loop.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonpool.core.config.sections import Up
from moonpool.core.errors import Error
from moonpool.core.service.backoff import Backoff
from moonpool.core.service.exit_codes import EXIT_USAGE
from moonpool.core.service.processes import Nursery, Process

PROBE_INTERVAL_S = 0.2
LOG_TAIL_BYTES = 2000
LOG_TAIL_LINES = 8


class State(enum.Enum):
    """Of one process: stopped -> starting -> ready, back to stopped with each death."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"


@dataclass(frozen=True)
class Spec:
    """One process to keep. ``ready`` tells whether it serves now; it is asked again and again while it
    starts. is_base: the others stand on it, so it ends after them.
    """

    name: str
    kind: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    ready: Callable[[], Awaitable[bool]]
    stage: int = 0
    url: str = ""
    is_base: bool = False


class StartFailed(Error):
    """A process of the group could not be started."""


class Kept:
    """One process of the group, alive or between two lives."""

    def __init__(self, spec: Spec, limits: Up) -> None:
        self.spec = spec
        self.state = State.STOPPED
        self.process: Process | None = None
        self.starts = 0
        self.first_ready = asyncio.Event()
        self.backoff = Backoff(
            initial_s=limits.backoff_initial_s,
            max_s=max(limits.backoff_initial_s, limits.backoff_max_s),
            reset_s=limits.backoff_reset_s,
        )

    @property
    def pid(self) -> int | None:
        """Of the process that runs now; None while it is stopped."""
        return None if self.process is None else self.process.pid


@dataclass(frozen=True)
class Event:
    """Something a person may want to read: ``text`` is about the process ``name``, or about all when that is
    empty.
    """

    name: str
    text: str
    failed: bool = False


@dataclass
class Supervisor:
    """Keeps ``specs`` running, within the times and counts of ``limits``. ``tell`` gets each event,
    ``changed`` is called whenever a pid or a state changed, ``when_up`` once, when everything is ready.
    """

    specs: Sequence[Spec]
    limits: Up
    tell: Callable[[Event], None]
    changed: Callable[[], None] = lambda: None
    when_up: Callable[[], None] = lambda: None
    tag: str = "up"
    kept: list[Kept] = field(default_factory=list)

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Until ``stop`` is set; ``hurry`` cuts the grace short. Raises StartFailed when the group cannot
        start.
        """
        self.kept = [Kept(spec, self.limits) for spec in self.specs]
        nursery = Nursery()
        stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        keepers: list[asyncio.Future[None]] = []
        try:
            started_s = time.monotonic()
            for stage in sorted({spec.stage for spec in self.specs}):
                members = [kept for kept in self.kept if kept.spec.stage == stage]
                keepers += [asyncio.ensure_future(self._keep(kept, nursery, hurry)) for kept in members]
                all_ready: asyncio.Future[Any] = asyncio.gather(
                    *(kept.first_ready.wait() for kept in members)
                )
                try:
                    await asyncio.wait({all_ready, stopped, *keepers}, return_when=asyncio.FIRST_COMPLETED)
                    if stopped.done():
                        return
                    _raise_first(keepers)
                finally:
                    all_ready.cancel()
            self.tell(Event("", f"all is up after {time.monotonic() - started_s:.1f} s"))
            self.when_up()
            await asyncio.wait({stopped, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            _raise_first(keepers)
        finally:
            stopped.cancel()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(stopped, *keepers, return_exceptions=True)
            await self._end_all(nursery, hurry)
            nursery.close()
            self.changed()

    async def _end_all(self, nursery: Nursery, hurry: asyncio.Event) -> None:
        """All at once, save for what the others stand on: that ends after them, its last stage first. So
        engines may still save to their node, and a node may still leave its master.
        """
        bases = sorted({kept.spec.stage for kept in self.kept if kept.spec.is_base}, reverse=True)
        for members in (
            [kept for kept in self.kept if not kept.spec.is_base],
            *([kept for kept in self.kept if kept.spec.is_base and kept.spec.stage == at] for at in bases),
        ):
            await asyncio.gather(
                *(
                    nursery.end(kept.process, grace_s=self.limits.grace_s, hurry=hurry)
                    for kept in members
                    if kept.process is not None
                )
            )
            for kept in members:
                kept.state, kept.process = State.STOPPED, None

    async def _keep(self, kept: Kept, nursery: Nursery, hurry: asyncio.Event) -> None:
        failures = 0
        while True:
            started_s = time.monotonic()
            process = self._start(kept, nursery)
            kept.backoff.started(started_s)
            problem = await self._until_death(kept, process)
            await nursery.end(process, grace_s=self.limits.grace_s, hurry=hurry)
            kept.state, kept.process = State.STOPPED, None
            now = time.monotonic()
            failures = 0 if kept.first_ready.is_set() else failures + 1
            # Starting it again cannot help.
            called_wrongly = process.exited.done() and process.exited.result() == EXIT_USAGE
            if not kept.first_ready.is_set() and (
                called_wrongly or failures >= self.limits.start_attempts_max
            ):
                raise StartFailed(
                    _obituary(kept.spec, problem, failures), operation="up", peer=kept.spec.name
                )
            again_s = kept.backoff.died(now)
            self.tell(
                Event(
                    kept.spec.name,
                    f"{problem} after {now - started_s:.1f} s; starts again in {again_s - now:.1f} s; "
                    f"see {kept.spec.log}",
                    failed=True,
                )
            )
            self.changed()
            await asyncio.sleep(again_s - now)

    def _start(self, kept: Kept, nursery: Nursery) -> Process:
        spec = kept.spec
        try:
            process = nursery.spawn(
                spec.command, env=spec.env, output=spec.log, tag=f"{self.tag}/{spec.name}"
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StartFailed(
                f"{spec.name}: cannot start {spec.command[0]}: {reason}",
                operation="up",
                peer=spec.name,
                cause=error,
            ) from error
        kept.process, kept.state = process, State.STARTING
        kept.starts += 1
        self.tell(Event(spec.name, f"started, pid {process.pid}"))
        self.changed()
        return process

    async def _until_death(self, kept: Kept, process: Process) -> str:
        """Waits for the end of one life, and says what ended it."""
        started_s = time.monotonic()
        probing = asyncio.ensure_future(self._until_ready(kept, started_s))
        try:
            waits: set[asyncio.Future[Any]] = {probing, process.exited}
            done, _ = await asyncio.wait(
                waits,
                timeout=self.limits.ready_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                return f"was not ready within {self.limits.ready_timeout_s:.0f} s"
            if process.exited not in done:
                probing.result()
                kept.state = State.READY
                kept.first_ready.set()
                self.tell(
                    Event(
                        kept.spec.name,
                        f"ready after {time.monotonic() - started_s:.1f} s {kept.spec.url}".rstrip(),
                    )
                )
                self.changed()
            return _cause_of_death(await asyncio.shield(process.exited))
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _until_ready(self, kept: Kept, started_s: float) -> None:
        told_s = started_s
        while not await kept.spec.ready():
            await asyncio.sleep(PROBE_INTERVAL_S)
            now = time.monotonic()
            if now - told_s >= self.limits.progress_interval_s:
                told_s = now
                last = log_tail(kept.spec.log, lines=1)
                self.tell(
                    Event(
                        kept.spec.name,
                        f"starting for {now - started_s:.0f} s" + (f": {last}" if last else ""),
                    )
                )


def log_tail(path: Path, *, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log that say something, "" when there are none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def _cause_of_death(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"


def _obituary(spec: Spec, problem: str, failures: int) -> str:
    times = "" if failures == 1 else f" {failures} times"
    tail = log_tail(spec.log)
    return f"{spec.name} {problem}{times} before it was ready; its log is {spec.log}" + (
        f", which ends:\n{tail}" if tail else ""
    )


def _raise_first(keepers: Sequence[asyncio.Future[None]]) -> None:
    for keeper in keepers:
        if keeper.done():
            keeper.result()
