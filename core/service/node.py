"""The node process: the native server that owns the arenas, its place in the runtime folder, and its HTTP
pages.

    Node(config)  ->  start(): claim the socket, start the server, listen for HTTP, link node.sock
                  ->  stop(): everything in reverse; only what is ours is removed

The data plane runs in the server's own threads and never enters Python; this module's event loop only answers
the pages, logs the data plane's notes, and waits for a signal.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from socket import socket as socket_type
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from moonpool.core.config import paths
from moonpool.core.config.cluster_token import secrets_of
from moonpool.core.config.config import Config
from moonpool.core.config.native_settings import node_settings
from moonpool.core.config.tenants_file import NativeLimits, limits_of, native_limits, salts_of
from moonpool.core.config.units import format_size, parse_size
from moonpool.core.errors import ConfigError, Error, InvalidArgument, Unavailable
from moonpool.core.service.address_space import check_address_space
from moonpool.core.service.addresses import Address
from moonpool.core.service.admin_http import bearer_is
from moonpool.core.service.control_tls import control_client, control_settings
from moonpool.core.service.data_tls import data_server, pool_tls
from moonpool.core.service.drain import Drain, DrainProgress, DrainRequest
from moonpool.core.service.http_tls import FollowedContext, followed_context
from moonpool.core.service.kv_event_publisher import KvEventPublisher
from moonpool.core.service.listen_addresses import (
    NodeAddresses,
    explain_bind_errors,
    listen_address,
    node_addresses,
)
from moonpool.core.service.native_core import native_core
from moonpool.core.service.node_event_source import published_by, publisher_of_node
from moonpool.core.service.node_socket import Claim, hand_over_default, link_default
from moonpool.core.service.published_events import PublishedEvents, publishes_events
from moonpool.core.service.service_process import (
    ServiceProcess,
    json_response,
    run_until_signal,
)
from moonpool.core.service.take_over import VERSIONS, Facts, Offer, Predecessor, find_predecessor
from moonpool.core.service.tenant_keys import tenants_of

if TYPE_CHECKING:
    from moonpool import _native

READY_WAITS_S = 2.0  # the ready line waits for the master's first answer, and for memory
OPEN_STAT = ("name", "pid", "uptime_s", "metrics")  # of /stat, for a client without the admin token
MASTER_SILENT_S = 5.0  # without an answer the node counts as not joined
DRAIN_TIMEOUT_S = 5.0  # of one copy without progress
DRAINING = "this node is drained, and will stop"
_log = logging.getLogger("moonpool.node")


ServerFactory = Callable[[Config, Path, bytes, NodeAddresses], "_native.Server"]


def native_server(
    config: Config,
    socket_path: Path,
    token: bytes,
    addresses: NodeAddresses,
    *,
    size_option: str = "--dram ",
    predecessor: tuple[int, Sequence[int]] | None = None,
) -> _native.Server:
    """Makes the server in C++. Raises a moonpool Error when it cannot, also where the arenas are larger than
    the memory that is available, or than the address space. size_option: how the user gives their size.
    predecessor: what the node that it replaces gave (take_over.py).
    """
    core = native_core("node")
    node = config.node
    sizes = tenant_sizes(config)
    tenants = tenants_of(config)
    limits = {} if tenants is None else limits_of(tenants.rows)
    # Address space for the most memory that each tenant may get; memory for what the settings give it.
    dram_max = {name: each.dram_max or each.dram_min or 0 for name, each in limits.items()}
    check_address_space(sum(max(size, dram_max.get(name, 0)) for name, size in sizes), size_option)
    with explain_bind_errors("node.listen", addresses.listen):
        server: _native.Server = core.Server(
            str(socket_path),
            sizes,
            token,
            node_settings(node),
            name=node.name,
            listen=list(addresses.listen),
            host_id=addresses.host_id,
            advertise=addresses.advertise,
            master=addresses.master,
            ssd=ssd_directories(config),
            events=publishes_events(config),
            tls=control_client(config),
            data_tls=data_server(config),
            size_option=size_option,
            salts={} if tenants is None else salts_of(tenants.rows),
            limits=[] if tenants is None else native_limits(tenants.rows),
            predecessor=None if predecessor is None else (predecessor[0], list(predecessor[1])),
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


class Node(ServiceProcess["_native.Server"]):
    """One node."""

    def __init__(
        self, config: Config, *, make_server: ServerFactory = native_server, take_over: bool = False
    ) -> None:
        super().__init__(config)
        self._takes_over = take_over
        self._offer: Offer | None = None
        self._predecessor: Predecessor | None = None  # until we have joined the master
        self._is_given = False  # to another process, which may not have begun to serve yet
        self._replaced = False  # another process serves; what is ours is its now
        self.addresses = NodeAddresses()
        self._make_server = make_server
        self._claim: Claim | None = None
        self._events: KvEventPublisher | None = None
        self._published: PublishedEvents | None = None
        self._master_spoke = asyncio.Event()
        self._memory_ended = asyncio.Event()
        self._drain: Drain | None = None
        self._drain_lock = threading.Lock()  # of beginning one, and of _is_given
        self._will_stop = False  # a drain said so

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
        given = self.addresses.advertise
        if self.wire and given.endswith(":0"):
            return given.removesuffix("0") + self.wire[0].rpartition(":")[2]
        return given

    async def _start(self) -> None:
        node = self.config.node
        http = listen_address(self.config, "node.http")
        self.addresses = node_addresses(self.config)
        tls = followed_context(self.config)
        paths.check_node_name(node.name)
        paths.runtime_dir(ensure=True)
        path = Path(node.socket).absolute() if node.socket else paths.node_socket(node.name)
        self._token = token = self.config.read_token()
        self.config.warn_of_short_token(_log)
        self._admin_token = self.config.read_admin_token() if http is not None else b""
        paths.check_socket_path(path)
        predecessor = await self._find_predecessor(path)
        if predecessor is None:
            self._claim = Claim(path)
            self._tell_clients()
            server = self._make_server(self.config, path, token, self.addresses)
            self._publish(server, path)
            self._begin(server, _log, self._heard, self._take_limits)
            await self._serve_pages(http, tls)
        else:
            server = await self._take_over(predecessor, path)
            with _logged("its pages are not served"):
                await self._serve_pages(http, tls, predecessor.http)
        self._predecessor = predecessor
        self._offer = Offer(
            path,
            self._facts_for_successor,
            give=lambda: self._give(server),
            take_back=self._take_back,
            close_events=self._close_events,
            let_go=functools.partial(self._let_go, asyncio.get_running_loop()),
        )
        if predecessor is None:
            link_default(path)
        else:
            with _logged("node.sock does not lead here"):
                link_default(path)

    async def _serve_pages(
        self,
        http: Address | None,
        tls: FollowedContext | None,
        listening: Sequence[socket_type] = (),
    ) -> None:
        if http is None:
            return
        private = {"/drain": self._drain_page, "POST /drain": self._begin_drain}
        private["POST /drain-stop"] = self._end_drain
        own = {"/stat": self._stat}  # which says less to a client without the admin token
        await self._serve_http(http, self.config.node, tls, private, self._is_allowed, own, listening)

    def _tell_clients(self) -> None:
        assert self._claim is not None
        # Where tenants have keys of their own, programs of this user do not get all of them.
        if self.config.token_is_configured and not self.config.cluster.tenants_file:
            self._claim.tell_token(self._token)
        if settings := control_settings(self.config):
            self._claim.tell_tls(settings)

    # ---- instead of another process

    async def _find_predecessor(self, path: Path) -> Predecessor | None:
        """The running node, which can be taken over with our settings; None: it is not wanted, or there is
        none. Raises ConfigError where the settings differ."""
        if not self._takes_over:
            return None
        predecessor = await asyncio.to_thread(find_predecessor, path)
        if predecessor is None:
            _log.info("no node serves %s: this one begins anew", path, extra={"event": "take_over"})
            return None
        try:
            if self.config.origin("node.dram").is_share:  # of what was available when that one started
                own = msgspec.structs.replace(self.config.node, dram=predecessor.facts.dram)
                self.config = msgspec.structs.replace(self.config, node=own)
            predecessor.check(self._settings_in_common())
        except Error:
            predecessor.close()
            raise
        # Default ports that are in use are so by the predecessor.
        self.addresses = replace(self.addresses, advertise=predecessor.facts.advertise)
        return predecessor

    async def _take_over(self, predecessor: Predecessor, path: Path) -> _native.Server:
        """Serves with what the running node has; that one serves no more. Raises an exception where it serves
        on: whatever can fail comes before replace()."""
        self._took_from_s = time.monotonic()
        self._replaced = True  # what stands in the runtime folder is the running node's until it is replaced
        try:
            given = await asyncio.to_thread(predecessor.take_what_it_has)
            server = native_server(self.config, path, self._token, self.addresses, predecessor=given)
            self._claim = Claim.of_predecessor(path, os.dup(predecessor.lock))
            self._tell_clients()
            self._follow(server, _log, self._heard, self._take_limits)
            await asyncio.to_thread(server.prepare)
            await asyncio.to_thread(predecessor.agree)
            with _logged("no KV events are published"):
                self._publish(server, path)
            predecessor.replace()  # on this thread: it must not be cut off from what follows
        except BaseException:
            self._close_events()  # whose addresses the running node takes again
            predecessor.close()
            raise
        self._replaced = False
        server.learn_masters(predecessor.facts.learned)
        server.start()
        self._report(predecessor)
        return server

    def _report(self, predecessor: Predecessor) -> None:
        assert self._server is not None
        objects = self._server.metrics().get("objects", 0)
        took_ms = (time.monotonic() - self._took_from_s) * 1000
        text = "took over from process %d: %d objects; clients waited %.0f ms"
        _log.info(text, predecessor.facts.pid, objects, took_ms, extra={"event": "take_over"})

    def _settings_in_common(self) -> dict[str, str]:
        """What a successor must have alike: sizes of the memory files, addresses of the sockets."""
        node = self.config.node
        sizes = {f"node.tenants.{name}": _size_text(size) for name, size in node.tenants.items()}
        return {
            "node.name": node.name,
            "node.dram": _size_text(node.dram),
            **sizes,
            "node.ssd": ", ".join(node.ssd) or "none",
            "node.listen": node.listen,
            "node.http": node.http,
            "node.host_id": self.addresses.host_id,
            "cluster.master": self.addresses.master or "none",
        }

    def _facts_for_successor(self) -> tuple[Facts, Sequence[int]]:
        if self._server is None or self._claim is None or self._stopping:
            raise OSError("the node stops")
        refused = self._server.why_not_given
        if self._drain is not None and self._drain.is_running:
            refused = "it is being drained"
        http = [] if self._http is None else [each.fileno() for each in self._http.listening]
        facts = Facts(
            VERSIONS.lowest,
            os.getpid(),
            self._settings_in_common(),
            self.advertise,
            refused,
            len(http),
            self.config.node.dram,
            VERSIONS.highest,
            self._server.learned_masters,
        )
        return facts, [self._claim.lock, *http]

    def _give(self, server: _native.Server) -> tuple[int, Sequence[int]]:
        # A drain reads the memory of objects, which may be others' once the other process serves.
        with self._drain_lock:
            if self._drain is not None and self._drain.is_running:
                raise Unavailable("it is being drained", operation="node")
            self._is_given = True
        try:
            given: tuple[int, Sequence[int]] = server.give()
        except BaseException:
            self._is_given = False
            raise
        return given

    def _close_events(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()

    def _take_back(self) -> None:
        server = self._server
        if server is None:
            return
        server.take_back()
        self._is_given = False
        assert self._claim is not None
        with _logged("what the other process told of itself may still stand"):
            self._claim.tell_again()
        if self._published is not None and self._events is None:
            with _logged("no KV events are published"):
                self._publish(server, self.socket)

    def _let_go(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._server is not None
        self._replaced = True
        self._server.let_go()
        _log.info("another process has taken over", extra={"event": "take_over"})
        loop.call_soon_threadsafe(self._over.set)

    def _take_limits(self, rows: Sequence[NativeLimits]) -> None:
        if self._server is not None:
            self._server.set_limits(rows)

    def _publish(self, server: _native.Server, socket: Path) -> None:
        """Publishes KV events, and tells where: the master with the first JOIN, this host by a file."""
        assert self._claim is not None
        self._events = publisher_of_node(self.config, server, socket)
        if self._events is None:
            return
        where = self.addresses
        published = published_by(self._events, advertise=where.advertise, master=where.master)
        server.tell_event_endpoints(published.far_events, published.far_replay)
        self._claim.tell_events(msgspec.json.encode(published))
        self._published = published

    def _far_endpoints(self) -> list[str]:
        """Where other hosts find its KV events, and what they missed, as the master tells them."""
        told = self._published
        return [] if told is None else [each for each in (told.far_events, told.far_replay) if each]

    async def stop(self) -> None:
        """See ServiceProcess.stop; also gives up the socket and the link node.sock."""
        self._stopping = True
        if self._offer is not None:
            offer, self._offer = self._offer, None
            await asyncio.to_thread(offer.close)
        if (
            self._claim is not None and not self._replaced
        ):  # node.sock may lead here: as the first node's, or handed over by one
            try:
                hand_over_default(self.socket)
            except (ConfigError, OSError) as error:  # an unusable runtime folder must not end a stop early
                _log.warning("node.sock is not handed over: %s", error)
        await asyncio.to_thread(self._stop_drain)
        if self._events is not None:
            events, self._events = self._events, None
            await asyncio.to_thread(events.close)
        await super().stop()
        if self._claim is not None:
            claim, self._claim = self._claim, None
            if self._replaced:
                claim.abandon()
            else:
                claim.release()

    def stat(self) -> dict[str, object]:
        """The content of /stat: the node's name and pid, where it listens, and its counters."""
        if self._server is None:
            raise Unavailable("the node does not run", operation="stat")
        return {
            "name": self.config.node.name,
            "pid": os.getpid(),
            "socket": str(self.socket),
            "http": self.http_url,
            "events": None if self._events is None else [self._events.endpoint, self._events.replay],
            "events_far": self._far_endpoints(),
            "wire": self.wire,
            "advertise": self.advertise,
            "host_id": self.addresses.host_id,
            "master": self.addresses.master,
            "membership": self.membership(),
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "tenants": dict(tenant_sizes(self.config)),
            "ssd": self._server.ssd() if self.config.node.ssd else [],
            "metrics": dict(self._server.metrics()),
        }

    def membership(self) -> dict[str, object] | None:
        """The state of the node's membership; None when it has no master."""
        state = None if self._server is None else self._server.membership()
        if state is None:
            return None
        joined, node_id, why_not, silent_s = state
        return {
            "address": self.addresses.master,
            "joined": joined,
            "id": node_id if joined else None,
            "why_not": why_not,
            "silent_s": silent_s,
        }

    async def settled(self) -> None:
        """Waits until the node has joined its master, or knows why not, and until its memory is reserved; at
        most READY_WAITS_S. It serves meanwhile.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_WAITS_S):
                if self.membership() is not None:
                    await self._master_spoke.wait()
                if self.why_memory_short():
                    await self._memory_ended.wait()
        predecessor, self._predecessor = self._predecessor, None
        if predecessor is not None:
            predecessor.let_end()

    def _heard(self, kind: str) -> None:
        # Of several masters all that it has to join.
        if kind == "not_joined" or (kind == "joined" and not self.why_not_joined()):
            self._master_spoke.set()
        elif kind in ("memory_ready", "memory_short"):
            self._memory_ended.set()

    def why_not_joined(self) -> str:
        """Why the node is not in the pool; "" when it is, or has no master."""
        state = None if self._server is None else self._server.membership()
        if state is None:
            return ""
        joined, _, why_not, silent_s = state
        if not joined:
            return str(why_not)
        if silent_s > MASTER_SILENT_S:
            return f"the master at {self.addresses.master} has been silent for {silent_s:.0f} s"
        return ""

    def why_memory_short(self) -> str:
        """Which memory of the arenas is missing; "" when none is."""
        reserved, size, is_short = (0, 0, False) if self._server is None else self._server.memory()
        if is_short:
            return f"only {format_size(reserved)} of {format_size(size)} of memory could be reserved"
        if reserved < size:
            return f"{format_size(reserved)} of {format_size(size)} of memory are reserved so far"
        return ""

    def drain(self, request: DrainRequest, *, peer: str = "") -> DrainProgress:
        """Begins to copy what no other host has to other nodes. peer: the address that asked. Raises
        InvalidArgument while another drain runs, Unavailable where there is no other node.
        """
        with self._drain_lock:
            if self._server is None or self._stopping:
                raise Unavailable("the node does not run", operation="drain")
            name = self.config.node.name
            if self._drain is not None and self._drain.is_running:
                raise InvalidArgument(f"node {name} is being drained already", operation="drain")
            if self._is_given:
                raise Unavailable(f"another process takes over from node {name} now", operation="drain")
            drain = Drain(name, self._server, self._client_of_own, request, peer=peer)
            drain.start()
            self._drain, self._will_stop = drain, request.leave
        return drain.now()

    def _stop_drain(self) -> None:
        """Also one that begins at this moment."""
        with self._drain_lock:
            drain = self._drain
        if drain is not None:
            drain.stop()

    def _client_of_own(self, tenant: str, namespace: str, fingerprint: bytes) -> _native.Client:
        tls = pool_tls(self.config)
        client: _native.Client = native_core("node").Client(
            str(self.socket),
            self._token,
            tenant,
            namespace,
            fingerprint,
            timeout_s=DRAIN_TIMEOUT_S,
            tls=tls.control,
            data_tls=tls.data,
        )
        client.connect()
        return client

    def _reasons(self) -> list[str]:
        why = self.why_not_joined()
        reasons = (why and f"not joined: {why}", self.why_memory_short(), self._will_stop and DRAINING)
        return [reason for reason in reasons if reason]

    def _facts(self) -> dict[str, object]:
        reserved, size, _ = (0, 0, False) if self._server is None else self._server.memory()
        return {
            "name": self.config.node.name,
            "pid": os.getpid(),
            "master": self.membership(),
            "memory": {"reserved_bytes": reserved, "bytes": size},
        }

    def _is_allowed(self, authorization: str) -> bool:
        return bearer_is(authorization, *secrets_of(self._admin_token))

    async def _begin_drain(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read() or b"{}", type=DrainRequest)
            if asked.for_s < 0 or asked.rate < 0:
                raise ValueError("for_s and rate must not be below 0")
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        return _progress(await asyncio.to_thread(self.drain, asked, peer=request.remote or ""))

    async def _drain_page(self, _request: web.Request) -> web.Response:
        if self._drain is None:
            return web.Response(status=404, text="this node was not drained\n")
        return _progress(self._drain.now())

    async def _end_drain(self, _request: web.Request) -> web.Response:
        if self._drain is None:
            return web.Response(status=404, text="this node was not drained\n")
        self._drain.ask_to_stop()
        return _progress(self._drain.now())

    async def _stat(self, request: web.Request) -> web.Response:
        page = await asyncio.to_thread(self.stat)
        if not self._is_allowed(request.headers.get("Authorization", "")):
            page = {name: page[name] for name in OPEN_STAT}
        return json_response(page)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """What fails in it is logged: the node lives on without it, as the process before has ended, or would
    lose its content."""
    try:
        yield
    except Exception as error:
        _log.error("%s: %s", what, error)


def _size_text(size: int) -> str:
    text = format_size(size)
    try:
        return text if parse_size(text) == size else f"{size} bytes"
    except ValueError:
        return f"{size} bytes"


def _progress(progress: DrainProgress) -> web.Response:
    return web.Response(body=msgspec.json.encode(progress), content_type="application/json")


def run(
    config: Config,
    *,
    on_ready: Callable[[Node], None] | None = None,
    make_server: ServerFactory = native_server,
    take_over: bool = False,
) -> None:
    """Runs a node until SIGTERM or SIGINT. Raises a moonpool Error when it cannot start. take_over: it takes
    the place of the running node of its socket, if there is one, with its content.
    """
    node = Node(config, make_server=make_server, take_over=take_over)
    told = None if on_ready is None else lambda: on_ready(node)
    run_until_signal(node, told, _log, stop_delay_s=config.node.stop_delay_s)
