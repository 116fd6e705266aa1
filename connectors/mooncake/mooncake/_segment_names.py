"""Segments by the name that setup() was given, "localhost:10001", where others reach the node elsewhere.

The name is part of the node's own name, which the whole pool knows: every process maps it back by itself.
"""

from __future__ import annotations

import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from moonpool.core.config.paths import check_socket_path, runtime_dir
from moonpool.core.errors import ConfigError, Error
from moonpool.core.service.addresses import Address
from moonpool.core.service.listen_addresses import is_taken

from ._hosts import is_ip6

if TYPE_CHECKING:
    from moonpool import _native

PORTS = range(12_300, 14_301)  # of segments without a given port; firewalls are opened for these
PORT_TRIES = 64
NODE_NAME_BYTES_MAX = 64
LOOK_AGAIN_S = 1.0
KNOWN_S = 10.0
_NAME = re.compile(r"mooncake-[0-9a-f]{16}--([A-Za-z0-9._-]+)_([0-9]{1,5})")
_HOST = re.compile(r"[A-Za-z0-9.:-]+")


def node_name(called: Address, reached_as: Address) -> str:
    """A new name for a node. ``called``: as setup() was given it, port 0 for the one that the node gets; it
    is left out where it says nothing new, or is too long for a name or for a socket's path.
    """
    name = f"mooncake-{secrets.token_hex(8)}"
    is_known = called.host == reached_as.host and called.port in (0, reached_as.port)
    is_of_others = called.is_loopback and not reached_as.is_loopback  # each host has such a name
    if is_known or is_of_others or not _HOST.fullmatch(called.host):
        return name
    long = f"{name}--{called.host.replace(':', '_')}_{called.port}"
    if len(long) > NODE_NAME_BYTES_MAX:
        return name
    try:
        check_socket_path(runtime_dir() / f"node-{long}.sock")
    except ConfigError:
        return name
    return long


def segment_of(name: str, address: str) -> str:
    """The segment's name, of its node's name and address."""
    found = _NAME.fullmatch(name)
    if found is None:
        return address
    host, port = found[1], found[2]
    if is_ip6(wide := host.replace("_", ":")):
        host = f"[{wide}]"
    return f"{host}:{address.rpartition(':')[2] if port == '0' else port}"


class SegmentNames:
    """The addresses of names, as one process knows them. Any thread may call."""

    def __init__(self, members: Callable[[], Iterable[_native.Member]]) -> None:
        self._members = members
        self._lock = threading.Lock()
        self._own: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._looked_s = float("-inf")

    def add_own(self, segment: str, address: str) -> None:
        """Adds the name of a segment of this process."""
        self._own[segment] = address

    def address_of(self, segment: str) -> str:
        """The address of the node with that name; the name itself when no node has it. Asks the pool again
        for an unknown name after LOOK_AGAIN_S seconds, for others after KNOWN_S."""
        if (own := self._own.get(segment)) is not None:
            return own
        found = self._addresses.get(segment)
        if time.monotonic() >= self._looked_s + (LOOK_AGAIN_S if found is None else KNOWN_S):
            with self._lock:
                self._looked_s = time.monotonic()
                try:
                    rows = list(self._members())
                except Error:
                    return found or segment  # and so no node, as where there is none of the name
                self._addresses = {segment_of(row.name, row.address): row.address for row in rows}
            found = self._addresses.get(segment)
        return segment if found is None else found


def members_by_segment(members: Iterable[Any]) -> dict[str, Any]:
    """By their addresses, and by the names that setup() was given."""
    rows = list(members)
    return {row.address: row for row in rows} | {segment_of(row.name, row.address): row for row in rows}


def free_ports(host: str) -> Iterator[int]:
    """Some of PORTS at which no process listens now; last 0, for any other."""
    for port in random.sample(PORTS, PORT_TRIES):
        if not is_taken(Address(host, port)):
            yield port
    yield 0
