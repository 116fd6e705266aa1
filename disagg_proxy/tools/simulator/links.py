"""The network between simulated instances: each has one link, of the same bandwidth in and out."""

from __future__ import annotations


class Links:
    """Transfers take their turn at the sender and at the receiver: one that finds either busy waits for it.
    So two that share a link take as long together as they would share it fairly; the first is done sooner.
    A sender that waits for a busy receiver sends to no other meanwhile, which fair sharing would let it:
    where links are the bottleneck, transfers are told slower than they are."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._out_free_s: list[float] = []
        self._in_free_s: list[float] = []
        self.sent_bytes = 0

    def add(self) -> None:
        """One more place."""
        self._out_free_s.append(0.0)
        self._in_free_s.append(0.0)

    def send(self, source: int, target: int, size: int, now_s: float) -> float:
        """Returns when the last byte is there."""
        begin_s = max(now_s, self._out_free_s[source], self._in_free_s[target])
        end_s = begin_s + size / self._bytes_s
        self._out_free_s[source] = self._in_free_s[target] = end_s
        self.sent_bytes += size
        return end_s
