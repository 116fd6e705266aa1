"""KV events in vLLM's form, and their publisher: docs/events.md specifies frames and fields.

    events -> Publisher (a thread) -> XPUB frames [topic, sequence, batch]
                                      ROUTER: what was missed, from a sequence number on

Nodes publish the blocks that they hold, mock engines those that they compute. Late subscribers and those
with a gap ask the ROUTER; what its buffer has lost is replaced by an inventory when the source can make one.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol

import msgspec
import zmq

from moonpool.core.errors import ConfigError
from moonpool.core.service import zmq_curve
from moonpool.core.service.event_replays import Message, ReplayBuffer, ReplayServer
from moonpool.core.service.zmq_liveness import notice_vanished_host

TOPIC = "kv"
BUFFER_BATCHES = 10_000
BUFFER_BYTES = 64 << 20
QUEUE_BATCHES_MAX = 100_000
BATCH_EVENTS_MAX = 512
BATCH_BLOCKS_MAX = 1024  # of one event
MESSAGE_BLOCKS_MAX = 4096  # of the events of one message: some 150 KiB
SUBSCRIBER_MESSAGES_MAX = 2_000  # queued for one subscriber; what is beyond it asks for a replay
SUBSCRIPTION_BYTES_MAX = 4096
VANISHED_S = 6.0  # until the host of a subscriber or caller counts as gone
_SUBSCRIPTIONS_AT_ONCE = 256  # looked at before events are sent again
# Between two publications of a node: each wakes this thread and those of all subscribers, and each put would.
_REST_S = 0.005
_POLL_MS = 1000
_CLOSE_TIMEOUT_S = 5.0


class KvEvent(msgspec.Struct, frozen=True, tag=True):
    """Base of the events: a msgpack map whose key ``type`` names the class. Every field is written: vLLM's
    own subscribers demand them.
    """


class BlockStored(KvEvent, frozen=True, tag=True):
    """Blocks that are there now, each behind the one before it and the first behind ``parent_block_hash``.

    block_hashes: the publisher's names of them. token_ids: of all of them, or none where the names are our
    own digests. block_size: tokens of a block, 0 when the publisher does not know. medium: GPU, CPU or DISK.
    fingerprint: of a pool's space (docs/keys.md).
    """

    block_hashes: Sequence[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[object, ...] | None] | None = None
    fingerprint: bytes | None = None


class BlockRemoved(KvEvent, frozen=True, tag=True):
    """Blocks that are no longer there."""

    block_hashes: Sequence[int | bytes]
    medium: str | None = None
    fingerprint: bytes | None = None


class AllBlocksCleared(KvEvent, frozen=True, tag=True):
    """The publisher has nothing any more."""


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """What one message carries. sent_s: seconds since 1970."""

    sent_s: float
    events: Sequence[KvEvent]
    data_parallel_rank: int | None = 0


class KvEventSource(Protocol):
    """Where a publisher gets its events, on its own thread."""

    def fileno(self) -> int:
        """Readable when there are events; take() clears it."""

    def take(self) -> list[KvEvent]:
        """The events since the last call."""

    def inventory(self) -> list[KvEvent] | None:
        """All current blocks as events; None: the source does not know them."""


class QueuedEventSource:
    """A source that any thread adds to. Bounded: beyond QUEUE_BATCHES_MAX events the oldest are lost."""

    def __init__(self) -> None:
        self._events: deque[KvEvent] = deque(maxlen=QUEUE_BATCHES_MAX)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def add(self, events: Sequence[KvEvent]) -> None:
        """Queues events; may be called from any thread."""
        self._events.extend(events)
        os.eventfd_write(self._wake, 1)

    def fileno(self) -> int:
        """The eventfd that is readable while events are queued."""
        return self._wake

    def take(self) -> list[KvEvent]:
        """All queued events, oldest first."""
        _silence(self._wake)
        return [self._events.popleft() for _ in range(len(self._events))]

    def inventory(self) -> list[KvEvent] | None:
        """None: this source keeps no state."""
        return None

    def close(self) -> None:
        """Closes the eventfd."""
        os.close(self._wake)


class KvEventPublisher:
    """Publishes a source's events until close(). Raises ConfigError when an endpoint cannot be bound.

    endpoint, replay: where to listen, ``tcp://host:port`` (port 0: any) or ``ipc://path``; replay may be "".
        An ``ipc://path`` can be connected to by processes of this user alone.
    token: the cluster token. Only processes that have it can subscribe, and messages are encrypted
        (zmq_curve.py). b"": any process can subscribe, in plain.
    beyond: a second address to listen at, ``tcp://host:0``, at two ports of the system's choice. Then
        ``token`` is required there alone, and ``endpoint`` and ``replay`` are in plain.
    only_followed: while no process subscribes, the events stay in the source, which bounds them. For a source
        that has an inventory.

    far: the endpoints at ``beyond``, for events and for replays, with their ports; "" without it.
    asks_token: whether ``endpoint`` and ``replay`` require the token.
    """

    def __init__(
        self,
        source: KvEventSource,
        endpoint: str,
        *,
        replay: str = "",
        token: bytes = b"",
        topic: str = TOPIC,
        buffer_batches: int = BUFFER_BATCHES,
        first_sequence: int = 0,
        beyond: str = "",
        only_followed: bool = False,
    ) -> None:
        self.published = 0
        self.far = ("", "")
        self._source = source
        self._only_followed = only_followed
        self._rests_until_s = 0.0
        self._subscribed: set[bytes] = set()  # what subscribers ask for, of the prefixes of our topic
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._replay_buffer = ReplayBuffer(buffer_batches, BUFFER_BYTES)
        self._sequence = first_sequence
        self._inventory: tuple[int, list[bytes]] | None = None  # as of that number; for questions at one time
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._authenticator = (
            zmq_curve.authenticate(self._context, zmq_curve.EVENTS, token) if token else None
        )
        self._keys = zmq_curve.ServedEndpoints(zmq_curve.EVENTS, token) if token else None
        near_keys = None if beyond else self._keys
        self.asks_token = near_keys is not None
        self._pub = self._socket(zmq.XPUB, near_keys)
        self._pub.set_hwm(SUBSCRIBER_MESSAGES_MAX)
        self._pub.setsockopt(zmq.MAXMSGSIZE, SUBSCRIPTION_BYTES_MAX)
        self._replays: ReplayServer | None = None
        self._router: zmq.Socket[bytes] | None = None
        try:
            self.endpoint = _bind(self._pub, endpoint, near_keys)
            self.replay = ""
            if replay:
                self._router = self._socket(zmq.ROUTER, near_keys)
                ReplayServer.prepare(self._router)
                self._replays = ReplayServer(self._router, self._topic, self._recall)
                self.replay = _bind(self._router, replay, near_keys)
            if beyond:
                self.far = self._bind_beyond(beyond)
        except BaseException:
            self._end(0)
            os.close(self._stop)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def replays(self) -> int:
        """Replays that were sent to their end."""
        return 0 if self._replays is None else self._replays.answered

    def close(self) -> None:
        """Publishes the events that wait, and ends."""
        if self._thread.is_alive():
            os.eventfd_write(self._stop, 1)
            self._thread.join(_CLOSE_TIMEOUT_S)
            os.close(self._stop)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop, zmq.POLLIN)
        poller.register(self._pub, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        stopping = polls_source = False
        due_ms: int | None = None
        while not stopping:
            wait_ms = _POLL_MS if due_ms is None else due_ms
            rest_ms = self._rest_ms()
            if (self._is_followed and not rest_ms) != polls_source:
                polls_source = not polls_source
                if polls_source:
                    poller.register(self._source.fileno(), zmq.POLLIN)
                else:
                    poller.unregister(self._source.fileno())
            ready = dict(poller.poll(min(wait_ms, rest_ms) if rest_ms else wait_ms))
            stopping = self._stop in ready
            if self._keys is not None:
                self._keys.follow()
            self._hear_subscribers()
            asked = self._replays is not None and self._replays.hear()
            if asked or (self._is_followed and (stopping or not self._rest_ms())):
                self._publish(self._source.take())
            if self._replays is not None:
                due_ms = self._replays.serve()
                if due_ms is None:
                    self._inventory = None
        self._end(1000)

    def _rest_ms(self) -> int:
        """Milliseconds until events are published again; 0: now."""
        return max(0, math.ceil((self._rests_until_s - time.monotonic()) * 1000))

    @property
    def _is_followed(self) -> bool:
        return not self._only_followed or bool(self._subscribed)

    def _hear_subscribers(self) -> None:
        """ZMQ tells of the first subscription to a topic, and of the end of the last one."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_SUBSCRIPTIONS_AT_ONCE):
                frame = self._pub.recv(zmq.NOBLOCK)
                kind, topic = frame[:1], frame[1:]
                if kind == b"\1" and self._topic.startswith(topic):
                    self._subscribed.add(topic)
                elif kind == b"\0":
                    self._subscribed.discard(topic)

    def _bind_beyond(self, address: str) -> tuple[str, str]:
        far = []
        for socket in (self._pub, self._router):
            if socket is not None:
                if self._keys is not None:
                    self._keys.prepare(socket)
                far.append(_bind(socket, address, self._keys))
        return far[0], far[1] if len(far) > 1 else ""

    def _socket(self, kind: int, keys: zmq_curve.ServedEndpoints | None) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        notice_vanished_host(socket, VANISHED_S)
        if keys is not None:
            keys.prepare(socket)
        return socket

    def _end(self, linger_ms: int) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=linger_ms)

    def _publish(self, events: list[KvEvent]) -> None:
        if events and self._only_followed:
            self._rests_until_s = time.monotonic() + _REST_S
        for batch in _batches(events):
            payload = self._packed(batch)
            self._replay_buffer.add(self._sequence, payload)
            self._pub.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
            self._sequence += 1
            self.published += 1

    def _packed(self, events: Sequence[KvEvent]) -> bytes:
        return self._encoder.encode(Batch(time.time(), events))

    def _recall(self, start: int) -> Iterator[Message]:
        """The replay for a caller that has everything before ``start``, as of now."""
        oldest = self._replay_buffer.oldest(self._sequence)
        messages = self._replay_buffer.since(start)
        inventory: list[bytes] = []
        if start < oldest:
            # Under the number before the oldest: the messages that follow lead to the present.
            inventory = self._packed_inventory(oldest)
        return chain(((oldest - 1, payload) for payload in inventory), messages)

    def _packed_inventory(self, oldest: int) -> list[bytes]:
        """One inventory for all clients that ask within a short time: an older one serves as well while the
        buffer still has all events since."""
        if self._inventory is None or self._inventory[0] < oldest:
            made = self._source.inventory()
            if made is None:
                return []
            self._inventory = (self._sequence, [self._packed(batch) for batch in _batches(made)])
        return self._inventory[1]


def _batches(events: Sequence[KvEvent]) -> Iterator[list[KvEvent]]:
    """Pieces that make messages of a bounded size."""
    batch: list[KvEvent] = []
    blocks = 0
    for event in events:
        more = len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 0
        if batch and (len(batch) >= BATCH_EVENTS_MAX or blocks + more > MESSAGE_BLOCKS_MAX):
            yield batch
            batch, blocks = [], 0
        batch.append(event)
        blocks += more
    if batch:
        yield batch


def _bind(socket: zmq.Socket[bytes], endpoint: str, keys: zmq_curve.ServedEndpoints | None) -> str:
    """The endpoint with its real port. keys: what it is served under; None: in plain.

    The socket file of ipc:// is this user's alone from its first moment on; the mask is the process's, so
    this is for the start."""
    socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
    mask = os.umask(0o177) if endpoint.startswith("ipc://") else None
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"KV events cannot be published at {endpoint!r} ({error}); give tcp://host:port or ipc://path",
            operation="events",
            cause=error,
        ) from error
    finally:
        if mask is not None:
            os.umask(mask)
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if keys is not None:
        keys.add(socket, bound)
    return bound


def _silence(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(fd)
