"""Prometheus metrics of the relay: counts and latencies, built at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from moonpool.disagg_proxy.data_plane.counters import Counters, EngineCounters
from moonpool.disagg_proxy.metric_family import Values, family, family_of_each, histograms

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()


def proxy_families(counters: Counters) -> Iterator[Metric]:
    """All counters of the relay."""
    engines = _by_name(counters.engines)
    yield from _proxy_families(counters)
    yield from _engine_families(engines)
    text = "From a whole request to the answer's first byte"
    first_byte = {name: engine.first_byte for name, engine in engines.items()}
    yield histograms("time_to_first_byte_seconds", text, first_byte, "engine")
    text = "From a whole request to the answer's last byte"
    whole = {name: engine.whole for name, engine in engines.items()}
    yield histograms("request_seconds", text, whole, "engine")
    text = "From asking a prefill engine to its answer"
    prefill = {name: engine.prefill for name, engine in engines.items()}
    yield histograms("prefill_seconds", text, prefill, "engine")


class Collected(Collector):
    """A collector of given families."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The given families."""
        return iter(self._families)


def exposition(families: Sequence[Metric]) -> bytes:
    """The text that Prometheus scrapes."""
    return generate_latest(Collected(families))


def _by_name(engines: Sequence[EngineCounters]) -> dict[str, EngineCounters]:
    """One engine for each name: of a leaving engine and its successor, the successor."""
    shown: dict[str, EngineCounters] = {}
    for engine in engines:
        if not engine.leaving or engine.name not in shown:
            shown[engine.name] = engine
    return shown


def _proxy_families(counters: Counters) -> Iterator[Metric]:
    yield family("client_connections", "Open connections of clients", counters.client_connections)
    yield family("held_body_bytes", "Bytes of request bodies that are held now", counters.held_body_bytes)
    text = "Bytes of answers that clients have not taken, and of requests that were read ahead"
    yield family("unread_bytes", text, counters.unread_bytes)
    yield family("accepted_connections_total", "Connections accepted from clients", counters.accepted)
    text = "Requests and connections refused by the proxy itself"
    yield family("rejected_total", text, _sorted(counters.rejected), "reason")
    text = "What clients may not say to engines and was left out of requests"
    yield family("reserved_dropped_total", text, _sorted(counters.reserved), "kind")
    text = "Decisions for which the policy raised an error"
    yield family("policy_errors_total", text, counters.policy_errors)
    text = "Records that were dropped because they were not fetched in time"
    yield family("observations_dropped_total", text, counters.observations_dropped)
    text = "Lines that could not be written in time"
    yield family("access_log_dropped_total", text, counters.log_lines_dropped)


def _engine_families(engines: Mapping[str, EngineCounters]) -> Iterator[Metric]:
    def of_each(
        name: str, text: str, value: Callable[[EngineCounters], float | Values], *labels: str
    ) -> Metric:
        return family_of_each(name, text, engines, value, "engine", *labels)

    yield of_each("requests_total", "Answers relayed to clients", _status_classes, "status_class")
    text = "Requests that an engine failed"
    yield of_each(
        "upstream_errors_total", text, lambda each: dict(sorted(each.failures.items())), "stage", "reason"
    )
    text = "Clients that left before the end"
    yield of_each("client_disconnects_total", text, lambda each: _sorted(each.disconnects), "stage")
    text = "Prefills for another engine"
    yield of_each("prefills_total", text, lambda each: _sorted(each.prefills), "outcome")
    text = "Requests sent elsewhere after this engine failed them"
    yield of_each("retries_total", text, lambda each: each.retries)
    yield of_each("relayed_bytes_total", "Body bytes of answers", lambda each: each.relayed_bytes)
    yield of_each("requests_in_flight", "Requests at this engine", lambda each: each.in_flight)
    text = "1 while the engine answers its health checks"
    yield of_each("engine_healthy", text, lambda each: each.healthy)
    text = "1 while the engine rests after failures"
    yield of_each("engine_breaker_open", text, lambda each: not each.breaker_closed)
    text = "Open connections to this engine"
    yield of_each("upstream_connections", text, lambda each: each.connections)


def _status_classes(engine: EngineCounters) -> Values:
    return {(f"{digit}xx",): count for digit, count in enumerate(engine.answers) if count}


def _sorted(counts: Mapping[str, int]) -> Values:
    return {(label,): count for label, count in sorted(counts.items())}
