"""Prometheus metrics of prompts and queues, as on the page."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.disagg_proxy.ui.snapshot import SnapshotBuilder


class PromptCollector(Collector):
    """Metrics of prompts: tokens by where they came from, TTFT, load of engines."""

    def __init__(self, data: SnapshotBuilder) -> None:
        self._data = data

    def collect(self) -> Iterator[Metric]:
        """Metric families, as of now."""
        loads, total = self._data.loads(), self._data.total()
        tokens = CounterMetricFamily(
            "moonpool_proxy_prompt_tokens",
            "Tokens of prompts that have ended, by where they were taken to lie: own, pool, computed",
            labels=("source",),
        )
        for source, count in (
            ("own", total.own),
            ("pool", total.pool),
            ("computed", total.tokens - total.own - total.pool),
        ):
            tokens.add_metric((source,), count)
        yield tokens
        for name, text, count in (
            ("told", "Tokens of prompts of which the engine said how many it had", total.told),
            ("cached", "Those of them that it had", total.cached),
        ):
            yield CounterMetricFamily(f"moonpool_proxy_engine_prompt_tokens_{name}", text, count)
        waits = GaugeMetricFamily(
            "moonpool_proxy_books_wait_seconds", "Predicted work of the prefills in line", labels=("engine",)
        )
        decodes = GaugeMetricFamily(
            "moonpool_proxy_books_decodes", "Requests that are taken to decode", labels=("engine",)
        )
        for name, row in loads.items():
            waits.add_metric((name,), row.wait_s)
            decodes.add_metric((name,), row.decoding)
        yield waits
        yield decodes
