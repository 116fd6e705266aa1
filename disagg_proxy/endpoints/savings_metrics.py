"""Prometheus metrics of what reuse saved. Sums: a difference of two of them is of that time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moonpool.disagg_proxy.metric_family import family
from moonpool.disagg_proxy.ui.history import Totals

# Name, help, field of Totals.
_FAMILIES = (
    (
        "saved_prompt_tokens_total",
        "Tokens of prompts that were not computed, by the engine's report, else as the proxy assumed",
        "saved",
    ),
    ("priced_prompts_total", "Prompts whose prefill could be predicted; all below is of them", "priced"),
    ("prefill_without_reuse_seconds_total", "Predicted prefill, had all tokens been computed", "whole_s"),
    ("prefill_with_reuse_seconds_total", "Predicted prefill with what was reused", "left_s"),
    ("compared_streams_total", "Those of them that were streams", "compared"),
    ("compared_ttft_seconds_total", "Sum of their times to the first token", "compared_ttft_s"),
    (
        "compared_recomputation_seconds_total",
        "Sum of their predicted prefill, had all tokens been computed",
        "compared_whole_s",
    ),
)


class SavingsCollector(Collector):
    """total: sums since the start, up to now."""

    def __init__(self, total: Callable[[], Totals]) -> None:
        self._total = total

    def collect(self) -> Iterator[Metric]:
        """Metric families, as of now."""
        total = self._total()
        for name, text, field in _FAMILIES:
            yield family(name, text, getattr(total, field))
