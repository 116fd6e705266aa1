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
        self._left = len(self._free)

    @property
    def free(self) -> int:
        """The number of holders that no stream has."""
        return len(self._free)

    def part(self, most: int) -> SubscribedStreams:
        """The same holders, of which this part takes at most ``most`` at once."""
        made = SubscribedStreams(self._subscriber, 0, 0)
        made._free, made._left = self._free, most
        return made

    def follow(self, name: str, source: EventSource) -> int | None:
        """Follows a stream; its holder, None when there is no subscriber or no free holder."""
        if self._subscriber is None or not self._free or not self._left:
            return None
        self._left -= 1
        holder = self._free.pop()
        self._subscriber.follow(source, holder)
        return holder

    def drop(self, name: str, holder: int) -> None:
        """Stops following and frees the holder. The subscriber carries out orders in sequence, so the blocks
        of this stream are removed before the next one gets the holder."""
        if self._subscriber is not None:
            self._subscriber.drop(name, holder)
        self._free.append(holder)
        self._left += 1
