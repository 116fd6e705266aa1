"""A node's stream of KV events: the native server returns rows of stored and removed blocks, a Publisher
sends them (docs/events.md). Nothing of it exists where node.events is none."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.core.config.config import Config
from moonpool.core.config.paths import check_socket_path, socket_event_streams
from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.kv_event_publisher import (
    BATCH_BLOCKS_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventPublisher,
)
from moonpool.core.service.listen_addresses import OFF, advertised_address, require_token
from moonpool.core.service.published_events import PublishedEvents, publishes_events

if TYPE_CHECKING:
    from moonpool import _native

_ROW = struct.Struct("<32sIBBH")  # digest, number of the space, on disk, stored, zero
_MEDIA = ("CPU", "DISK")
_AUTO = "auto"
_log = logging.getLogger("moonpool.node")


class NodeEventSource:
    """A node's blocks as a publisher wants them. The node keeps account of them from the first call of take()
    or inventory() on; one with an SSD, from its start."""

    def __init__(self, server: _native.Server) -> None:
        self._server = server
        self._begun = False

    def fileno(self) -> int:
        """The server's descriptor of events."""
        return self._server.events_fd

    def take(self) -> list[KvEvent]:
        """What happened since the last call; the whole inventory when the server lost some of it."""
        if not self._begin():
            return []
        rows = self._server.take_events()
        if rows is None:  # more happened than was kept
            return self.inventory()
        return list(self._events(_ROW.iter_unpack(rows)))

    def inventory(self) -> list[KvEvent]:
        """Begins with the removal of all blocks: the subscriber that asks knows nothing for certain."""
        self._begin()
        events: list[KvEvent] = [AllBlocksCleared()]
        cursor = 0
        while True:
            cursor, rows = self._server.events_inventory(cursor)
            events.extend(self._events(_ROW.iter_unpack(rows)))
            if cursor == 0:
                return events

    def _begin(self) -> bool:
        """False: the node is only starting, and the next call may find it ready."""
        self._begun = self._begun or self._server.begin_events()
        return self._begun

    def _events(self, rows: Iterable[tuple[bytes, int, int, int, int]]) -> Iterator[KvEvent]:
        """One event for each run of rows that differ in their digest only."""
        fingerprints = self._server.events_fingerprints()
        for (space, on_disk, stored), run in groupby(rows, lambda row: row[1:4]):
            digests = [row[0] for row in run]
            for at in range(0, len(digests), BATCH_BLOCKS_MAX):
                some, medium = digests[at : at + BATCH_BLOCKS_MAX], _MEDIA[on_disk]
                if stored:
                    yield BlockStored(some, medium=medium, fingerprint=fingerprints[space])
                else:
                    yield BlockRemoved(some, medium=medium, fingerprint=fingerprints[space])


def publisher_of_node(config: Config, server: _native.Server, socket: Path) -> KvEventPublisher | None:
    """None: node.events says none, or auto cannot publish here, which is logged. Raises ConfigError when it
    cannot listen at an address that was given, or may not: beyond this host it needs a cluster token that the
    operator chose, as everything else does, and then it asks for it, at both addresses. socket: the node's.
    """
    if not publishes_events(config):
        return None
    if config.node.events != _AUTO:
        return _publisher_at(config, server)
    try:
        return _publisher_beside(config, server, socket)
    except ConfigError as error:
        _log.warning("KV events are not published, so a proxy does not know what this node has: %s", error)
        return None


def _publisher_at(config: Config, server: _native.Server) -> KvEventPublisher:
    """At the addresses that were given."""
    beyond = False
    for key, endpoint in (
        ("node.events", config.node.events),
        ("node.events_replay", config.node.events_replay),
    ):
        if endpoint.startswith("tcp://"):
            address = parse_address(endpoint.removeprefix("tcp://"), key)
            require_token(config, address, key)
            beyond = beyond or not address.is_loopback
        elif endpoint and not endpoint.startswith("ipc://"):
            raise ConfigError(
                f"{key}: events are published at tcp://host:port or ipc://path, not {endpoint!r}; auto "
                f"chooses, and none publishes none",
                operation="events",
                key=key,
            )
    return KvEventPublisher(
        NodeEventSource(server),
        config.node.events,
        replay=config.node.events_replay,
        token=config.read_token() if beyond else b"",
        only_followed=True,
    )


def _publisher_beside(config: Config, server: _native.Server, socket: Path) -> KvEventPublisher:
    """At sockets beside the node's own, for this user's processes; and where the node's wire listens beyond
    loopback, at two free ports there under the cluster token, which the wire needs, too."""
    near, replay = (f"ipc://{check_socket_path(path)}" for path in socket_event_streams(socket))
    wire = None if config.node.listen == OFF else parse_address(config.node.listen, "node.listen")

    def publisher(beyond: str) -> KvEventPublisher:
        return KvEventPublisher(
            NodeEventSource(server),
            near,
            replay=replay,
            token=config.read_token() if beyond else b"",
            beyond=beyond,
            only_followed=True,
        )

    if wire is None or wire.is_loopback:
        return publisher("")
    try:
        return publisher(f"tcp://{Address(wire.host, 0)}")
    except ConfigError as error:
        beside = publisher("")
        _log.warning("KV events are published on this host alone: %s", error)
        return beside


def published_by(publisher: KvEventPublisher, *, advertise: str, master: str) -> PublishedEvents:
    """What the node tells of it. advertise: host:port by which others reach the node's wire, "": it is off;
    master: "host:port", or "".
    """
    host = parse_address(advertise, "node.advertise").host if advertise else ""
    if Address(host, 0).is_loopback:
        host = ""  # no other host comes that way
    if publisher.far[0]:  # at the address of the wire: others reach both in the same way
        far = [_elsewhere(each, host) if each and host else "" for each in publisher.far]
    else:  # as they were given
        far = [_from_others(each, host) for each in (publisher.endpoint, publisher.replay)]
    return PublishedEvents(
        events=_from_here(publisher.endpoint),
        replay=_from_here(publisher.replay),
        far_events=far[0],
        far_replay=far[1],
        master=master,
        token=publisher.asks_token,
    )


def _elsewhere(endpoint: str, host: str) -> str:
    """The same port of another host."""
    return f"tcp://{Address(host, parse_address(endpoint.removeprefix('tcp://'), 'node.events').port)}"


def _from_here(endpoint: str) -> str:
    """Where this host reaches what is bound to ``endpoint``."""
    return _at(endpoint, lambda host: "::1" if ":" in host else "127.0.0.1")


def _from_others(endpoint: str, advertised: str) -> str:
    """Where other hosts reach it; "": nowhere. What is given as a loopback is told as such: others of this
    host, and those at the end of a tunnel, may use it; it asks for no token, unlike one of all addresses."""
    if not endpoint.startswith("tcp://"):
        return ""
    found = _at(endpoint, lambda host: advertised or advertised_address(host, None))
    reaches = found == endpoint or not parse_address(found.removeprefix("tcp://"), "node.events").is_loopback
    return found if reaches else ""


def _at(endpoint: str, named: Callable[[str], str]) -> str:
    """``endpoint`` with a host to connect to, where it is bound to all addresses: named(host)."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    address = parse_address(endpoint.removeprefix("tcp://"), "node.events")
    if address.host not in ("0.0.0.0", "::"):
        return endpoint
    return f"tcp://{Address(named(address.host), address.port)}"
