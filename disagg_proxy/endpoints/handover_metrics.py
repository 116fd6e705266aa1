"""Prometheus metrics of hand-overs."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moonpool.disagg_proxy.dispatch.handovers import FormStats, Handovers
from moonpool.disagg_proxy.dispatch.neighbours import NeighbourHints
from moonpool.disagg_proxy.metric_family import Values, family, family_of_each, histograms


class HandoverCollector(Collector):
    """Metrics of hand-overs between prefill and decode engines."""

    def __init__(self, handovers: Handovers, neighbours: NeighbourHints) -> None:
        self._handovers = handovers
        self._neighbours = neighbours

    def collect(self) -> Iterator[Metric]:
        """Metric families, as of now; none without a prefill engine or a bootstrap page."""
        engines = [engine for engine in self._handovers.engines if engine is not None]
        if not any(engine.role == "prefill" or engine.bootstrap is not None for engine in engines):
            return
        text = "Requests whose engine was told of another one's own cache"
        yield family("neighbours_named_total", text, self._neighbours.named)
        yield from self._pages()
        if not any(engine.role == "prefill" for engine in engines):
            return
        stats = {form.name.lower(): each for form, each in self._handovers.stats.items()}
        text = "Requests whose decode engine was told where a prefill engine's work lies"
        yield family_of_each("handovers_total", text, stats, _outcomes, "form", "outcome")
        text = "Hand-overs of which nothing arrived, as the decode engine's count of cached tokens says"
        yield family_of_each("handovers_untaken_total", text, stats, lambda each: each.untaken, "form")
        text = "From the end of a prefill to the first token of a stream"
        gaps = {form: each.gap for form, each in stats.items()}
        yield histograms("handover_gap_seconds", text, gaps, "form")
        text = "From asking a prefill engine to the first token of a stream"
        first = {form: each.first_byte for form, each in stats.items()}
        yield histograms("handover_first_byte_seconds", text, first, "form")

    def _pages(self) -> Iterator[Metric]:
        pages = {
            engine.name: engine.bootstrap
            for engine in self._handovers.engines
            if engine is not None and engine.bootstrap is not None and engine.bootstrap_server is None
        }
        text = "1 while the bootstrap page is known"
        yield family_of_each("bootstrap_up", text, pages, lambda page: page.up, "engine")
        text = "Times at which a prefill engine had another id"
        yield family_of_each("bootstrap_restarts_total", text, pages, lambda page: page.restarts, "engine")
        text = "Requests that may have been sent with the id of an engine that was gone: decode computed them"
        yield family_of_each("stale_handovers_total", text, pages, lambda page: page.stale, "engine")


def _outcomes(stats: FormStats) -> Values:
    return {(outcome,): count for outcome, count in sorted(stats.outcomes.items())}
