"""Prometheus metrics of prompts and queues, as on the page."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moonpool.disagg_proxy.metric_family import Values, family, family_of_each
from moonpool.disagg_proxy.ui.snapshot import SnapshotBuilder


class PromptCollector(Collector):
    """Metrics of prompts: tokens by where they came from, TTFT, load of engines."""

    def __init__(self, data: SnapshotBuilder) -> None:
        self._data = data

    def collect(self) -> Iterator[Metric]:
        """Metric families, as of now."""
        loads, total = self._data.loads(), self._data.total()
        sources: Values = {
            ("own",): total.own,
            ("pool",): total.pool,
            ("computed",): total.tokens - total.own - total.pool,
        }
        text = "Tokens of prompts that have ended, by where they were taken to lie: own, pool, computed"
        yield family("prompt_tokens_total", text, sources, "source")
        text = "Tokens of prompts of which the engine said how many it had"
        yield family("engine_prompt_tokens_told_total", text, total.told)
        yield family("engine_prompt_tokens_cached_total", "Those of them that it had", total.cached)
        text = "Predicted work of the prefills in line"
        yield family_of_each("books_wait_seconds", text, loads, lambda row: row.wait_s, "engine")
        text = "Requests that are taken to decode"
        yield family_of_each("books_decodes", text, loads, lambda row: row.decoding, "engine")
