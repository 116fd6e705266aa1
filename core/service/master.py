"""The master process: the native server that knows which nodes are in the pool and where each key lies, and
its HTTP pages.

    Master(config)  ->  start(): listen for nodes and clients, listen for HTTP
                    ->  stop(): everything in reverse

Nothing is written to disk: nodes tell a new master what they hold. The data plane runs in the server's own
threads and never enters Python; this module's event loop only answers HTTP and waits for a signal. /health
and /metrics need no token, the other pages need the admin token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from aiohttp import web

from moonpool.core.config.config import Config
from moonpool.core.config.logs import Notes, NoteSource
from moonpool.core.errors import Error, Unavailable
from moonpool.core.service import http_faults, metrics
from moonpool.core.service.addresses import parse_address
from moonpool.core.service.admin_http import AdminServer, bearer_is
from moonpool.core.service.control_tls import control_client, control_server
from moonpool.core.service.http_tls import server_context
from moonpool.core.service.listen_addresses import explain_bind_errors, listen_address, require_token
from moonpool.core.service.probes import Loop, Probes
from moonpool.core.service.processes import allow_many_descriptors, stay_through_hangup

PREFIX = "moonpool_master_"
KEYS_MAX = 10_000  # of one answer of /keys
_log = logging.getLogger("moonpool.master")
OPEN_FILES_SPARE = 256  # beyond one for each connection


class MasterServer(metrics.Source, NoteSource, Loop, Protocol):
    """What the master needs of moonpool._native.MasterServer."""

    @property
    def addresses(self) -> list[str]:
        """The addresses that it listens on, as host:port."""

    def start(self) -> None:
        """Starts its thread."""

    def stop(self) -> None:
        """Ends its thread and closes the listeners."""

    def nodes(self) -> tuple[int, Sequence[Any]]:
        """The version of the membership, and one row for each node."""


def native_server(config: Config, listen: str, token: bytes) -> MasterServer:
    """Makes the server in C++, which listens from then on. Raises a moonpool Error when it cannot."""
    try:
        import moonpool._native as _native
    except ImportError as error:
        raise Unavailable(
            f"the C++ core of moonpool is not built ({error}); run: pip install .",
            operation="master",
            cause=error,
        ) from error
    master = config.master
    return _native.MasterServer(
        [listen],
        token,
        nodes_max=master.nodes_max,
        clients_max=master.clients_max,
        rows_max=master.keys_max,
        tombstones_max=master.removals_max,
        frame_bytes_max=master.frame_bytes_max,
        frame_keys_max=master.frame_keys_max,
        suspect_after_s=master.suspect_after_s,
        gone_after_s=master.gone_after_s,
        tls=control_server(config),
    )


class NodeRow(msgspec.Struct, frozen=True):
    """A row of /nodes. ``id`` is None and the sizes are 0 for a node that is gone.

    keys and ssd_keys: what the directory has of it; objects: what it says itself, of all tenants.
    """

    id: int | None
    name: str
    host_id: str
    state: str
    address: str
    socket: str
    incarnation: str
    silent_s: float
    keys: int
    ssd_keys: int
    objects: int
    dram_bytes: int
    dram_free_bytes: int
    ssd_bytes: int
    ssd_free_bytes: int
    oldest_age_s: float
    tenants: list[str]


class Master:
    """One master. start() and stop() are called once each, from one event loop."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.http_url: str | None = None
        self._server: MasterServer | None = None
        self._http: AdminServer | None = None
        self._notes: Notes | None = None
        self._stopping = False
        self._admin_token = b""
        self._started_s = time.monotonic()

    @property
    def server(self) -> MasterServer:
        """The native server. Raises Unavailable unless the master runs."""
        if self._server is None:
            raise Unavailable("the master does not run", operation="master")
        return self._server

    @property
    def addresses(self) -> list[str]:
        """Where nodes and clients connect, with the real ports."""
        return self.server.addresses

    async def start(self) -> None:
        """Serves from its return on. When it cannot, raises a moonpool Error and leaves nothing behind."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        master = self.config.master
        listen = parse_address(master.listen, "master.listen")
        require_token(self.config, listen, "master.listen")
        http = listen_address(self.config, "master.http")
        tls = server_context(self.config)
        token = self.config.read_token()
        self.config.warn_of_short_token(_log)
        self._admin_token = self.config.read_admin_token()
        _allow_open_files(master.clients_max + 2 * master.nodes_max + OPEN_FILES_SPARE)
        with explain_bind_errors("master.listen", [str(listen)]):
            self._server = native_server(self.config, str(listen), token)
        self._notes = Notes(self._server, _log)
        self._notes.start()
        self._server.start()
        if http is not None:
            probes = Probes(self._server, reasons=list, facts=self._facts, is_stopping=lambda: self._stopping)
            self._http = AdminServer(
                http,
                {
                    "/metrics": self._metrics,
                    "/health": probes.health,
                    "/livez": probes.livez,
                    "/readyz": probes.readyz,
                },
                key="--http",
                connections_max=master.http_connections_max,
                timeout_s=master.http_timeout_s,
                tls=tls,
                private={"/nodes": self._nodes, "/keys": self._keys, "/stat": self._stat},
                is_allowed=self._is_allowed,
            )
            await self._http.start()
            self.http_url = self._http.url

    async def stop(self) -> None:
        """Ends what start() began; after a failed start, as much of it as there was."""
        self._stopping = True
        if self._server is not None:
            server, self._server = self._server, None
            await asyncio.to_thread(server.stop)
        if self._notes is not None:
            notes, self._notes = self._notes, None
            notes.close()
        if self._http is not None:
            http, self._http = self._http, None
            await http.close()

    def _is_allowed(self, authorization: str) -> bool:
        return bearer_is(authorization, self._admin_token)

    def stat(self) -> dict[str, object]:
        """What /stat tells: where the master listens, and its counters."""
        return {
            "pid": os.getpid(),
            "addresses": self.addresses,
            "http": self.http_url,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "metrics": dict(self.server.metrics()),
        }

    def nodes(self) -> list[NodeRow]:
        """The members by id, then the gone ones that are remembered, the latest first."""
        return [_node_row(row) for row in self.server.nodes()[1]]

    def _facts(self) -> dict[str, object]:
        return {"pid": os.getpid(), "addresses": [] if self._server is None else self.addresses}

    async def _metrics(self) -> web.Response:
        if self._server is None:
            return web.Response(status=503)
        body = await asyncio.to_thread(metrics.exposition, self.server, prefix=PREFIX)
        return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _stat(self, _request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(self.stat))

    async def _nodes(self, _request: web.Request) -> web.Response:
        return _json({"nodes": await asyncio.to_thread(self.nodes)})

    async def _keys(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            limit = int(query.get("limit", "100"))
            fingerprint = bytes.fromhex(query.get("fingerprint", ""))
            if not 1 <= limit <= KEYS_MAX:
                raise ValueError
        except ValueError:
            text = f"limit must be 1 to {KEYS_MAX}, and fingerprint hexadecimal\n"
            return web.Response(status=400, text=text)
        space = (query.get("tenant", "default"), query.get("namespace", "default"), fingerprint)
        try:
            keys = await asyncio.to_thread(self._list, space, query.get("prefix", ""), limit)
        except Error as error:
            return web.Response(status=503, text=f"{error}\n")
        return _json({"keys": keys})

    def _list(self, space: tuple[str, str, bytes], prefix: str, limit: int) -> list[dict[str, object]]:
        """Asks one node after another until one answers: it asks the others itself. Nodes keep the text of
        keys; the directory knows hashes only.
        """
        from moonpool.core.store.store import Store

        alive = [row for row in self.nodes() if row.state == "alive"]
        failure: Error | None = None
        tenant, namespace, fingerprint = space
        for row in alive:
            place = f"tcp://{row.address}" if row.address else row.socket
            try:
                with Store(
                    place,
                    tenant=tenant,
                    namespace=namespace,
                    fingerprint=fingerprint,
                    token=self.config.read_token(),
                    tls=control_client(self.config),
                ) as store:
                    rows = store.list(prefix, limit=limit)
            except Error as error:
                failure = error
                continue
            return [
                {"key": entry.key.decode(errors="backslashreplace"), "bytes": entry.size} for entry in rows
            ]
        if failure is not None:
            raise failure
        return []


def run(config: Config, *, on_ready: Callable[[Master], None] | None = None) -> None:
    """Runs a master until SIGTERM or SIGINT. Raises a moonpool Error when it cannot start."""
    allow_many_descriptors()
    asyncio.run(_run(Master(config), on_ready))


async def _run(master: Master, on_ready: Callable[[Master], None] | None) -> None:
    http_faults.calm(asyncio.get_running_loop())
    asked_to_stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, asked_to_stop.set)
    stay_through_hangup(asyncio.get_running_loop(), asked_to_stop.set)
    await master.start()
    try:
        if on_ready is not None:
            on_ready(master)
        await asked_to_stop.wait()
        _log.info("stopping", extra={"event": "stopping"})
    finally:
        await master.stop()
        _log.info("stopped", extra={"event": "stopped"})


def _node_row(row: Any) -> NodeRow:
    member = row.member
    tenants = member.tenants
    return NodeRow(
        id=None if member.state == "gone" else member.id,
        name=member.name,
        host_id=member.host_id,
        state=member.state,
        address=member.address,
        socket=member.socket_path,
        incarnation=member.incarnation.hex(),
        silent_s=member.silent_s,
        keys=row.dram_keys,
        ssd_keys=row.ssd_keys,
        objects=sum(tenant.objects for tenant in tenants),
        dram_bytes=sum(tenant.arena_bytes for tenant in tenants),
        dram_free_bytes=sum(tenant.free_bytes for tenant in tenants),
        ssd_bytes=member.ssd_bytes,
        ssd_free_bytes=member.ssd_free_bytes,
        oldest_age_s=max((tenant.oldest_age_s for tenant in tenants), default=0.0),
        tenants=[tenant.tenant for tenant in tenants],
    )


def _allow_open_files(wanted: int) -> None:
    """A thousand clients need more than the usual soft limit; the hard one is the administrator's word."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _json(value: Mapping[str, object]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
