"""What setup() makes: the way into the pool.

A segment of more than 0 bytes becomes a node of this process, which joins the master and whose arena is the
segment: ``OwnNode``. Without one the process is a guest of another node, of its own host where there is one,
and goes on with the next when that dies: ``Guest``. In both the pool is reached through a moonpool.Store.
"""

from __future__ import annotations

import errno
import os
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.core.config import paths
from moonpool.core.config.config import Config, load
from moonpool.core.config.units import parse_size
from moonpool.core.errors import AuthError, ConfigError, Error, InvalidArgument, Unavailable
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.control_tls import control_settings
from moonpool.core.service.data_tls import pool_tls
from moonpool.core.service.listen_addresses import NodeAddresses, host_id, master_text, node_addresses
from moonpool.core.service.node_socket import Claim
from moonpool.core.service.tenant_keys import TenantKeys, tenants_of
from moonpool.core.store.keys import Space
from moonpool.core.store.store import Store

from ._codes import NoNode, logger
from ._hosts import address_of, is_ip, is_ip6, is_of_this_host
from ._metadata import P2P, check_metadata_server
from ._protocols import check_for_pool
from ._segment_names import PORTS, SegmentNames, free_ports, node_name, segment_of
from ._ssd import ssd_bytes, ssd_path_of

if TYPE_CHECKING:
    from moonpool import _native

NAMESPACE = "mooncake"
LOOPBACK = "127.0.0.1"
ANY = ("0.0.0.0", "::")
MASTER_PORT = 50051  # where an address has no port
TIMEOUT_S = 2.0
JOIN_TIMEOUT_S = 5.0
LOOK_AGAIN_S = 0.25
SMALLEST_ARENA = "1MiB"
ON, OFF = ("1", "true", "yes", "on", "enable"), ("", "0", "false", "no", "off", "disable")
_POLL_S = 0.005
_HALF_BYTES = re.compile(r"\d*\.\d*")
_B = re.compile(r"(?<=[kmgt])b$")


@dataclass(frozen=True)
class Settings:
    """What setup() was given, in any of its forms; sizes in bytes."""

    local_hostname: str
    master: str
    segment: int
    tenant: str = "default"
    ssd_path: str = ""
    called: Address | None = None  # as others name the segment; None: local_hostname

    @property
    def host(self) -> Address:
        """With port 0 where none was given."""
        return address_of(self.local_hostname or LOOPBACK, "local_hostname")

    @property
    def masters(self) -> list[Address]:
        """The master's address, or those of several, which commas separate; of several ranges semicolons."""
        return [address for part in self._ranges() for address in part]

    def _ranges(self) -> list[list[Address]]:
        return [
            [address_of(each.strip(), "master_server_address", MASTER_PORT) for each in part.split(",")]
            for part in self.master.split(";")
        ]

    def at_port(self, port: int, called: Address | None = None) -> Settings:
        """Instead of that of local_hostname, where another listens; 0: a free one."""
        return replace(self, local_hostname=str(self.host._replace(port=port)), called=called)

    def config(self, **arguments: object) -> Config:
        """moonpool's own configuration, with this master."""
        if "://" in self.master:
            raise ConfigError(
                f"master_server_address = {self.master} names a metadata service; give host:port of the "
                f"`moonpool master` (or `mooncake_master`)",
                operation="setup",
                key="master_server_address",
            )
        given = {name.replace("__", "."): value for name, value in arguments.items()}
        master = ";".join(",".join(map(str, part)) for part in self._ranges())
        return load(arguments={"cluster.master": master, "node.http": "off"} | given)

    def is_of_this_host_alone(self, config: Config) -> bool:
        """Whether no token is configured: then master and nodes use loopback, whatever the host's name."""
        return not config.token_is_configured and all(each.is_loopback for each in self.masters)


def settings_of(config: Mapping[str, Any]) -> Settings:
    """The dict form. Values may all be str. Raises InvalidArgument for one that is missing or malformed."""

    def first(*names: str, default: Any = None) -> Any:
        found = next((config[name] for name in names if name in config), default)
        if found is None:
            raise InvalidArgument(f"setup: the configuration has no {names[0]}", key=names[0])
        return found

    check_metadata_server(str(first("metadata_server", default=P2P)))
    check_for_pool(
        str(first("protocol", default="tcp")), str(first("rdma_devices", "device_name", default=""))
    )
    return Settings(
        local_hostname=str(first("local_hostname")),
        master=str(first("master_server_addr", "master_server_address")),
        segment=size_of(first("global_segment_size", default=0), "global_segment_size"),
        tenant=str(config.get("tenant_id") or "default"),
        ssd_path=ssd_path_of(
            is_on(first("enable_ssd_offload", default=False)), str(first("ssd_offload_path", default=""))
        ),
    )


