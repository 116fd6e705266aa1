"""Prometheus metrics of hand-overs."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.disagg_proxy.dispatch.handovers import Handovers
from moonpool.disagg_proxy.endpoints.relay_metrics import buckets


class HandoverCollector(Collector):
    """Metrics of hand-overs between prefill and decode engines."""

    def __init__(self, handovers: Handovers) -> None:
        self._handovers = handovers

    def collect(self) -> Iterator[Metric]:
        """Metric families, as of now; none without a prefill engine."""
        if not any(engine is not None and engine.role == "prefill" for engine in self._handovers.engines):
            return
        ended = CounterMetricFamily(
            "moonpool_proxy_handovers",
            "Requests whose decode engine was told where a prefill engine's work lies",
            labels=("form", "outcome"),
        )
        untaken = CounterMetricFamily(
            "moonpool_proxy_handovers_untaken",
            "Hand-overs of which nothing arrived, as the decode engine's count of cached tokens says",
            labels=("form",),
        )
        gap = HistogramMetricFamily(
            "moonpool_proxy_handover_gap_seconds",
            "From the end of a prefill to the first token of a stream",
            labels=("form",),
        )
        first = HistogramMetricFamily(
            "moonpool_proxy_handover_first_byte_seconds",
            "From asking a prefill engine to the first token of a stream",
            labels=("form",),
        )
        for form, stats in self._handovers.stats.items():
            label = form.name.lower()
            for outcome, count in sorted(stats.outcomes.items()):
                ended.add_metric((label, outcome), count)
            untaken.add_metric((label,), stats.untaken)
            gap.add_metric((label,), buckets=buckets(stats.gap), sum_value=stats.gap[1])
            first.add_metric((label,), buckets=buckets(stats.first_byte), sum_value=stats.first_byte[1])
        yield from (ended, untaken, gap, first)
        yield from self._pages()

    def _pages(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "moonpool_proxy_bootstrap_up", "1 while the bootstrap page is known", labels=("engine",)
        )
        restarts = CounterMetricFamily(
            "moonpool_proxy_bootstrap_restarts",
            "Times at which a prefill engine had another id",
            labels=("engine",),
        )
        stale = CounterMetricFamily(
            "moonpool_proxy_stale_handovers",
            "Requests that may have been sent with the id of an engine that was gone: decode computed them",
            labels=("engine",),
        )
        for engine in self._handovers.engines:
            if engine is not None and engine.bootstrap is not None and engine.bootstrap_server is None:
                up.add_metric((engine.name,), float(engine.bootstrap.up))
                restarts.add_metric((engine.name,), engine.bootstrap.restarts)
                stale.add_metric((engine.name,), engine.bootstrap.stale)
        yield from (up, restarts, stale)
