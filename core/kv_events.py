"""KV events in vLLM's form, and their publisher: docs/events.md specifies frames and fields.

    events -> Publisher (a thread) -> PUB frames [topic, sequence, batch]
                                      ROUTER: what was missed, from a sequence number on

Nodes tell with it what they hold, mock engines what they compute. Late subscribers and those with a gap ask
the ROUTER; what its buffer has lost is replaced by an inventory when the source can make one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
import zmq

from moonpool.core.errors import ConfigError

TOPIC = "kv"
END_OF_REPLAY = b"\xff" * 8
BUFFER_BATCHES = 10_000
QUEUE_BATCHES_MAX = 100_000
BATCH_EVENTS_MAX = 512
BATCH_BLOCKS_MAX = 1024  # of one event
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


class Source(Protocol):
    """Where a publisher gets its events, on its own thread."""

    def fileno(self) -> int:
        """Readable when there are events; take() makes it silent again."""

    def take(self) -> list[KvEvent]:
        """What happened since the last call."""

    def inventory(self) -> list[KvEvent] | None:
        """All that is there now, to begin with; None: the source does not know."""


class QueueSource:
    """A source that any thread adds to. Bounded: beyond QUEUE_BATCHES_MAX events the oldest are lost."""

    def __init__(self) -> None:
        self._events: deque[KvEvent] = deque(maxlen=QUEUE_BATCHES_MAX)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def add(self, events: Sequence[KvEvent]) -> None:
        self._events.extend(events)
        os.eventfd_write(self._wake, 1)

    def fileno(self) -> int:
        return self._wake

    def take(self) -> list[KvEvent]:
        _silence(self._wake)
        return [self._events.popleft() for _ in range(len(self._events))]

    def inventory(self) -> list[KvEvent] | None:
        return None

    def close(self) -> None:
        os.close(self._wake)


class Publisher:
    """Publishes a source's events until close(). Raises ConfigError when an endpoint cannot be bound.

    endpoint, replay: where to listen, ``tcp://host:port`` (port 0: any) or ``ipc://path``; replay may be "".
    """

    def __init__(
        self,
        source: Source,
        endpoint: str,
        *,
        replay: str = "",
        topic: str = TOPIC,
        buffer_batches: int = BUFFER_BATCHES,
        first_sequence: int = 0,
    ) -> None:
        self.published = 0
        self.replays = 0
        self._source = source
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._sequence = first_sequence
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(QUEUE_BATCHES_MAX)
        self._router = self._context.socket(zmq.ROUTER) if replay else None
        if self._router is not None:
            self._router.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops beyond it, and nobody could notice
        try:
            self.endpoint = _bind(self._pub, endpoint)
            self.replay = _bind(self._router, replay) if self._router else ""
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._stop)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publishes what is waiting, and ends."""
        if self._thread.is_alive():
            os.eventfd_write(self._stop, 1)
            self._thread.join(_CLOSE_TIMEOUT_S)
            os.close(self._stop)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._source.fileno(), zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        stopping = False
        while not stopping:
            ready = dict(poller.poll(_POLL_MS))
            stopping = self._stop in ready
            self._publish(self._source.take())
            if self._router is not None and self._router in ready:
                self._answer(self._router)
        self._context.destroy(linger=1000)

    def _publish(self, events: list[KvEvent]) -> None:
        for start in range(0, len(events), BATCH_EVENTS_MAX):
            payload = self._packed(events[start : start + BATCH_EVENTS_MAX])
            self._buffer.append((self._sequence, payload))
            self._pub.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
            self._sequence += 1
            self.published += 1

    def _packed(self, events: Sequence[KvEvent]) -> bytes:
        return self._encoder.encode(Batch(time.time(), events))

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        self.replays += 1
        caller, start = frames[0], int.from_bytes(frames[2], "big")
        oldest = self._buffer[0][0] if self._buffer else self._sequence
        if start < oldest and (inventory := self._source.inventory()) is not None:
            # Under the number before the oldest: what follows is told again and ends in the present.
            for at in range(0, len(inventory), BATCH_EVENTS_MAX):
                payload = self._packed(inventory[at : at + BATCH_EVENTS_MAX])
                self._send(router, caller, oldest - 1, payload)
        for sequence, payload in list(self._buffer):
            if sequence >= start:
                self._send(router, caller, sequence, payload)
        router.send_multipart((caller, b"", b"", END_OF_REPLAY, b""))

    def _send(self, router: zmq.Socket[bytes], caller: bytes, sequence: int, payload: bytes) -> None:
        router.send_multipart((caller, b"", self._topic, sequence.to_bytes(8, "big"), payload))


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """The endpoint with its real port."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"KV events cannot be published at {endpoint!r} ({error}); give tcp://host:port or ipc://path",
            operation="events",
            cause=error,
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _silence(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(fd)