def size_of(value: Any, name: str) -> int:
    """Bytes: a number, or text such as "4gb", which is 4 * 2**30. Raises InvalidArgument."""
    try:
        if isinstance(value, str) and _HALF_BYTES.fullmatch(value.strip()):
            raise ValueError("a part of a byte")
        size = parse_size(_B.sub("", value.strip().lower())) if isinstance(value, str) else int(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} = {value!r:.80} is no size", key=name, cause=str(error)) from error
    if size < 0:
        raise InvalidArgument(f"{name} = {value!r:.80} is below 0", key=name)
    return size


def is_on(value: Any) -> bool:
    """Whether a setting is on: a text in ON, or any other true value."""
    return value.strip().lower() in ON if isinstance(value, str) else bool(value)


class Access(ABC):
    """The way into the pool.

    segment: this process's own, "host:port" as setup() was given it; for a guest its host's name.
    names: of all segments.
    """

    segment: str

    def __init__(self, settings: Settings, config: Config) -> None:
        self.settings = settings
        self.config = config
        self.token = config.read_token()
        self.space = Space(tenant=settings.tenant, namespace=NAMESPACE)
        self.host_id = host_id()
        self._tls = pool_tls(config)
        self._master: _native.DirectoryClient | None = None
        self._store: Store | None = None
        self._lock = threading.Lock()
        self.names = SegmentNames(self.members)

    @abstractmethod
    def join(self, wait_s: float) -> None:
        """Before anything else, and until it has worked. Raises Unavailable or Timeout when there is no
        master within that time (it may be tried again), or another moonpool Error.
        """

    def store(self) -> Store:
        """The store of the node. Raises NoNode when there is none to go to."""
        assert self._store is not None
        return self._store

    def renew(self) -> bool:
        """After Unavailable: whether another node may be tried at once."""
        return False

    def directory(self) -> _native.DirectoryClient:
        """The connection to the master."""
        from moonpool import _native

        with self._lock:
            if self._master is None:
                self._master = _native.DirectoryClient(
                    master_text(self.config), self.token, tenant=self.space.tenant, tls=self._tls.control
                )
            return self._master

    def members(self) -> list[_native.Member]:
        """The living nodes of the pool. Raises a moonpool Error."""
        _, rows = self.directory().members(fresh=True)
        return [
            row
            for row in rows
            if row.state == "alive" and self.space.tenant in (load.tenant for load in row.tenants)
        ]

    def open_at(self, member: _native.Member) -> Store:
        """A store whose own node is that one."""
        near = member.host_id == self.host_id and os.path.exists(member.socket_path)
        return self._open(member.socket_path if near else f"tcp://{member.address}")

    def _open(self, place: str) -> Store:
        return Store(
            place,
            tenant=self.space.tenant,
            namespace=self.space.namespace,
            token=self.token,
            tls=self._tls,
            timeout_s=TIMEOUT_S,
        )

    def close(self) -> None:
        """Ends the connections, and the node where this process has one."""
        with self._lock:
            if self._master is not None:
                self._master.close()
                self._master = None
        if self._store is not None:
            self._store.close()


class PortTaken(ConfigError):
    """Another process listens at the port of a segment."""


@contextmanager
def _port_taken(local_hostname: str) -> Iterator[None]:
    """Raises PortTaken for the core's error of a port where another process listens."""
    try:
        yield
    except Error as error:
        if os.strerror(errno.EADDRINUSE) not in str(error):
            raise
        raise PortTaken(
            f"local_hostname = {local_hostname}: another process listens there; name another port, or none",
            operation="setup",
            key="local_hostname",
        ) from error


