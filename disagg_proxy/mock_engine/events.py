"""KV events over ZMQ in vLLM's format: PUB [topic, sequence u64 big-endian, msgpack batch], and a ROUTER that
replays. The format: docs/events.md."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from moonpool.core.errors import ConfigError

REPLAY_BATCHES = 10_000
_END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """endpoint, replay: ``tcp://host:port`` each; replay may be "". On the running loop."""

    def __init__(self, endpoint: str, replay: str = "", *, topic: str = "kv") -> None:
        """Raises ConfigError for an address that is not to be had."""
        import zmq
        import zmq.asyncio

        self._topic = topic.encode()
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._context = zmq.asyncio.Context()
        self._sockets: list[Any] = []
        self._publisher = self._bind(zmq.PUB, endpoint)
        self._task: asyncio.Task[None] | None = None
        if replay:
            self._task = asyncio.get_running_loop().create_task(self._replay(self._bind(zmq.ROUTER, replay)))

    def publish(self, events: Sequence[dict[str, object]]) -> None:
        """One batch."""
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        sequence = self._sequence
        self._sequence += 1
        self._kept.append((sequence, payload))
        self._publisher.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])

    @property
    def endpoints(self) -> list[str]:
        """Where it publishes and, if it does, replays, with the real ports."""
        import zmq

        return [socket.getsockopt(zmq.LAST_ENDPOINT).decode() for socket in self._sockets]

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    def _bind(self, kind: int, endpoint: str) -> Any:
        import zmq

        socket = self._context.socket(kind)
        self._sockets.append(socket)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot publish events at {endpoint}: {error}", operation="start") from error
        return socket

    async def _replay(self, router: Any) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            peer, empty, start = frames[0], b"", int.from_bytes(frames[2], "big")
            for sequence, payload in list(self._kept):
                if sequence >= start:
                    await router.send_multipart(
                        [peer, empty, self._topic, sequence.to_bytes(8, "big"), payload]
                    )
            await router.send_multipart([peer, empty, self._topic, _END, b""])


def stored(hashes: list[int], parent: int | None, tokens: list[int], block_tokens: int) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": block_tokens,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def removed(hashes: list[int]) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
