"""The streams of KV events that the proxy subscribes to, and limits. Values only; times in seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import Address

_ENDPOINT = re.compile(r"(tcp://[^\s,]+:\d{1,5}|ipc://[^\0-\x1f\x7f]+|inproc://[^\s,]+)")


@dataclass(frozen=True, slots=True)
class EventSource:
    """The stream of one engine, or of one node of the pool (``pool``).

    name:     of the engine or node.
    endpoint: where it publishes.
    replay:   where it replays; "": it does not.
    """

    name: str
    endpoint: str
    replay: str = ""
    pool: bool = False
    topic: str = ""  # "": every topic
    # Of the cluster, which the publisher asks for; b"": it does not.
    token: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        for endpoint in (self.endpoint, self.replay):
            if endpoint and not _ENDPOINT.fullmatch(endpoint):
                raise _bad(f"an event stream is at tcp://host:port or ipc://path, not {endpoint!r}")
        if not self.endpoint:
            raise _bad(f"the events of {self.name!r} need an endpoint, such as tcp://host:5557")


@dataclass(frozen=True, slots=True)
class EventLimits:
    """Limits in bytes, messages and seconds."""

    message_bytes_max: int = 24 << 20  # a node's inventory comes in messages of up to 18 MiB
    # Received by ZMQ and not yet processed, for each stream; more waits at the publisher. So one stream holds
    # at most (queue_messages_max + 1) * message_bytes_max, and usually some hundred KB.
    queue_messages_max: int = 4
    queues_bytes_max: int = 128 << 20  # of all streams that are behind, estimated from their last messages
    behind_s: float = 1.0  # a stream with unprocessed messages for this long is behind
    rest_s: float = 30.0  # pause of the largest stream that is behind
    pending_messages_max: int = 10_000  # received during a replay, for each stream
    pending_bytes_max: int = 32 << 20  # of these, all streams together
    replay_s: float = 5.0  # silence after which a replay is given up
    # A node of the pool that is silent for so long, although prompts were sent, is probed.
    check_s: float = 4.0
    idle_check_s: float = 15.0  # the same without prompts, and for a node that did not answer the last probe
    redial_s: float = 2.0  # without a connection until another secret of the cluster is tried
    lost_s: float = 5.0  # time without a connection after which the blocks no longer count
    gone_s: float = 10.0  # time out of the rotation after which the blocks are removed
    vanished_s: float = 6.0  # until the host of a publisher counts as gone


def parse_event_sources(
    texts: Iterable[str], *, pool: bool = False, token: bytes = b""
) -> tuple[EventSource, ...]:
    """``NAME=tcp://host:port`` or ``NAME=tcp://host:port,tcp://host:port`` (the second replays) each. Raises
    ConfigError. token: the cluster token, which pool nodes require at addresses beyond loopback."""
    sources = []
    for text in texts:
        name, separator, rest = text.partition("=")
        endpoint, _, replay = rest.partition(",")
        if not separator or not name:
            raise _bad(
                f"{text!r} is no event stream; write NAME=tcp://host:port, or NAME=tcp://host:port,"
                "tcp://host:port with where it replays"
            )
        secret = token if pool and any(is_beyond_host(each) for each in (endpoint, replay)) else b""
        sources.append(EventSource(name, endpoint, replay, pool, token=secret))
    names = [source.name for source in sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _bad(f"{twice[0]!r} has two event streams; give one for each engine")
    return tuple(sources)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How the proxy finds the nodes of the pool, besides those of this host and user.

    master: host:port of a master; "": none is configured.
    token:  the configured cluster token; b"": none.
    tls:    how to connect to the master inside TLS (core/service/control_tls.py); b"": as its nodes do.
    """

    master: str = ""
    token: bytes = field(default=b"", repr=False)
    tls: bytes = b""


def is_beyond_host(endpoint: str) -> bool:
    """Whether other hosts can reach it, by the node's rule; then a pool's node requires the cluster token."""
    if not endpoint.startswith("tcp://"):
        return False
    host, _, _ = endpoint.removeprefix("tcp://").rpartition(":")
    return not Address(host.strip("[]"), 0).is_loopback


def _bad(sentence: str) -> ConfigError:
    return ConfigError(f"events: {sentence}", operation="config", key="proxy.events")
