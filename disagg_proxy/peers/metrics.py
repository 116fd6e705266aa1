"""Prometheus metrics of the exchange with other proxies."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moonpool.disagg_proxy.metric_family import Values, family
from moonpool.disagg_proxy.peers.peer_sync import PeerSync

_TEXTS = {
    "connected": "Whether the proxy at this address speaks to this one",
    "silent_seconds": "Since it last spoke",
    "lag_seconds": "From its sending to this proxy's receiving, a mean of the last messages",
    "messages_total": "Messages of it",
    "changes_total": "Changes in them: requests sent, prefills and answers begun and ended",
    "states_total": "Whole states among them",
    "missed_total": "Gaps in its messages; each was followed by a whole state",
    "malformed_total": "Messages that could not be read",
}


class PeerCollector(Collector):
    """Metrics of the exchange with other proxies."""

    def __init__(self, peer_sync: PeerSync) -> None:
        self._peer_sync = peer_sync

    def collect(self) -> Iterator[Metric]:
        """Metric families, as of now."""
        stats = self._peer_sync.bus.stats()
        for name, text in _TEXTS.items():
            values: Values = {(where,): row[name] for where, row in stats.items()}
            yield family(f"peer_{name}", text, values, "peer")
        remote_inflight = self._peer_sync.remote_inflight
        yield family("peer_requests", "Requests of other proxies in the books", len(remote_inflight))
        text = (
            "Requests and blocks of other proxies at engines that this one does not know or has elsewhere, "
            "or that cannot be"
        )
        yield family("peer_unknown_total", text, remote_inflight.unknown)
