"""A node's stream of KV events: the native server returns rows of stored and removed blocks, a Publisher
sends them (docs/events.md). Nothing of it exists unless node.events is set."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from moonpool.core.config.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import parse_address
from moonpool.core.service.kv_event_publisher import (
    BATCH_BLOCKS_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventPublisher,
)
from moonpool.core.service.listen_addresses import require_token

if TYPE_CHECKING:
    from moonpool import _native

_ROW = struct.Struct("<32sIBBH")  # digest, number of the space, on disk, stored, zero
_MEDIA = ("CPU", "DISK")


class NodeEventSource:
    """A node's blocks as a publisher wants them."""

    def __init__(self, server: _native.Server) -> None:
        self._server = server

    def fileno(self) -> int:
        """The server's descriptor of events."""
        return self._server.events_fd

    def take(self) -> list[KvEvent]:
        """What happened since the last call; the whole inventory when the server lost some of it."""
        rows = self._server.take_events()
        if rows is None:  # more happened than was kept
            return self.inventory()
        return list(self._events(_ROW.iter_unpack(rows)))

    def inventory(self) -> list[KvEvent]:
        """Begins with the removal of all blocks: the subscriber that asks knows nothing for certain."""
        events: list[KvEvent] = [AllBlocksCleared()]
        cursor = 0
        while True:
            cursor, rows = self._server.events_inventory(cursor)
            events.extend(self._events(_ROW.iter_unpack(rows)))
            if cursor == 0:
                return events

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


def publisher_of_node(config: Config, server: _native.Server) -> KvEventPublisher:
    """Raises ConfigError when it cannot listen there, or may not: beyond this host it needs a cluster token
    that the operator chose, as everything else does, and then it asks for it, at both addresses."""
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
                f"{key}: events are published at tcp://host:port or ipc://path, not {endpoint!r}",
                operation="events",
                key=key,
            )
    token = config.read_token() if beyond else b""
    return KvEventPublisher(
        NodeEventSource(server), config.node.events, replay=config.node.events_replay, token=token
    )
