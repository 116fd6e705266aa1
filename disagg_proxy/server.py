"""Puts the proxy together and runs it: ``serve`` on a loop that exists, ``run`` as a process of its own.

Threads: one. Everything runs on the event loop that ``serve`` is called on.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import uvloop

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.budget import BodyBudget
from moonpool.disagg_proxy.client_connection import ClientConnection, ClientContext
from moonpool.disagg_proxy.conductor.policy import make_policy
from moonpool.disagg_proxy.dispatcher import Dispatcher
from moonpool.disagg_proxy.engine import Engine
from moonpool.disagg_proxy.health import HealthChecker
from moonpool.disagg_proxy.metrics import ProxyCollector, ProxyCounts, ProxyGauges
from moonpool.disagg_proxy.pages import Pages
from moonpool.disagg_proxy.relay import RelayContext
from moonpool.disagg_proxy.settings import (
    BreakerLimits,
    Deadlines,
    EngineSpec,
    HealthChecks,
    Limits,
    ProxySettings,
    parse_engines,
)
from moonpool.disagg_proxy.upstream import Clock

_log = logging.getLogger("moonpool.proxy")
_BACKLOG = 1024
_FILES_RESERVED = 64


class Proxy:
    """All parts of one proxy, on the running loop. ``open``, then ``drain``, then ``close``."""

    def __init__(self, settings: ProxySettings, clock: Clock = time.monotonic) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._clock = clock
        self._settings = settings
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._emptied = asyncio.Event()
        self._counts = ProxyCounts()
        engines = [Engine(place, spec, settings, clock) for place, spec in enumerate(settings.engines)]
        self._dispatcher = Dispatcher(engines, make_policy(settings.policy))
        collector = ProxyCollector(self.gauges)
        pages = Pages(self._dispatcher, collector, settings.policy, settings.health.interval_s)
        self.clients = ClientContext(
            relays=RelayContext(self._dispatcher, settings.limits, settings.deadlines, loop, clock),
            pages=pages,
            budget=BodyBudget(settings.limits.bodies_bytes_max),
            limits=settings.limits,
            deadlines=settings.deadlines,
            connections=set(),
            rejected=self._counts.rejected,
            next_request_id=_request_ids(),
            changed=self._look_whether_empty,
        )

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self._dispatcher.engines

    async def open(self) -> str:
        """Check every engine once, then listen. Returns the URL. Raises ConfigError when the address is not
        to be had."""
        self._server = await self._listen()
        checkers = [HealthChecker(engine, self._settings.health, self._clock) for engine in self.engines]
        self._tasks = [self._loop.create_task(checker.run()) for checker in checkers]
        self._tasks.append(self._loop.create_task(self._sweep_forever()))
        await asyncio.gather(*(checker.first for checker in checkers))
        await self._server.start_serving()
        host, port = self._server.sockets[0].getsockname()[:2]
        if not self._settings.loopback:
            _log.warning(
                "the proxy listens on %s without authentication: whoever reaches it may use the engines", host
            )
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def drain(self) -> bool:
        """Accept no more, let running requests finish within drain_s. Returns whether all did."""
        self.clients.draining = True
        if self._server is not None:
            self._server.close()
        for client in list(self.clients.connections):
            client.drain()
        self._look_whether_empty()
        try:
            async with asyncio.timeout(self._settings.deadlines.drain_s):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End everything now. May be called at any time, also after a failed ``open``."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in list(self.clients.connections):
            client.abort()
        for engine in self.engines:
            engine.pool.close()
        await asyncio.sleep(0)  # the transports' last callbacks

    def gauges(self) -> ProxyGauges:
        return ProxyGauges(
            client_connections=len(self.clients.connections),
            held_body_bytes=self.clients.budget.held,
            counts=self._counts,
            engines=[engine.gauges() for engine in self.engines],
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of a part is broken."""
        self.clients.budget.check_integrity()
        for engine in self.engines:
            engine.check_integrity()

    async def _listen(self) -> asyncio.Server:
        host, port = self._settings.host, self._settings.port
        try:
            return await self._loop.create_server(
                self._accept, host, port, backlog=_BACKLOG, reuse_address=True, start_serving=False
            )
        except OSError as error:
            raise _no_address(host, port, error) from error

    def _accept(self) -> ClientConnection:
        self._counts.connections += 1
        return ClientConnection(self.clients)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.deadlines.sweep_s)
            self._sweep(self._clock())

    def _sweep(self, now: float) -> None:
        for client in list(self.clients.connections):
            client.sweep(now)
        silent_max_s = self._settings.deadlines.silent_engine_s
        for engine in self.engines:
            engine.pool.expire(now)
            if engine.liveness.silent_s(now) >= silent_max_s:
                since = now - engine.liveness.silent_s(now)
                for relay in list(engine.relays):
                    relay.engine_silent(since, now)

    def _look_whether_empty(self) -> None:
        if self.clients.draining and not self.clients.connections:
            self._emptied.set()


