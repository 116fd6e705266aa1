"""The network between simulated instances: each has one link, of the same bandwidth in and out."""

from __future__ import annotations


class Links:
    """A transfer takes its turn at the sender and at the receiver: it waits until both are free. So two
    transfers that share a link take as long together as with fair sharing; the first one ends sooner. A
    sender that waits for a busy receiver sends to no other one meanwhile, which fair sharing would allow:
    where links are the bottleneck, simulated transfers are slower than real ones."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._out_free_s: list[float] = []
        self._in_free_s: list[float] = []
        self.sent_bytes = 0

    def add(self) -> None:
        """Adds a place."""
        self._out_free_s.append(0.0)
        self._in_free_s.append(0.0)

    def send(self, source: int, target: int, size: int, now_s: float) -> float:
        """Returns the time at which the last byte arrives."""
        begin_s = max(now_s, self._out_free_s[source], self._in_free_s[target])
        end_s = begin_s + size / self._bytes_s
        self._out_free_s[source] = self._in_free_s[target] = end_s
        self.sent_bytes += size
        return end_s
