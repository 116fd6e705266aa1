"""The life of a node or a master: start, HTTP endpoints, a signal, stop.

    run_until_signal(service)  ->  start(), settled(), on_ready(), SIGTERM or SIGINT, linger(), stop()

The data plane runs in the native server's own threads and never enters Python; the event loop of this module
answers HTTP, logs the server's notes and waits for a signal.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec
from aiohttp import web

from moonpool.core.config.config import Config
from moonpool.core.config.logs import Notes
from moonpool.core.service import http_faults, metrics
from moonpool.core.service.addresses import Address
from moonpool.core.service.admin_http import AdminServer, AnswerTo
from moonpool.core.service.http_tls import FollowedContext
from moonpool.core.service.probes import STOPPING, Probes
from moonpool.core.service.processes import allow_many_descriptors, stay_through_hangup
from moonpool.core.service.tenant_keys import TakeLimits, TenantKeys, tenants_of

if TYPE_CHECKING:
    from moonpool import _native


S = TypeVar("S", bound="_native.Server | _native.MasterServer")


class HttpLimits(Protocol):
    """The HTTP settings of [node] and [master]."""

    @property
    def http_connections_max(self) -> int:
        """Connections at a time."""

    @property
    def http_timeout_s(self) -> float:
        """Seconds for one request."""


class ServiceProcess(Generic[S]):
    """Base of Node and Master. start() and stop() are called once each, from one event loop."""

    METRICS_PREFIX = metrics.PREFIX

    def __init__(self, config: Config) -> None:
        self.config = config
        self.http_url: str | None = None
        self._server: S | None = None
        self._http: AdminServer | None = None
        self._notes: Notes | None = None
        self._tenants: TenantKeys | None = None
        self._leaving = False
        self._over = asyncio.Event()  # another process has taken over
        self._stopping = False
        self._admin_token = b""
        self._started_s = time.monotonic()

    async def start(self) -> None:
        """Serves from its return on. When it cannot, raises a moonpool Error and leaves nothing behind."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def settled(self) -> None:
        """Returns when the line that reports readiness can be printed."""

    async def linger(self, seconds: float, over: asyncio.Event) -> None:
        """Serves on for so many seconds, or until ``over`` is set; /readyz answers 503 from now on."""
        self._leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await over.wait()

    async def over(self) -> None:
        """Returns when another process serves in this one's place."""
        await self._over.wait()

    async def stop(self) -> None:
        """Ends what start() began; after a failed start, as much of it as there was. The HTTP endpoints close
        last: until then they report that the process is stopping.
        """
        self._stopping = True
        if self._tenants is not None:
            tenants, self._tenants = self._tenants, None
            await asyncio.to_thread(tenants.close)
        if self._server is not None:
            server, self._server = self._server, None
            await asyncio.to_thread(server.stop)
        if self._notes is not None:
            notes, self._notes = self._notes, None
            notes.close()
        if self._http is not None:
            http, self._http = self._http, None
            await http.close()

    async def _start(self) -> None:
        raise NotImplementedError

    def _reasons(self) -> list[str]:
        """Why the live process is not ready, one sentence each."""
        return []

    def _all_reasons(self) -> list[str]:
        return [STOPPING] if self._leaving else self._reasons()

    def _facts(self) -> Mapping[str, object]:
        """The other content of /livez, /readyz and /health."""
        return {}

    def _begin(
        self,
        server: S,
        log: logging.Logger,
        on_note: Callable[[str], None] = lambda kind: None,
        take_limits: TakeLimits | None = None,
    ) -> None:
        """Starts the native server and what _follow() does."""
        self._follow(server, log, on_note, take_limits)
        server.start()

    def _follow(
        self, server: S, log: logging.Logger, on_note: Callable[[str], None], take_limits: TakeLimits | None
    ) -> None:
        """Logs the notes of the native server, and gives it the tenants' file. take_limits: of a node, for
        the tenants' limits. Raises ConfigError for a file of tenants that cannot be used."""
        self._server = server
        if (file := tenants_of(self.config)) is not None:
            self._tenants = TenantKeys(file, server, log, take_limits)
        self._notes = Notes(server, log, on_note)
        self._notes.start()

    async def _serve_http(
        self,
        address: Address,
        limits: HttpLimits,
        tls: FollowedContext | None,
        private: Mapping[str, AnswerTo],
        is_allowed: Callable[[str], bool],
        own: Mapping[str, AnswerTo] | None = None,
        listening: Sequence[socket.socket] = (),
    ) -> None:
        """Serves metrics, probes and ``private``: path -> answer, for requests that ``is_allowed`` admits.

        own: routes that check their requests by themselves. listening: as of AdminServer."""
        assert self._server is not None
        probes = Probes(
            self._server, reasons=self._all_reasons, facts=self._facts, is_stopping=lambda: self._stopping
        )
        self._http = AdminServer(
            address,
            {
                "/metrics": self._metrics,
                "/health": probes.health,
                "/livez": probes.livez,
                "/readyz": probes.readyz,
            },
            key="--http",
            connections_max=limits.http_connections_max,
            timeout_s=limits.http_timeout_s,
            tls=tls,
            private=private,
            is_allowed=is_allowed,
            own=own,
            listening=listening,
        )
        await self._http.start()
        self.http_url = self._http.url

    async def _metrics(self) -> web.Response:
        if self._server is None:
            return web.Response(status=503)
        body = await asyncio.to_thread(metrics.exposition, self._server, prefix=self.METRICS_PREFIX)
        return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})


def run_until_signal(
    service: ServiceProcess[S],
    on_ready: Callable[[], None] | None,
    log: logging.Logger,
    *,
    stop_delay_s: float,
) -> None:
    """Runs a service until SIGTERM or SIGINT, and for ``stop_delay_s`` seconds or until a second one as not
    ready. Raises a moonpool Error when it cannot start.
    """
    allow_many_descriptors()
    asyncio.run(_run(service, on_ready, log, stop_delay_s))


async def _run(
    service: ServiceProcess[S],
    on_ready: Callable[[], None] | None,
    log: logging.Logger,
    stop_delay_s: float,
) -> None:
    http_faults.calm(asyncio.get_running_loop())
    asked_to_stop, asked_again = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (asked_again if asked_to_stop.is_set() else asked_to_stop).set()

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, on_signal)
    stay_through_hangup(asyncio.get_running_loop(), on_signal)
    await service.start()
    try:
        await service.settled()
        if on_ready is not None:
            on_ready()
        replaced = asyncio.ensure_future(service.over())
        asked = asyncio.ensure_future(asked_to_stop.wait())
        await asyncio.wait((replaced, asked), return_when=asyncio.FIRST_COMPLETED)
        for waiting in (replaced, asked):
            waiting.cancel()
        if stop_delay_s and not replaced.done():
            log.info("not ready; stopping in %g s", stop_delay_s, extra={"event": "not_ready"})
            await service.linger(stop_delay_s, asked_again)
        log.info("stopping", extra={"event": "stopping"})
    finally:
        await service.stop()
        log.info("stopped", extra={"event": "stopped"})


def json_response(value: Mapping[str, object]) -> web.Response:
    """An answer in JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
