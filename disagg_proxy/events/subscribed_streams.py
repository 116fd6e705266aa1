"""Places in the prefix indexes for event streams that belong to no engine: nodes of the pool that were found,
and publishers that registered. Runs on the event loop."""

from __future__ import annotations

from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.events.subscriber import Subscriber


class SubscribedStreams:
    """Each stream gets a holder index in [first, first + count)."""

    def __init__(self, subscriber: Subscriber | None, first: int, count: int) -> None:
        self._subscriber = subscriber
        self._free = list(range(first, first + max(0, count)))[::-1]

    def follow(self, name: str, source: EventSource) -> int | None:
        """Follows a stream; its holder, None when there is no subscriber or no free holder."""
        if self._subscriber is None or not self._free:
            return None
        holder = self._free.pop()
        self._subscriber.follow(source, holder)
        return holder

    def drop(self, name: str, holder: int) -> None:
        """Stops following and frees the holder. The subscriber carries out orders in sequence, so the blocks
        of this stream are removed before the next one gets the holder."""
        if self._subscriber is not None:
            self._subscriber.drop(name, holder)
        self._free.append(holder)
