"""Prometheus metrics of the relay: counts and latencies, built at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from moonpool.disagg_proxy.data_plane.counters import BOUNDS_S, Counters, EngineCounters, Histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()


def buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative (upper bound, count) pairs up to +Inf."""
    total, rows = 0, []
    for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), histogram[0], strict=True):
        total += count
        rows.append((bound, float(total)))
    return rows


def proxy_families(counters: Counters) -> Iterator[Metric]:
    """All counters of the relay."""
    engines = _by_name(counters.engines)
    yield from _proxy_families(counters)
    yield from _engine_counters(engines)
    yield from _engine_gauges(engines)
    yield _histogram("time_to_first_byte", "From a whole request to the answer's first byte", engines)
    yield _histogram("request", "From a whole request to the answer's last byte", engines)
    yield _histogram("prefill", "From asking a prefill engine to its answer", engines)


class Collected(Collector):
    """A collector of given families."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The given families."""
        return iter(self._families)


def exposition(families: Sequence[Metric]) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected(families))
    return generate_latest(registry)


def _by_name(engines: Sequence[EngineCounters]) -> list[EngineCounters]:
    """One engine for each name: of a leaving engine and its successor, the successor."""
    shown: dict[str, EngineCounters] = {}
    for engine in engines:
        if not engine.leaving or engine.name not in shown:
            shown[engine.name] = engine
    return list(shown.values())


def _proxy_families(gauges: Counters) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "moonpool_proxy_client_connections", "Open connections of clients", gauges.client_connections
    )
    yield GaugeMetricFamily(
        "moonpool_proxy_held_body_bytes", "Bytes of request bodies that are held now", gauges.held_body_bytes
    )
    yield GaugeMetricFamily(
        "moonpool_proxy_unread_bytes",
        "Bytes of answers that clients have not taken, and of requests that were read ahead",
        gauges.unread_bytes,
    )
    yield CounterMetricFamily(
        "moonpool_proxy_accepted_connections", "Connections accepted from clients", gauges.accepted
    )
    rejected = CounterMetricFamily(
        "moonpool_proxy_rejected", "Requests and connections refused by the proxy itself", labels=("reason",)
    )
    for reason, count in sorted(gauges.rejected.items()):
        rejected.add_metric((reason,), count)
    yield rejected
    reserved = CounterMetricFamily(
        "moonpool_proxy_reserved_dropped",
        "What clients may not say to engines and was left out of requests",
        labels=("kind",),
    )
    for kind, count in sorted(gauges.reserved.items()):
        reserved.add_metric((kind,), count)
    yield reserved
    for name, text, count in (
        ("policy_errors", "Decisions for which the policy raised an error", gauges.policy_errors),
        (
            "observations_dropped",
            "Records that were dropped because they were not fetched in time",
            gauges.observations_dropped,
        ),
        ("access_log_dropped", "Lines that could not be written in time", gauges.log_lines_dropped),
    ):
        yield CounterMetricFamily(f"moonpool_proxy_{name}", text, count)


def _engine_counters(engines: Sequence[EngineCounters]) -> Iterator[Metric]:
    answers = CounterMetricFamily(
        "moonpool_proxy_requests", "Answers relayed to clients", labels=("engine", "status_class")
    )
    failures = CounterMetricFamily(
        "moonpool_proxy_upstream_errors",
        "Requests that an engine failed",
        labels=("engine", "stage", "reason"),
    )
    disconnects = CounterMetricFamily(
        "moonpool_proxy_client_disconnects", "Clients that left before the end", labels=("engine", "stage")
    )
    prefills = CounterMetricFamily(
        "moonpool_proxy_prefills", "Prefills for another engine", labels=("engine", "outcome")
    )
    retries = CounterMetricFamily(
        "moonpool_proxy_retries", "Requests sent elsewhere after this engine failed them", labels=("engine",)
    )
    relayed = CounterMetricFamily("moonpool_proxy_relayed_bytes", "Body bytes of answers", labels=("engine",))
    for engine in engines:
        for digit, count in enumerate(engine.answers):
            if count:
                answers.add_metric((engine.name, f"{digit}xx"), count)
        for (stage, reason), count in sorted(engine.failures.items()):
            failures.add_metric((engine.name, stage, reason), count)
        for stage, count in sorted(engine.disconnects.items()):
            disconnects.add_metric((engine.name, stage), count)
        for outcome, count in sorted(engine.prefills.items()):
            prefills.add_metric((engine.name, outcome), count)
        retries.add_metric((engine.name,), engine.retries)
        relayed.add_metric((engine.name,), engine.relayed_bytes)
    yield from (answers, failures, disconnects, prefills, retries, relayed)


def _engine_gauges(engines: Sequence[EngineCounters]) -> Iterator[Metric]:
    rows: tuple[tuple[str, str, Callable[[EngineCounters], float]], ...] = (
        ("requests_in_flight", "Requests at this engine", lambda engine: engine.in_flight),
        ("engine_healthy", "1 while the engine answers its health checks", lambda engine: engine.healthy),
        (
            "engine_breaker_open",
            "1 while the engine rests after failures",
            lambda engine: not engine.breaker_closed,
        ),
        ("upstream_connections", "Open connections to this engine", lambda engine: engine.connections),
    )
    for name, text, value in rows:
        family = GaugeMetricFamily(f"moonpool_proxy_{name}", text, labels=("engine",))
        for engine in engines:
            family.add_metric((engine.name,), float(value(engine)))
        yield family


def _histogram(name: str, text: str, engines: Sequence[EngineCounters]) -> Metric:
    family = HistogramMetricFamily(f"moonpool_proxy_{name}_seconds", text, labels=("engine",))
    for engine in engines:
        histogram = {
            "time_to_first_byte": engine.first_byte,
            "request": engine.whole,
            "prefill": engine.prefill,
        }[name]
        family.add_metric((engine.name,), buckets=buckets(histogram), sum_value=histogram[1])
    return family
