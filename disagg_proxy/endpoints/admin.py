"""The proxy's own endpoints: /health, /metrics, /engines, /ui, and /v1/models once the models are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from prometheus_client.registry import Collector

from moonpool._native import ProxyRequest
from moonpool.core.service.process_metrics import ProcessMetrics
from moonpool.disagg_proxy.api_keys import WANTS_KEY, ApiKeys, KeyCheck
from moonpool.disagg_proxy.audit import ProxyAudit
from moonpool.disagg_proxy.conductor.plan import Answer, error_body
from moonpool.disagg_proxy.data_plane.counters import Counters, EngineCounters
from moonpool.disagg_proxy.discovery.reconciler import Reconciler, SourceStatus
from moonpool.disagg_proxy.discovery.registry_endpoints import RegistryEndpoints
from moonpool.disagg_proxy.dispatch.dispatcher import Dispatcher
from moonpool.disagg_proxy.dispatch.prefix_locator import PrefixLocator
from moonpool.disagg_proxy.endpoints.conductor_metrics import ConductorCollector
from moonpool.disagg_proxy.endpoints.handover_metrics import HandoverCollector
from moonpool.disagg_proxy.endpoints.metrics import MetricsEndpoint
from moonpool.disagg_proxy.endpoints.savings_metrics import SavingsCollector
from moonpool.disagg_proxy.engines.engine import Engine
from moonpool.disagg_proxy.engines.health import merged_models
from moonpool.disagg_proxy.events.stream_watch import PoolStreamRow, StreamRow, StreamWatch
from moonpool.disagg_proxy.events.subscriber import Subscriber
from moonpool.disagg_proxy.metric_family import PREFIX
from moonpool.disagg_proxy.ui.page import data_answer, page_answer
from moonpool.disagg_proxy.ui.snapshot import SnapshotBuilder

_KEYED = (b"/engines", b"/ui/data")


class EngineListing(msgspec.Struct):
    """One engine in GET /engines.

    health:   state of its checks, or leaving: removed, with requests in flight.
    why:      the last failure of its health check; "" while healthy.
    requests: number of answers, and of prefills for other engines.
    events:   state of its KV events (events/stream_watch.py); "": not followed.
    """

    name: str
    url: str
    role: str
    health: str
    why: str
    breaker: str
    in_flight: int
    connections: int
    requests: int
    failures: int
    models: list[str] | None
    events: str = ""


class EnginesPage(msgspec.Struct, omit_defaults=True):
    """GET /engines. discovery: the sources of engines; pool: the event streams of the pool's nodes."""

    policy: str
    engines: list[EngineListing]
    discovery: list[SourceStatus] = []
    pool: list[PoolStreamRow] = []


class HealthPage(msgspec.Struct, omit_defaults=True):
    """GET /health. events: the streams of KV events that are not live."""

    status: str
    engines_healthy: int
    engines: int
    discovery: list[SourceStatus] = []
    events: list[StreamRow] = []


class AdminEndpoints:
    """Runs on the proxy's event loop.

    look:    returns the relay's counters.
    readers: API keys of clients that may see the engines' addresses and failures.
    audit:   is told of keys that are refused.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        locator: PrefixLocator,
        subscriber: Subscriber | None,
        look: Callable[[], Counters],
        policy: str,
        data: SnapshotBuilder,
        more: Sequence[Collector] = (),
        reconciler: Reconciler | None = None,
        registry: RegistryEndpoints | None = None,
        readers: KeyCheck | None = None,
        audit: ProxyAudit | None = None,
        streams: StreamWatch | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._look = look
        collectors: list[Collector] = [
            ProcessMetrics(PREFIX),
            HandoverCollector(dispatcher.handovers, dispatcher.neighbours),
            SavingsCollector(data.total),
        ]
        if dispatcher.uses_tokens:
            collectors.append(ConductorCollector(dispatcher, locator, subscriber, data))
        collectors += more
        if reconciler is not None:
            collectors.append(reconciler)
        self._metrics_endpoint = MetricsEndpoint(look, collectors)
        self._reconciler = reconciler
        self._registry = registry
        self._streams = streams
        self._readers = readers or ApiKeys(())
        self._audit = audit or ProxyAudit()
        self._policy = policy
        self._data = data
        self._page = page_answer()
        self.stopping = False  # /health answers 503

    def answer(self, request: ProxyRequest, reply: Callable[[Answer], None]) -> None:
        """Answers a request to one of the proxy's own paths. reply: called once, on any thread."""
        if self._registry is not None and request.method == b"POST":
            self._registry.answer(request, reply)
        elif request.path in _KEYED and not self._readers.fits(request.headers("authorization")):
            self._audit.key_refused(request)
            reply(WANTS_KEY)
        elif request.path == b"/metrics":
            self._metrics_endpoint.answer(reply)
        else:
            reply(self._answer_at(request.path))

    def close(self) -> None:
        """Stops the threads that make answers; waits for running ones."""
        self._metrics_endpoint.close()
        if self._registry is not None:
            self._registry.close()

    def _answer_at(self, path: bytes) -> Answer:
        if path == b"/engines":
            counters = self._look()
            events = {} if self._streams is None else self._streams.of_engines()
            rows = [
                _row(engine, counts, events.get(engine.place, ""))
                for counts in counters.engines
                if (engine := self._dispatcher.at[counts.place]) is not None
            ]
            pool = [] if self._streams is None else self._streams.of_pool()
            return Answer(200, msgspec.json.encode(EnginesPage(self._policy, rows, self._sources(), pool)))
        if path == b"/ui":
            return self._page
        if path == b"/ui/data":
            return data_answer(self._data.page())
        if path == b"/v1/models":
            return Answer(
                200,
                merged_models({e.name: e.models for e in self._dispatcher.engines if e.liveness.healthy}),
            )
        if path == b"/livez":
            return Answer(200, b'{"alive":true}')  # the relay answers 503 where this loop does not in time
        return self._health()

    def _health(self) -> Answer:
        if self.stopping:
            return Answer(503, error_body(503, "this proxy is stopping", "stopping"))
        healthy, total = self._dispatcher.healthy_count, len(self._dispatcher.engines)
        if healthy:
            return Answer(
                200, msgspec.json.encode(HealthPage("ok", healthy, total, self._sources(), self._unheard()))
            )
        why = f"none of {total} engines is healthy; GET /engines says why"
        if not total:
            why = "no engine has been discovered yet; GET /engines says where they are looked for"
        return Answer(503, error_body(503, why, "no_engine"))

    def _unheard(self) -> list[StreamRow]:
        return [] if self._streams is None else [row for row in self._streams.rows() if row.state != "live"]

    def _sources(self) -> list[SourceStatus]:
        return [] if self._reconciler is None else self._reconciler.rows()


def _row(engine: Engine, counts: EngineCounters, events: str) -> EngineListing:
    return EngineListing(
        name=engine.name,
        url=engine.url,
        role=engine.role,
        health="leaving" if counts.leaving else engine.liveness.state.value,
        why=engine.liveness.why,
        breaker="closed" if counts.breaker_closed else "open",
        in_flight=counts.in_flight,
        connections=counts.connections,
        requests=counts.requests,
        failures=sum(counts.failures.values()),
        models=None if engine.models is None else list(engine.models),
        events=events,
    )
