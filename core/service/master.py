"""The master process: the native server that knows which nodes are in the pool and where each key lies, and
its HTTP pages.

    Master(config)  ->  start(): listen for nodes and clients, listen for HTTP
                    ->  stop(): everything in reverse

Nothing is written to disk: nodes report what they hold to a new master. The data plane runs in the server's
own threads and never enters Python; this module's event loop only answers HTTP and waits for a signal.
/health and /metrics need no token, /metadata the cluster token, the other pages the admin token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from moonpool.core.config.cluster_token import secrets_of
from moonpool.core.config.config import Config
from moonpool.core.config.native_settings import master_settings
from moonpool.core.errors import ConfigError, Error, Unavailable
from moonpool.core.service import audit
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.admin_http import bearer_is
from moonpool.core.service.control_tls import control_client, control_server
from moonpool.core.service.data_tls import pool_tls
from moonpool.core.service.election import TIMEOUT_S, Ballot, Election, Seat
from moonpool.core.service.etcd import etcd_of
from moonpool.core.service.http_tls import followed_context
from moonpool.core.service.listen_addresses import (
    advertised_address,
    explain_bind_errors,
    listen_address,
    range_of_master,
    require_token,
)
from moonpool.core.service.metadata_page import MetadataPage
from moonpool.core.service.native_core import native_core
from moonpool.core.service.service_process import (
    ServiceProcess,
    json_response,
    run_until_signal,
)
from moonpool.core.store.keys import Space

if TYPE_CHECKING:
    from moonpool import _native
    from moonpool.core.store.store import Store

T = TypeVar("T")
PREFIX = "moonpool_master_"
KEYS_MAX = 10_000  # keys in one answer of /keys
HAND_OVER_S = 8.0  # that a standby waits for its owner, which may be too new for 5 of them
_log = logging.getLogger("moonpool.master")


def native_server(
    config: Config, listen: str, token: bytes, elected_as: Seat | None = None
) -> _native.MasterServer:
    """Makes the server in C++, which listens from then on. Raises a moonpool Error when it cannot.

    elected_as: an election says what it is, in which it has that seat.
    """
    owner = config.master.standby_of
    follows = bool(owner or elected_as or config.cluster.tls_ca)  # at once, or after it has handed over
    server: _native.MasterServer = native_core("master").MasterServer(
        [listen],
        token,
        master_settings(config.master),
        tls=control_server(config),
        standby_of=str(parse_address(owner, "master.standby_of")) if owner else "",
        owner_tls=control_client(config) if follows else None,
        elected=elected_as is not None,
        name="" if elected_as is None else elected_as.name,
        range=range_of_master(config),
        advertise=_advertise(config, parse_address(listen, "master.listen")),
    )
    return server


class NodeRow(msgspec.Struct, frozen=True):
    """A row of /nodes. ``id`` is None and the sizes are 0 for a node that is gone.

    keys and ssd_keys: of this node in the directory; objects: as the node itself reports, of all tenants.
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


