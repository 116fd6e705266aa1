"""The connector's counts and latencies, on their way from both halves to the engine's own /metrics.

A half adds to its Tally and hands it over when something was added; vLLM carries the dictionary to the
front-end, sums the ranks' and the scheduler's, and lets ``ConnectorProm`` observe it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias, cast

from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.load_decision import REASONS
from moonpool.connectors.vllm.requests.switches import OFF

PREFIX = "moonpool_connector_"
SECONDS_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip

COUNTERS: Mapping[str, str] = {
    "requests": "Requests that could use the pool.",
    "prompt_tokens": "Prompt tokens of those requests, counted when they are first admitted.",
    "local_tokens": "Of those, tokens found in the engine's own prefix cache.",
    "lookups": "Longest-prefix queries that were answered.",
    "lookups_unknown": "Longest-prefix queries without an answer in time; they count as a miss.",
    "hit_tokens": "Tokens that the pool pinned for a request, whether they were needed or not.",
    "loads": "Loads that ended, well or badly.",
    "loaded_tokens": "Tokens whose blocks were loaded from the pool without an error.",
    "met_tokens": "Of those, tokens of hits whose front was computed meanwhile, and that were used.",
    "loaded_bytes": "Bytes that were loaded from the pool, over all ranks.",
    "memory_loaded_bytes": "Bytes of loads that memory of this host served alone, over all ranks.",
    "memory_load_seconds": "Seconds that native threads took for them, over all ranks.",
    "network_loaded_bytes": "Bytes of loads that needed another host, over all ranks.",
    "network_load_seconds": "Seconds that native threads took for them, over all ranks.",
    "timed_prefill_tokens": "Prompt tokens of the steps that were timed.",
    "timed_prefill_seconds": "Seconds that these steps took.",
    "declined_tokens": "Tokens found in the pool and computed: their load was predicted to take longer.",
    "load_errors": "Blocks that were pinned but not loaded; the engine recomputes them.",
    "saves": "Save jobs that ended, over all ranks.",
    "saved_bytes": "Bytes that were stored in the pool.",
    "saved_objects": "Objects that were stored in the pool.",
    "existing_objects": "Objects that were in the pool already when they were to be stored.",
    "refused_objects": "Objects that the pool did not take, or that could not be sent to it.",
    "unsaved_blocks": "Blocks that were not offered because too many were waiting to be saved.",
    "handovers": "Hand-overs from a prefill engine that ended, well or badly.",
    "handed_over_tokens": "Prompt tokens whose KV was handed over by a prefill engine without an error.",
    "handed_over_bytes": "Bytes that were read from prefill engines, over all ranks.",
    "handover_errors": "Hand-overs of which something did not come; the engine computes that.",
    "handover_refused": "Requests whose kv_transfer_params could not be used; the engine computes them.",
    "neighbour_asks": "Requests for which another engine was asked for blocks of its own cache.",
    "neighbour_unanswered": "Of those, asks without an answer in time.",
    "neighbour_tokens": "Prompt tokens whose KV came from another engine's own cache without an error.",
    "neighbour_bytes": "Bytes that were read from other engines' own caches, over all ranks.",
    "neighbour_errors": "Loads from another engine's own cache of which something did not come.",
    "neighbour_offers": "Asks of other engines to which this one offered blocks of its own cache.",
    "neighbour_offered_tokens": "Tokens of those blocks.",
    "neighbour_refused": "Asks of other engines of whose blocks this one offered none.",
    "leases": "Prefilled requests whose blocks were kept for a decode engine.",
    "leases_expired": "Of those, requests that no decode engine took in time.",
    "survived_errors": "Unexpected exceptions in the connector that the engine was kept safe from.",
}
HISTOGRAMS: Mapping[str, str] = {
    "lookup_seconds": "From a longest-prefix query until its answer is seen.",
    "load_seconds": "From the start of a load until its end is seen.",
    "handover_seconds": "From the start of a hand-over, when there is room, until its end is seen.",
    "save_seconds": "From the start of a save until its end is seen.",
}

# Counters with one label more, and its values: they are tallied as "name_value".
LABELLED: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "load_decisions": ("reason", REASONS, "Prompts whose prefix the pool had, by what was decided of it."),
    "switched_off": ("switch", OFF, "Requests for which the proxy switched this use of the pool off."),
}

Data: TypeAlias = "dict[str, float | list[float]]"


class Tally:
    """What one half has counted since it was last asked."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data: Data = {}

    def __bool__(self) -> bool:
        """Whether anything was counted."""
        return bool(self._data)

    def add(self, counter: str, amount: float = 1) -> None:
        """Adds to one of COUNTERS or LABELLED."""
        if amount:
            self._data[counter] = cast(float, self._data.get(counter, 0)) + amount

    def observe(self, histogram: str, seconds: float) -> None:
        """Adds one value to one of HISTOGRAMS."""
        cast("list[float]", self._data.setdefault(histogram, [])).append(seconds)

    def merge(self, data: Data) -> None:
        """Adds what another tally has counted."""
        counts = cast("dict[str, Any]", self._data)
        for name, value in data.items():
            counts[name] = counts[name] + value if name in counts else value

    def take(self) -> Stats | None:
        """The counts since the last call, or None without any."""
        if not self._data:
            return None
        data, self._data = self._data, {}
        return Stats(data=dict(data))


class Stats(compat.ConnectorStats):
    """One step's counts. ``data``: counter -> int, histogram -> list of seconds."""

    def reset(self) -> None:
        """Forgets all counts."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: compat.ConnectorStats) -> Stats:
        """The counts of two ranks, or of two moments, as one. New lists, so that those of
        the two do not grow."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM writes into its log every ten seconds: totals, and means in milliseconds."""
        reduced: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, list):
                mean_ms = 1000 * sum(value) / len(value)
                reduced[f"{name.removesuffix('_seconds')}_mean_ms"] = round(mean_ms, 3)
            else:
                reduced[name] = round(value, 6)
        return reduced


class ConnectorProm(compat.PromMetrics):
    """moonpool_connector_* in the engine's /metrics, with vLLM's labels (model_name, engine)."""

    prefix: ClassVar[str] = PREFIX
    counters: ClassVar[Mapping[str, str]] = COUNTERS
    labelled: ClassVar[Mapping[str, tuple[str, tuple[str, ...], str]]] = LABELLED
    histograms: ClassVar[Mapping[str, str]] = HISTOGRAMS

    def __init__(self, config: Any, types: Any, labelnames: list[str], values: Any) -> None:
        super().__init__(config, types, labelnames, values)
        self._counters = {
            name: self._per_engine(
                self._counter_cls(name=self.prefix + name, documentation=text, labelnames=labelnames)
            )
            for name, text in self.counters.items()
        }
        for name, (label, values_of, text) in self.labelled.items():
            counter = self._counter_cls(
                name=self.prefix + name, documentation=text, labelnames=[*labelnames, label]
            )
            for value in values_of:
                self._counters[f"{name}_{value}"] = self._per_engine(counter, value)
        self._histograms = {
            name: self._per_engine(
                self._histogram_cls(
                    name=self.prefix + name,
                    documentation=text,
                    buckets=SECONDS_BUCKETS,
                    labelnames=labelnames,
                )
            )
            for name, text in self.histograms.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one step's data. Names that this version does not know are left out."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._histograms:
                metric = self._histograms[name][engine_idx]
                for seconds in value:
                    metric.observe(seconds)

    def _per_engine(self, metric: Any, *more: str) -> dict[int, Any]:
        return {
            engine: metric.labels(*values, *more) for engine, values in self.per_engine_labelvalues.items()
        }