class OwnNode(Access):
    """A node inside this process, gone with it. It joins a master that starts later by itself.

    Raises a moonpool Error when it cannot start.
    """

    def __init__(self, settings: Settings) -> None:
        from moonpool.core.service.node import (
            native_server,  # it imports aiohttp, which a guest does not need
        )

        super().__init__(settings, config := _node_config(settings))
        self._reach = _reach_of(settings, config)
        self._pid = os.getpid()
        paths.runtime_dir(ensure=True)
        self.socket = paths.check_socket_path(paths.node_socket(config.node.name))
        self._claim: Claim | None = Claim(self.socket)
        self._server: _native.Server | None = None
        self._tenants: TenantKeys | None = None
        try:
            # Where tenants have keys of their own, programs of this user do not get all of them.
            if config.token_is_configured and not config.cluster.tenants_file:
                self._claim.tell_token(self.token)
            if told := control_settings(config):
                self._claim.tell_tls(told)
            with _port_taken(settings.local_hostname):
                self._server = native_server(
                    config, self.socket, self.token, self._reach, size_option="global_segment_size="
                )
                if (file := tenants_of(config)) is not None:
                    self._tenants = TenantKeys(file, self._server, logger, self._server.set_limits)
                self._server.start()
            self.segment = segment_of(config.node.name, address := self._advertised())
            self.names.add_own(self.segment, address)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stops the node. Does nothing in a process that was forked from the one that made it."""
        if os.getpid() != self._pid:
            return  # in a child of fork(): the socket is the parent's, and so are the threads
        super().close()
        tenants, self._tenants = self._tenants, None
        if tenants is not None:
            tenants.close()
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    @property
    def server(self) -> _native.Server:
        """The node of this process. Raises Unavailable after its end."""
        if self._server is None:
            raise Unavailable("the node of this segment has ended", operation="setup")
        return self._server

    def _advertised(self) -> str:
        given = self._reach.advertise
        return (
            given.removesuffix("0") + self.server.addresses[0].rpartition(":")[2]
            if given.endswith(":0")
            else given
        )

    def join(self, wait_s: float) -> None:
        """Waits until the master has accepted the node, ``wait_s`` seconds at most. Raises Error."""
        give_up_s = time.monotonic() + wait_s
        while True:
            joined, _, why_not, _ = self.server.membership() or (False, -1, "it has no master", 0.0)
            if joined:
                self._store = self._open(str(self.socket))
                return
            if "token" in why_not:
                self._raise_if_refused()
            if time.monotonic() > give_up_s:
                raise Unavailable(
                    f"the master {master_text(self.config)} has not taken this process in"
                    f"{': ' if why_not else ''}{why_not}; start `moonpool master` (or `mooncake_master`), "
                    f"which this process then joins",
                    operation="setup",
                    peer=master_text(self.config),
                )
            time.sleep(_POLL_S)

    def _raise_if_refused(self) -> None:
        """Raises AuthError for a wrong token: the node has a sentence only, and would go on trying."""
        try:
            self.directory().members()
        except AuthError:
            raise
        except Error:
            pass


def _node_config(settings: Settings) -> Config:
    arguments: dict[str, object] = {
        "node__object_share_max": 0.5,  # more than that one client cannot lease
        "node__events": "none",  # a segment publishes none
        "node__pins_share_max": 1.0,  # with_hard_pin: the segment's callers decide how much is never evicted
    }
    if settings.tenant == "default":
        arguments["node__dram"] = settings.segment
    else:
        arguments |= {"node__dram": SMALLEST_ARENA, "node__tenants": {settings.tenant: settings.segment}}
    if settings.ssd_path:
        Path(settings.ssd_path).mkdir(parents=True, exist_ok=True)
        arguments["node__ssd"] = [f"{settings.ssd_path}:{ssd_bytes(Path(settings.ssd_path))}"]
        arguments["node__ssd_clean_share"] = (
            1.0  # all is written as it comes: a reader may drive out anything
        )
    listen = settings.host
    master = settings.masters[0]
    every = ANY[is_ip6(master.host)]
    if settings.is_of_this_host_alone(settings.config()):
        listen = Address(LOOPBACK, listen.port)
    elif listen.is_loopback and not master.is_loopback:  # the others are elsewhere
        listen = Address(every, listen.port)
    elif not listen.is_loopback and not is_ip(listen.host):
        arguments["node__advertise"] = str(listen)
        listen = Address(every, listen.port)
    reached_as = Address(settings.host.host if listen.host in ANY else listen.host, listen.port)
    if listen.host in ANY and settings.host.is_loopback:
        reached_as = master._replace(port=0)  # the address by which the master is reached
    arguments["node__name"] = node_name(settings.called or settings.host, reached_as)
    return settings.config(node__listen=str(listen), **arguments)


def _reach_of(settings: Settings, config: Config) -> NodeAddresses:
    try:
        return node_addresses(config)
    except ConfigError as error:
        raise ConfigError(
            f"local_hostname = {(settings.called or settings.host).host!r} with the master "
            f"{', '.join(map(str, settings.masters))}: {error}",
            operation="setup",
            key="local_hostname",
        ) from error


class Guest(Access):
    """Without a segment: at another node. One that is gone is left for the next."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, settings.config())
        host = settings.host
        self.segment = str(host if host.port else host._replace(port=random.choice(PORTS)))  # names no node
        self._looked_s = 0.0
        self._nobody: NoNode | None = None  # what the last look found, when no node was there
        self._choosing = threading.Lock()

    def join(self, wait_s: float) -> None:
        """Asks the master once, so that a wrong address or token is an error here. Raises Error."""
        self.members()  # a wrong address or token is an error now and not at the first call

    def store(self) -> Store:
        """The store of a node that answers. Raises NoNode without one."""
        store = self._store
        if store is not None and store.connected:
            return store
        return self._choose()

    def renew(self) -> bool:
        """Raises NoNode when there is none: callers slow down for that, and not for a node that is silent."""
        if self._nobody is None:
            self._looked_s = 0.0
        try:
            self._choose()
        except NoNode:
            raise
        except Error:
            return False
        return True

    def _choose(self) -> Store:
        with self._choosing:
            if self._store is not None and self._store.connected:
                return self._store
            if time.monotonic() < self._looked_s + LOOK_AGAIN_S:
                if self._nobody is not None:
                    raise NoNode(str(self._nobody), operation="setup", peer=master_text(self.config))
                if self._store is not None:
                    return self._store
            self._looked_s = time.monotonic()
            self._nobody = None
            members = sorted(self.members(), key=lambda member: member.host_id != self.host_id)
            trouble: Error | None = None
            for member in members:
                try:
                    fresh = self.open_at(member)
                except Error as error:
                    trouble = error
                    continue
                if self._store is not None:
                    self._store.close()
                self._store = fresh
                return fresh
            self._nobody = NoNode(
                f"no node of the pool serves the tenant {self.space.tenant}: "
                f"{trouble or 'the master knows none'}; a process with global_segment_size above 0, or "
                f"`moonpool node`, gives it memory",
                operation="setup",
                peer=master_text(self.config),
            )
            raise self._nobody


