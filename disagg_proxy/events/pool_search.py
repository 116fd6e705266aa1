"""Lists the nodes of the pool that publish their KV events: those of this host and user, and those that
masters name.

    runtime folder     node-NAME.sock.events: where each living node publishes, and which master it joins
    masters            the configured one, and those that nodes of this host join: where each node publishes
                       for other hosts

A node that both name is followed by its file, at sockets of this host. Of a master an endpoint is taken only
as tcp://, since a path names a file of the node's host, and a loopback only of a node of this host.

Blocking, in threads: one of them calls ``look_here`` and ``found``, another one ``ask_masters``, which may be
slow, and ``close``. No connection to a node's events is opened here: those are the subscriber's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from moonpool import _native
from moonpool.core.config import paths
from moonpool.core.config.cluster_token import ClusterToken
from moonpool.core.errors import ConfigError, Error, Timeout, Unavailable
from moonpool.core.service.cluster import MasterRow, read_masters
from moonpool.core.service.control_tls import control_client_from, control_client_of
from moonpool.core.service.listen_addresses import host_id
from moonpool.core.service.published_events import LocalNode, local_nodes
from moonpool.disagg_proxy.events.settings import EventSource, PoolSettings, is_beyond_host

ANSWER_S = 0.5  # of each step of an exchange with a master: connect, send, receive
MASTERS_MAX = 8  # that are asked; the nodes of one host seldom join more than one


class FoundNodes(NamedTuple):
    """One look.

    sources:    by name: ``node:NAME``, and where a master told of it ``node:NAME@HOST:PORT``.
    places:     where it looked, for people: "in FOLDER", "at the master HOST:PORT".
    problems:   place -> a sentence on why it could not look there.
    unfollowed: name -> a sentence on why this node, which it found, cannot be followed.
    masters:    what each of them says of itself.
    """

    sources: Mapping[str, EventSource]
    places: tuple[str, ...]
    problems: Mapping[str, str]
    unfollowed: Mapping[str, str] = MappingProxyType({})
    masters: tuple[MasterRow, ...] = ()


@dataclass(slots=True)
class _Master:
    """A master, or several that are one another's standbys, and what they last said. by: the socket of a node
    that joins it; None: it is configured. problem: why it said nothing the last time; "": it did."""

    by: Path | None
    token: bytes = b""
    client: _native.DirectoryClient | None = None
    tls: _native.TlsClient | None = None
    members: list[_native.Member] = field(default_factory=list)
    rows: list[MasterRow] = field(default_factory=list)
    problem: str = ""

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None


class PoolSearch:
    """by_hand: endpoints that are followed anyway; a node that publishes there is left out."""

    def __init__(self, settings: PoolSettings, by_hand: Collection[str] = ()) -> None:
        self._settings = settings
        self._by_hand = frozenset(by_hand)
        self._host_id = host_id()
        self._place = "in the runtime folder"
        self._problem = ""  # of the place
        self._nodes: list[LocalNode] = []
        self._masters: dict[str, _Master] = {}  # by address
        self._tokens: dict[Path, ClusterToken] = {}  # by the node's socket
        self._left: list[_Master] = []  # to be closed by the thread that asks
        self._stopping = False

    def look(self) -> FoundNodes:
        """The nodes that live now."""
        self.look_here()
        self.ask_masters()
        return self.found()

    def look_here(self) -> FoundNodes:
        """Reads the runtime folder. Masters have the nodes that they last told of."""
        self._nodes, self._problem = [], ""
        try:
            self._place = f"in {paths.runtime_dir()}"
            self._nodes = local_nodes()
        except (Error, OSError) as error:
            self._problem = str(error)
        self._update_masters()
        return self.found()

    def ask_masters(self) -> None:
        """A master that does not answer keeps the nodes that it last had, and one that was started again
        those that have not joined it yet, until it says that it has all."""
        while self._left:
            self._left.pop().close()
        for address, master in list(self._masters.items()):
            if self._stopping:
                return
            try:
                self._ask(address, master)
                master.problem = ""
            except (Unavailable, Timeout) as error:
                master.problem = str(error)  # the client dials again by itself, and knows the nodes
            except Exception as error:  # a file for TLS that is cut off; others are asked all the same
                master.close()
                master.problem = _sentence(error)

    def found(self) -> FoundNodes:
        """What the last calls of the others saw."""
        problems = {self._place: self._problem} if self._problem else {}
        sources: dict[str, EventSource] = {}
        unfollowed: dict[str, str] = {}
        for node in self._nodes:
            name, told = f"node:{node.name}", node.published
            if {told.events, told.far_events} & self._by_hand:
                continue
            try:
                token = self._token(node.socket) if told.token else b""
                sources[name] = EventSource(name, told.events, told.replay, pool=True, token=token)
            except Exception as error:  # the others are followed all the same
                unfollowed[name] = _sentence(error)
        near = {node.published.far_events for node in self._nodes} | self._by_hand
        for address, master in self._masters.items():
            if master.problem:
                problems[f"at the master {address}"] = master.problem
            for member in master.members:
                if member.events in near if member.events else self._is_here(member):
                    continue
                name = f"node:{member.name}@{member.address}"
                try:
                    sources[name] = self._source(name, member, master.token)
                except ConfigError as error:
                    unfollowed[name] = str(error)
        places = (self._place, *(f"at the master {address}" for address in self._masters))
        rows = tuple(row for master in self._masters.values() for row in master.rows)
        return FoundNodes(sources, places, problems, unfollowed, rows)

    def stop_soon(self) -> None:
        """From any thread: after the master that is being asked no other one is."""
        self._stopping = True

    def close(self) -> None:
        """Ends the connections to masters. No look may run."""
        for master in (*self._left, *self._masters.values()):
            master.close()

    def _update_masters(self) -> None:
        wanted: dict[str, Path | None] = {self._settings.master: None} if self._settings.master else {}
        for node in self._nodes:
            if node.published.master and len(wanted) < MASTERS_MAX:
                wanted.setdefault(node.published.master, node.socket)
        for address in self._masters.keys() - wanted.keys():
            self._left.append(self._masters.pop(address))
        for address, by in wanted.items():
            self._masters.setdefault(address, _Master(by)).by = by

    def _ask(self, address: str, master: _Master) -> None:
        if master.client is None:
            by = master.by
            master.token = self._token(by)
            master.tls = control_client_from(self._settings.tls)
            if master.tls is None and by is not None:
                master.tls = control_client_of(by)
            master.client = _native.DirectoryClient(address, master.token, timeout_s=ANSWER_S, tls=master.tls)
        master.rows = read_masters(address, master.token, tls=master.tls, timeout_s=ANSWER_S)
        _, master.members = master.client.members(fresh=True, former=True)

    def _source(self, name: str, member: _native.Member, token: bytes) -> EventSource:
        """Raises ConfigError where a master tells of an endpoint that is not to be connected to."""
        endpoints = [each for each in (member.events, member.events_replay) if each]
        if not member.events:
            raise _unfit(
                "it tells its master of no endpoint for other hosts: it listens on loopback, publishes none, "
                "or it or the master is of an earlier version; name it with --pool-events NAME=ENDPOINT"
            )
        for endpoint in endpoints:
            if not endpoint.startswith("tcp://"):
                raise _unfit(f"a master told of {endpoint!r}, and only tcp://host:port is taken from one")
            if not is_beyond_host(endpoint) and member.host_id != self._host_id:
                raise _unfit(
                    f"{endpoint} is a loopback of another host; start the node with "
                    f"--events tcp://ADDRESS:PORT, or name a tunnel's end with --pool-events NAME=ENDPOINT"
                )
        secret = token if any(is_beyond_host(each) for each in endpoints) else b""
        return EventSource(name, member.events, member.events_replay, pool=True, token=secret)

    def _is_here(self, member: _native.Member) -> bool:
        """Whether it is one of the nodes of the runtime folder."""
        if member.host_id != self._host_id and not _is_loopback(member.address):
            return False
        return member.socket_path in {str(node.socket) for node in self._nodes}

    def _token(self, by: Path | None) -> bytes:
        """The configured cluster token, else that of the node at this socket, else this user's."""
        if self._settings.token:
            return self._settings.token
        socket = paths.default_node_socket() if by is None else by
        token, known = paths.client_token(socket), self._tokens.get(socket)
        # A stream goes on with the token it began with, which is followed.
        if isinstance(token, ClusterToken) and known is not None and known.file == token.file:
            return known
        if isinstance(token, ClusterToken):
            self._tokens[socket] = token
        return token


def _is_loopback(address: str) -> bool:
    return not is_beyond_host(f"tcp://{address}")


def _unfit(sentence: str) -> ConfigError:
    return ConfigError(sentence, operation="events")


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
