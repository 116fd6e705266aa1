"""The KV events of a mock engine: vLLM's form, sent by the project's publisher (docs/events.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonpool.core.service.kv_event_publisher import (
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventPublisher,
    QueuedEventSource,
)

_MEDIUM = "GPU"


class EngineEvents:
    """endpoint, replay: ``tcp://host:port`` each; replay may be "". Raises ConfigError for an address that
    cannot be bound."""

    def __init__(self, endpoint: str, replay: str = "") -> None:
        self._source = QueuedEventSource()
        try:
            self._publisher = KvEventPublisher(self._source, endpoint, replay=replay)
        except BaseException:
            self._source.close()
            raise

    @property
    def endpoints(self) -> list[str]:
        """The endpoint and, if there is one, the replay endpoint, with their real ports."""
        return [where for where in (self._publisher.endpoint, self._publisher.replay) if where]

    def stored(
        self, digests: Sequence[bytes], places: Sequence[int], ids: np.ndarray, size: int, salt: str
    ) -> None:
        """Blocks at these places of a chain, of ``size`` tokens each, are cached now."""
        self._source.add([_stored(digests, place, ids, size, salt) for place in places])

    def removed(self, digests: Sequence[bytes]) -> None:
        """These blocks left the cache. Queues one event for the publisher's thread."""
        events: list[KvEvent] = [BlockRemoved([_name(digest) for digest in digests], medium=_MEDIUM)]
        self._source.add(events)

    def close(self) -> None:
        """Publishes the events that wait. Blocks for up to a second."""
        self._publisher.close()
        self._source.close()


def _stored(digests: Sequence[bytes], place: int, ids: np.ndarray, size: int, salt: str) -> KvEvent:
    parent = _name(digests[place - 1]) if place else None
    tokens = ids[place * size : (place + 1) * size].tolist()
    extras: list[tuple[object, ...] | None] | None = None
    if salt and not place:  # the beginning of a chain, in vLLM's form
        extras = [(salt,)]
    return BlockStored([_name(digests[place])], parent, tokens, size, medium=_MEDIUM, extra_keys=extras)


def _name(digest: bytes) -> int:
    """The 64-bit form in which vLLM publishes hashes by default."""
    return int.from_bytes(digest[:8], "big")
