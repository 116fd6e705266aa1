"""Where the nodes of this host publish their KV events: what each node writes beside its socket, and the list
of those that live.

    node-NAME.sock.events    0600, JSON of PublishedEvents; removed when the node stops, not by kill -9

A node's socket says whether the node lives: a file without one that accepts connections is of a dead node.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from moonpool.core.config import paths
from moonpool.core.config.config import Config
from moonpool.core.service.node_socket import is_served

_FILE_BYTES_MAX = 4096
_NODES_MAX = 1024  # of one host; further ones are passed over


class PublishedEvents(msgspec.Struct, frozen=True, omit_defaults=True):
    """Endpoints of ZMQ, such as ``ipc://path`` and ``tcp://host:port``; "": none.

    events, replay:         for processes of this host.
    token:                  whether these two ask for the cluster token.
    far_events, far_replay: for other hosts, as the master tells them.
    master:                 host:port of the master that the node joins; "": none.
    """

    events: str
    replay: str = ""
    far_events: str = ""
    far_replay: str = ""
    master: str = ""
    token: bool = False


def publishes_events(config: Config) -> bool:
    """Whether node.events wants a node to publish."""
    return config.node.events not in ("", "none")


class LocalNode(NamedTuple):
    """A node of this host and user that lives and publishes its KV events."""

    name: str
    socket: Path
    published: PublishedEvents


def local_nodes() -> list[LocalNode]:
    """By name. Raises ConfigError where the runtime folder is not this user's alone; a missing one has no
    nodes."""
    found = []
    for path in sorted(paths.runtime_dir().glob("node-*.sock.events"))[:_NODES_MAX]:
        socket = path.with_suffix("")
        with suppress(OSError, msgspec.MsgspecError):  # the node ends just now, or is of another version
            with open(path, "rb") as file:
                published = msgspec.json.decode(file.read(_FILE_BYTES_MAX), type=PublishedEvents)
            if is_served(socket):
                found.append(LocalNode(socket.stem.removeprefix("node-"), socket, published))
    return found