class Master(ServiceProcess["_native.MasterServer"]):
    """One master."""

    METRICS_PREFIX = PREFIX

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._election: Election | None = None

    @property
    def server(self) -> _native.MasterServer:
        """The native server. Raises Unavailable unless the master runs."""
        if self._server is None:
            raise Unavailable("the master does not run", operation="master")
        return self._server

    @property
    def addresses(self) -> list[str]:
        """Where nodes and clients connect, with the real ports."""
        return list(self.server.addresses)

    async def stop(self) -> None:
        """See ServiceProcess. A standby takes over at once."""
        election, self._election = self._election, None
        if election is not None:
            await asyncio.to_thread(election.stop)
        await super().stop()

    async def _start(self) -> None:
        master = self.config.master
        listen = parse_address(master.listen, "master.listen")
        require_token(self.config, listen, "master.listen")
        http = listen_address(self.config, "master.http")
        tls = followed_context(self.config)
        self._token = token = self.config.read_token()
        self.config.warn_of_short_token(_log)
        self._admin_token = self.config.read_admin_token()
        election = _election_of(self.config, listen)
        with explain_bind_errors("master.listen", [str(listen)]):
            seat = None if election is None else election.me
            server = native_server(self.config, str(listen), token, seat)
        self._begin(server, _log)
        if election is not None:
            self._election = Election(election, server)
            self._election.start()
        if http is not None:
            private = {"/nodes": self._nodes, "/keys": self._keys, "/stat": self._stat}
            own = {"/metadata": MetadataPage(token).answer}
            private["POST /promote"] = self._promote
            await self._serve_http(http, master, tls, private, self._is_allowed, own)

    def _is_allowed(self, authorization: str) -> bool:
        return bearer_is(authorization, *secrets_of(self._admin_token))

    def stat(self) -> dict[str, object]:
        """The content of /stat: where the master listens, and its counters."""
        return {
            "pid": os.getpid(),
            "addresses": self.addresses,
            "http": self.http_url,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "role": self.server.role,
            "range": self.config.master.range,
            "standby": dict(zip(("name", "attached", "whole", "lag_s"), self.server.standby(), strict=True)),
            "election": None if self._election is None else self._election.shown(),
            "metrics": dict(self.server.metrics()),
        }

    def promote(self, *, graceful: bool = False) -> bool:
        """A standby becomes the owner of the directory. Where its owner is there, that hands over and becomes
        its standby, and no removal fails; else the caller knows that the former owner is dead, or will be
        told. False: this master was the owner already. Raises a moonpool Error where the owner is there and
        does not hand over; it goes on then. graceful: also where it is not there.
        """
        server = self.server
        if graceful or server.hears_owner:
            if server.role == "owner":
                return False
            server.ask_hand_over(HAND_OVER_S)
            return True
        return server.take_over()

    def nodes(self) -> list[NodeRow]:
        """The members by id, then the gone ones that are remembered, the latest first."""
        return [_node_row(row) for row in self.server.nodes()[1]]

    def _reasons(self) -> list[str]:
        if self._server is None or self._server.role not in ("standby", "superseded"):
            return []
        if self._server.standby()[1]:
            return []
        return ["no master serves here: it follows none, and was not told to take over"]

    def _facts(self) -> dict[str, object]:
        return {"pid": os.getpid(), "addresses": [] if self._server is None else self.addresses}

    async def _stat(self, _request: web.Request) -> web.Response:
        return json_response(await asyncio.to_thread(self.stat))

    async def _nodes(self, _request: web.Request) -> web.Response:
        return json_response({"nodes": await asyncio.to_thread(self.nodes)})

    async def _promote(self, request: web.Request) -> web.Response:
        try:
            graceful = "graceful" in request.query
            taken = await asyncio.to_thread(lambda: self.promote(graceful=graceful))
        except Error as error:
            return web.Response(status=409, text=f"{error}\n")
        audit.record("promote", peer=request.remote, role=self.server.role, taken_over=taken)
        return json_response({"role": self.server.role, "taken_over": taken})

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
        space = Space(query.get("tenant", "default"), query.get("namespace", "default"), fingerprint)
        prefix = query.get("prefix", "")
        try:
            rows = await asyncio.to_thread(self.ask_a_node, space, lambda s: s.list(prefix, limit=limit))
        except Error as error:
            return web.Response(status=503, text=f"{error}\n")
        keys = [
            {"key": entry.key.decode(errors="backslashreplace"), "bytes": entry.size} for entry in rows or ()
        ]
        return json_response({"keys": keys})

    def ask_a_node(self, space: Space, ask: Callable[[Store], T]) -> T | None:
        """What a node answers: nodes keep the text of keys, the directory knows hashes only. One after
        another is asked until one answers, which asks the others itself. None when no node is alive; raises
        the last node's Error when none answers.
        """
        from moonpool.core.store.store import Store

        failure: Error | None = None
        for row in self.nodes():
            if row.state != "alive":
                continue
            try:
                with Store(
                    f"tcp://{row.address}" if row.address else row.socket,
                    tenant=space.tenant,
                    namespace=space.namespace,
                    fingerprint=space.fingerprint,
                    token=self._token,
                    tls=pool_tls(self.config),
                ) as store:
                    return ask(store)
            except Error as error:
                failure = error
        if failure is not None:
            raise failure
        return None


def run(config: Config, *, on_ready: Callable[[Master], None] | None = None) -> None:
    """Runs a master until SIGTERM or SIGINT. Raises a moonpool Error when it cannot start."""
    master = Master(config)
    told = None if on_ready is None else lambda: on_ready(master)
    run_until_signal(master, told, _log, stop_delay_s=config.master.stop_delay_s)


def _election_of(config: Config, listen: Address) -> Ballot | None:
    """The ballot of this process, if masters are elected. Raises ConfigError."""
    master = config.master
    if not master.election:
        return None
    if master.standby_of:
        raise ConfigError(
            "master.standby_of and master.election exclude each other: the election says which master is the "
            "standby; remove one",
            operation="config",
            key="master.standby_of",
        )
    etcd = etcd_of(
        master.election,
        password=config.cluster.metadata_password,
        authorities=config.cluster.tls_ca,
        timeout_s=TIMEOUT_S,
        key="master.election",
    )
    me = Seat(secrets.token_hex(8), _advertise(config, listen) or str(listen))
    index, count = range_of_master(config)
    part = f"/{index}-of-{count}" if count > 1 else ""
    return Ballot(etcd, f"/moonpool/masters/{master.election_name}{part}", me)


def _advertise(config: Config, listen: Address) -> str:
    """host:port by which others reach this one; empty where the port is not known yet."""
    if config.master.advertise:
        return str(parse_address(config.master.advertise, "master.advertise"))
    return str(Address(advertised_address(listen.host, None), listen.port)) if listen.port else ""


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
