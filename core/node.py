"""The node process: the native server that owns the arenas, its place in the runtime folder, and its HTTP
pages.

    Node(config)  ->  start(): claim the socket, start the server, listen for HTTP, link node.sock
                  ->  stop(): everything in reverse; only what is ours is removed

The data plane runs in the server's own threads and never enters Python; this module's event loop only answers
/metrics, /health and /stat and waits for a signal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from aiohttp import web

from moonpool.core import metrics, paths
from moonpool.core.admin_http import AdminServer
from moonpool.core.config import Config
from moonpool.core.control_tls import control_client, control_settings
from moonpool.core.errors import ConfigError, Unavailable
from moonpool.core.kv_events import Publisher
from moonpool.core.node_events import EventServer, publisher_of_node
from moonpool.core.node_socket import Claim, hand_over_default, link_default
from moonpool.core.processes import allow_many_descriptors
from moonpool.core.reach import Reach, listening, reach_of_node
from moonpool.core.tls import server_context
from moonpool.core.units import parse_size


class NodeServer(metrics.Source, EventServer, Protocol):
    """What the node needs of moonpool._native.Server."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    @property
    def addresses(self) -> Sequence[str]: ...

    def ssd(self) -> list[dict[str, str]]: ...


ServerFactory = Callable[[Config, Path, bytes, Reach], NodeServer]


def native_server(config: Config, socket_path: Path, token: bytes, reach: Reach) -> NodeServer:
    """Makes the server in C++; it reserves the arenas. Raises a moonpool Error when it cannot."""
    try:
        import moonpool._native as _native
    except ImportError as error:
        raise Unavailable(
            f"the C++ core of moonpool is not built ({error}); run: pip install .",
            operation="node",
            cause=error,
        ) from error
    node = config.node
    server: NodeServer = _native.Server(
        str(socket_path),
        tenant_sizes(config),
        token,
        name=node.name,
        objects_max=node.objects_max,
        slab_bytes=node.slab_bytes,
        connections_max=node.connections_max,
        scrub_bytes_per_s=node.scrub_bytes_per_s,
        key_bytes_max=node.key_bytes_max,
        parts_max=node.parts_max,
        frame_bytes_max=node.frame_bytes_max,
        frame_keys_max=node.frame_keys_max,
        object_share_max=node.object_share_max,
        listen=list(reach.listen),
        host_id=reach.host_id,
        advertise=reach.advertise,
        master=reach.master,
        ssd=ssd_directories(config),
        ssd_clean_share=node.ssd_clean_share,
        ssd_stop_s=node.ssd_stop_s,
        ssd_io=node.ssd_io,
        ssd_depth=node.ssd_depth,
        ssd_records_max=node.ssd_records_max,
        ssd_segment_bytes=node.ssd_segment_bytes,
        events=bool(node.events),
        tls=control_client(config),
    )
    return server


def tenant_sizes(config: Config) -> list[tuple[str, int]]:
    """(tenant, bytes of its arena); the tenant called default has node.dram."""
    if "default" in config.node.tenants:
        raise ConfigError(
            "node.tenants must not name the tenant default, whose arena is node.dram",
            operation="node",
            key="node.tenants",
        )
    return [("default", config.node.dram), *config.node.tenants.items()]


def ssd_directories(config: Config) -> list[tuple[str, int]]:
    """(directory, its most bytes) of each DIR:SIZE in node.ssd. Raises ConfigError."""
    directories: list[tuple[str, int]] = []
    for text in config.node.ssd:
        directory, _, size = text.rpartition(":")
        try:
            directories.append((os.path.abspath(directory), parse_size(size)))
        except ValueError:
            directory = ""
        if not directory:
            raise ConfigError(
                f"node.ssd: {text!r} is no directory with a size; write DIR:SIZE, for example "
                "/var/lib/moonpool/ssd:100GiB",
                operation="node",
                key="node.ssd",
            )
    places = [directory for directory, _ in directories]
    if len(set(places)) != len(places):
        raise ConfigError(
            "node.ssd names a directory twice; give each once", operation="node", key="node.ssd"
        )
    return directories


