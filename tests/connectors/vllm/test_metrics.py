"""Counts on their way: tallied by the halves, summed by vLLM, observed by Prometheus."""

from __future__ import annotations

from typing import Any

import prometheus_client
import pytest

from moonpool.connectors.vllm.metrics import COUNTERS, HISTOGRAMS, ConnectorProm, Stats, Tally


def test_a_tally_is_taken_once() -> None:
    tally = Tally()
    assert tally.take() is None
    tally.add("loads")
    tally.add("loads", 2)
    tally.add("load_errors", 0)
    tally.observe("load_seconds", 0.5)
    stats = tally.take()
    assert stats is not None
    assert stats.data == {"loads": 3, "load_seconds": [0.5]}
    assert tally.take() is None


def test_stats_of_ranks_are_summed() -> None:
    first, second = (
        Stats({"loads": 1, "load_seconds": [0.5]}),
        Stats({"loads": 2, "saves": 1, "load_seconds": [1.5]}),
    )
    kept = second.data["load_seconds"]
    total = first.aggregate(second)
    assert total.data == {"loads": 3, "saves": 1, "load_seconds": [0.5, 1.5]}
    assert kept == [1.5]
    assert total.reduce() == {"loads": 3, "saves": 1, "load_mean_ms": 1000.0}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()

    def counter(**fields: Any) -> Any:
        return prometheus_client.Counter(registry=registry, **fields)

    def histogram(**fields: Any) -> Any:
        return prometheus_client.Histogram(registry=registry, **fields)

    monkeypatch.setattr(ConnectorProm, "_counter_cls", staticmethod(counter), raising=False)
    monkeypatch.setattr(ConnectorProm, "_histogram_cls", staticmethod(histogram), raising=False)
    prom = ConnectorProm(None, {}, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    prom.observe({"loaded_tokens": 64, "load_seconds": [0.001, 0.01], "of_a_later_version": 1}, 1)
    prom.observe({"loaded_tokens": 32, "memory_loaded_bytes": 1 << 20, "memory_load_seconds": 0.25}, 1)
    prom.observe({"memory_load_seconds": 0.5, "network_loaded_bytes": 7}, 1)
    prom.observe({"load_decisions_load_slower": 2, "load_decisions_of_a_later_version": 1}, 1)

    labels = {"model_name": "m", "engine": "1"}
    assert registry.get_sample_value("moonpool_connector_loaded_tokens_total", labels) == 96
    assert registry.get_sample_value("moonpool_connector_load_seconds_count", labels) == 2
    assert registry.get_sample_value("moonpool_connector_memory_load_seconds_total", labels) == 0.75
    assert registry.get_sample_value("moonpool_connector_memory_loaded_bytes_total", labels) == 1 << 20
    assert registry.get_sample_value("moonpool_connector_network_loaded_bytes_total", labels) == 7
    assert registry.get_sample_value("moonpool_connector_loaded_tokens_total", labels | {"engine": "0"}) == 0
    decisions = "moonpool_connector_load_decisions_total"
    assert registry.get_sample_value(decisions, labels | {"reason": "load_slower"}) == 2
    assert registry.get_sample_value(decisions, labels | {"reason": "load_faster"}) == 0


def test_names() -> None:
    assert all(not name.endswith("_total") for name in COUNTERS)  # Prometheus adds it
    assert all(name.endswith("_seconds") for name in HISTOGRAMS)