async def serve(
    settings: ProxySettings,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until stop is set (or the task is cancelled), then drain and return.

    ready: called once with the URL when requests are accepted and every engine was checked once.
    Raises ConfigError when the address cannot be had.
    """
    proxy = Proxy(settings)
    try:
        url = await proxy.open()
        if ready is not None:
            ready(url)
        await (stop or asyncio.Event()).wait()
        if not await proxy.drain():
            _log.warning(
                "requests were still running after %g s and were cut off", settings.deadlines.drain_s
            )
    finally:
        await proxy.close()


def run(settings: ProxySettings) -> int:
    """Run a proxy in this process until SIGTERM or SIGINT. Returns the exit code: 0, or 2 for a setting that
    is wrong.

    A second signal ends it without waiting for running requests.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_until_signal(_fit_open_files(settings)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 0
    return 0


async def _serve_until_signal(settings: ProxySettings) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    serving = asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set() and serving is not None:
            serving.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    engines = ", ".join(f"{engine.name} at {engine.url}" for engine in settings.engines)

    def ready(url: str) -> None:
        print(f"moonpool proxy: serving on {url} ({settings.policy} over {engines})", flush=True)

    await serve(settings, ready=ready, stop=stop)


def _fit_open_files(settings: ProxySettings) -> ProxySettings:
    """Raise the limit of open files as far as it goes, and the limit of connections no further than that:
    each client may need a connection to an engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * settings.limits.client_connections_max + _FILES_RESERVED
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= needed:
        return settings
    fitting = max(1, (soft - _FILES_RESERVED) // 2)
    _log.info("only %d open files are allowed here, so at most %d client connections", soft, fitting)
    return replace(settings, limits=replace(settings.limits, client_connections_max=fitting))


def _request_ids() -> Callable[[], bytes]:
    """Ids for requests that came without one: unique by a random prefix and a count."""
    prefix = os.urandom(6).hex().encode()
    counter: Iterator[int] = itertools.count(1)
    return lambda: b"%b-%x" % (prefix, next(counter))


def _no_address(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        holder = f"ss -ltnp 'sport = :{port}'"
        what = f"{host}:{port} is in use; stop what listens there ({holder}) or choose another --port"
    elif error.errno == errno.EACCES:
        what = f"{host}:{port} may not be opened by this user; choose a --port above 1023"
    elif isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        what = f"{host!r} is no address of this machine; choose another --host"
    else:
        what = f"cannot listen on {host}:{port}: {error.strerror or error}"
    return ConfigError(
        f"moonpool proxy: {what}", operation="listen", key="proxy.port", peer=f"{host}:{port}", cause=error
    )


__all__ = [
    "BreakerLimits",
    "Deadlines",
    "EngineSpec",
    "HealthChecks",
    "Limits",
    "Proxy",
    "ProxySettings",
    "parse_engines",
    "run",
    "serve",
]