class Node:
    """One node. start() and stop() are called once each, from one event loop."""

    def __init__(self, config: Config, *, make_server: ServerFactory = native_server) -> None:
        self.config = config
        self.http_url: str | None = None
        self._make_server = make_server
        self._claim: Claim | None = None
        self._server: NodeServer | None = None
        self._http: AdminServer | None = None
        self._events: Publisher | None = None
        self.reach = Reach()
        self._started_s = time.monotonic()

    @property
    def socket(self) -> Path:
        """The path that the node serves, between start() and stop()."""
        if self._claim is None:
            raise Unavailable("the node does not run", operation="node")
        return self._claim.path

    @property
    def wire(self) -> list[str]:
        """The addresses that the wire listens on, with their real ports; empty when it is off."""
        return [] if self._server is None else list(self._server.addresses)

    @property
    def advertise(self) -> str:
        """Where others reach the wire, with its real port; "" when it is off."""
        given = self.reach.advertise
        if self.wire and given.endswith(":0"):
            return given.removesuffix("0") + self.wire[0].rpartition(":")[2]
        return given

    async def start(self) -> None:
        """Serves from its return on. When it cannot, raises a moonpool Error and leaves nothing behind."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        node = self.config.node
        http = listening(self.config, "node.http")
        self.reach = reach_of_node(self.config)
        tls = server_context(self.config)
        paths.runtime_dir(ensure=True)
        path = Path(node.socket).absolute() if node.socket else paths.node_socket(node.name)
        token = self.config.read_token()
        self._claim = Claim(paths.check_socket_path(path))
        if self.config.token_is_configured:
            self._claim.tell_token(token)
        if settings := control_settings(self.config):
            self._claim.tell_tls(settings)
        self._server = self._make_server(self.config, path, token, self.reach)
        self._server.start()
        if node.events:
            self._events = publisher_of_node(self.config, self._server)
        if http is not None:
            self._http = AdminServer(
                http,
                {"/metrics": self._metrics, "/health": self._health, "/stat": self._stat},
                key="--http",
                connections_max=node.http_connections_max,
                timeout_s=node.http_timeout_s,
                tls=tls,
            )
            await self._http.start()
            self.http_url = self._http.url
        link_default(path)

    async def stop(self) -> None:
        """Ends what start() began; after a failed start, as much of it as there was."""
        if self._claim is not None:  # node.sock may lead here: as the first node's, or handed over by another
            hand_over_default(self.socket)
        if self._http is not None:
            http, self._http = self._http, None
            await http.close()
        if self._events is not None:
            events, self._events = self._events, None
            await asyncio.to_thread(events.close)
        if self._server is not None:
            server, self._server = self._server, None
            await asyncio.to_thread(server.stop)
        if self._claim is not None:
            claim, self._claim = self._claim, None
            claim.release()

    def stat(self) -> dict[str, object]:
        """What /stat tells: who the node is, where it listens, and its counters."""
        if self._server is None:
            raise Unavailable("the node does not run", operation="stat")
        return {
            "name": self.config.node.name,
            "pid": os.getpid(),
            "socket": str(self.socket),
            "http": self.http_url,
            "events": None if self._events is None else [self._events.endpoint, self._events.replay],
            "wire": self.wire,
            "advertise": self.advertise,
            "host_id": self.reach.host_id,
            "master": self.reach.master,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "tenants": dict(tenant_sizes(self.config)),
            "ssd": self._server.ssd() if self.config.node.ssd else [],
            "metrics": dict(self._server.metrics()),
        }

    def _master(self) -> dict[str, object] | None:
        """How the node stands with its master; None when it has none."""
        membership = getattr(self._server, "membership", None)
        state = None if membership is None else membership()
        if state is None:
            return None
        joined, node_id, why_not, silent_s = state
        return {
            "address": self.reach.master,
            "joined": joined,
            "id": node_id if joined else None,
            "why_not": why_not,
            "silent_s": silent_s,
        }

    async def _metrics(self) -> web.Response:
        if self._server is None:
            return web.Response(status=503)
        return web.Response(
            body=metrics.exposition(self._server), headers={"Content-Type": metrics.CONTENT_TYPE}
        )

    async def _health(self) -> web.Response:
        page = {"status": "ok", "name": self.config.node.name, "pid": os.getpid()}
        return _json({**page, "master": self._master()})

    async def _stat(self) -> web.Response:
        return _json(self.stat())


def run(
    config: Config,
    *,
    on_ready: Callable[[Node], None] | None = None,
    make_server: ServerFactory = native_server,
) -> None:
    """Runs a node until SIGTERM or SIGINT. Raises a moonpool Error when it cannot start."""
    allow_many_descriptors()
    asyncio.run(_run(Node(config, make_server=make_server), on_ready))


async def _run(node: Node, on_ready: Callable[[Node], None] | None) -> None:
    asked_to_stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, asked_to_stop.set)
    await node.start()
    try:
        if on_ready is not None:
            on_ready(node)
        await asked_to_stop.wait()
    finally:
        await node.stop()


def _json(value: Mapping[str, object]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