def access_of(settings: Settings) -> Access:
    """Not joined yet. Raises a moonpool Error with what is wrong and the remedy."""
    return own_node(settings) if settings.segment else Guest(settings)


def own_node(settings: Settings) -> OwnNode:
    """At the port of local_hostname, else at a free one of PORTS. Raises a moonpool Error."""
    if settings.host.port:
        return OwnNode(settings)
    called = settings.called or settings.host
    for port in free_ports(LOOPBACK if settings.host.is_loopback else ANY[is_ip6(settings.host.host)]):
        with suppress(PortTaken):  # by another process that chose it at the same time
            return OwnNode(settings.at_port(port, called))
    raise PortTaken("no port is free", operation="setup", key="local_hostname")


class Beside(Access):
    """A dummy client: at the node whose wire listens at ``address``; by its socket when that is this host."""

    def __init__(self, address: str, tenant: str = "default") -> None:
        where = parse_address(address, "server_address")
        super().__init__(Settings(str(where), "127.0.0.1", 0, tenant), load(arguments={"node.http": "off"}))
        self.segment = str(where)
        self._where = where

    def join(self, wait_s: float) -> None:
        """Connects to the node of the client process at that port, by its socket where it is on this host.
        Raises a moonpool Error."""
        socket = paths.runtime_dir() / f"node-{name_of_client(self._where.port)}.sock"
        if is_of_this_host(self._where.host) and socket.exists():
            try:
                self._store = self._open(str(socket))
                return
            except Unavailable:  # left behind by a node that was killed
                pass
        self._store = self._open(f"tcp://{self._where}")

    def members(self) -> list[_native.Member]:
        """Empty: a dummy client knows no master. Asks its node whether it is there."""
        self.store().stat()
        return []


def name_of_client(port: int) -> str:
    """The name of the node that `mooncake_client --port` runs, by which dummy clients find its socket."""
    return f"mooncake-client-{port}"
