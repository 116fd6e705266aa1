"""Lists the nodes of the pool that publish their KV events: those of this host and user, and those that
masters name.

    runtime folder     node-NAME.sock.events: where each living node publishes, and which master it joins
    masters            the configured one, and those that nodes of this host join: where each node publishes
                       for other hosts

A node that both name is followed by its file, at sockets of this host. Blocking: ``look`` runs in a thread,
one call at a time. It opens no connection to a node's events: those are the subscriber's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from moonpool import _native
from moonpool.core.config import paths
from moonpool.core.errors import ConfigError, Error
from moonpool.core.service.control_tls import control_client_from, control_client_of
from moonpool.core.service.listen_addresses import host_id
from moonpool.core.service.published_events import LocalNode, local_nodes
from moonpool.disagg_proxy.events.settings import EventSource, PoolSettings, is_beyond_host

ANSWER_S = 1.0  # the longest wait for a master
MASTERS_MAX = 8  # that are asked; the nodes of one host seldom join more than one


class FoundNodes(NamedTuple):
    """One look.

    sources:  by name: ``node:NAME``, and where a master told of it ``node:NAME@HOST:PORT``.
    places:   where it looked, for people: "in FOLDER", "at the master HOST:PORT".
    problems: place -> a sentence on why it could not look there.
    """

    sources: Mapping[str, EventSource]
    places: tuple[str, ...]
    problems: Mapping[str, str]


@dataclass(slots=True)
class _Master:
    """A master, and what it last said. by: the socket of a node that joins it; None: it is configured."""

    by: Path | None
    token: bytes = b""
    client: _native.DirectoryClient | None = None
    members: list[_native.Member] = field(default_factory=list)

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
        self._masters: dict[str, _Master] = {}  # by address

    def look(self) -> FoundNodes:
        """The nodes that live now. A master that does not answer has the nodes that it last had."""
        problems: dict[str, str] = {}
        nodes: list[LocalNode] = []
        place = "in the runtime folder"
        try:
            place = f"in {paths.runtime_dir()}"
            nodes = local_nodes()
        except ConfigError as error:
            problems[place] = str(error)
        self._update_masters(nodes)
        sources = {source.name: source for source in self._of_this_host(nodes)}
        near = {node.published.far_events for node in nodes}
        for address, master in self._masters.items():
            try:
                self._ask(address, master)
            except Error as error:
                master.close()
                problems[f"at the master {address}"] = str(error)
            sources |= {source.name: source for source in self._of_master(master, near)}
        places = (place, *(f"at the master {address}" for address in self._masters))
        return FoundNodes(sources, places, problems)

    def close(self) -> None:
        """Ends the connections to masters. No look may run."""
        for master in self._masters.values():
            master.close()

    def _update_masters(self, nodes: list[LocalNode]) -> None:
        wanted: dict[str, Path | None] = {self._settings.master: None} if self._settings.master else {}
        for node in nodes:
            if node.published.master and len(wanted) < MASTERS_MAX:
                wanted.setdefault(node.published.master, node.socket)
        for address in self._masters.keys() - wanted.keys():
            self._masters.pop(address).close()
        for address, by in wanted.items():
            self._masters.setdefault(address, _Master(by)).by = by

    def _ask(self, address: str, master: _Master) -> None:
        if master.client is None:
            master.token = self._token(master.by)
            tls = control_client_from(self._settings.tls)
            if tls is None and master.by is not None:
                tls = control_client_of(master.by)
            master.client = _native.DirectoryClient(address, master.token, timeout_s=ANSWER_S, tls=tls)
        _, master.members = master.client.members(fresh=True)

    def _of_this_host(self, nodes: list[LocalNode]) -> Iterator[EventSource]:
        for node in nodes:
            told = node.published
            if not {told.events, told.far_events} & self._by_hand:
                yield from self._source(f"node:{node.name}", told.events, told.replay, node.socket)

    def _of_master(self, master: _Master, near: set[str]) -> Iterator[EventSource]:
        for member in master.members:
            endpoint = member.events
            if not endpoint or endpoint in near or endpoint in self._by_hand:
                continue
            if not is_beyond_host(endpoint) and member.host_id != self._host_id:
                continue  # of a loopback that is not ours
            name = f"node:{member.name}@{member.address}"
            yield from self._source(name, endpoint, member.events_replay, master.by)

    def _source(self, name: str, endpoint: str, replay: str, by: Path | None) -> Iterator[EventSource]:
        """None where a node has told what is no endpoint, or its token cannot be read."""
        try:
            token = self._token(by) if is_beyond_host(endpoint) or is_beyond_host(replay) else b""
            yield EventSource(name, endpoint, replay, pool=True, token=token)
        except ConfigError:
            return

    def _token(self, by: Path | None) -> bytes:
        """The configured cluster token, else that of the node at this socket, else this user's."""
        if self._settings.token:
            return self._settings.token
        return paths.client_token(paths.default_node_socket() if by is None else by)
