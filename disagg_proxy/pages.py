"""What the proxy itself answers: /health, /metrics, /engines."""

from __future__ import annotations

import math

import msgspec

from moonpool.disagg_proxy.dispatcher import Dispatcher
from moonpool.disagg_proxy.engine import Engine
from moonpool.disagg_proxy.http.answers import JSON, error_body, own_answer
from moonpool.disagg_proxy.http.fields import Field
from moonpool.disagg_proxy.http.request import BadRequest, Request
from moonpool.disagg_proxy.metrics import CONTENT_TYPE, ProxyCollector, exposition
from moonpool.disagg_proxy.routes import Route


class EngineRow(msgspec.Struct):
    """One engine in GET /engines. why: the last failure of its health check, "" while healthy."""

    name: str
    url: str
    health: str
    why: str
    breaker: str
    in_flight: int
    connections: int
    requests: int
    failures: int


class EnginesPage(msgspec.Struct):
    policy: str
    engines: list[EngineRow]


class HealthPage(msgspec.Struct):
    status: str
    engines_healthy: int
    engines: int


class Pages:
    def __init__(
        self, dispatcher: Dispatcher, collector: ProxyCollector, policy: str, retry_after_s: float
    ) -> None:
        self._dispatcher = dispatcher
        self._collector = collector
        self._policy = policy
        self._retry_after: Field = (b"Retry-After", b"%d" % max(1, math.ceil(retry_after_s)))

    def answer(self, route: Route, request: Request, *, close: bool) -> bytes:
        """The whole answer to a request for one of the proxy's own paths."""
        status, content_type = 200, JSON
        fields: list[Field] = []
        if route is Route.METRICS:
            body, content_type = exposition(self._collector), CONTENT_TYPE
        elif route is Route.ENGINES:
            rows = [_row(engine) for engine in self._dispatcher.engines]
            body = msgspec.json.encode(EnginesPage(self._policy, rows))
        else:
            status, body = self._health()
            if status == 503:
                fields.append(self._retry_after)
        return own_answer(
            status,
            body,
            content_type=content_type,
            request_id=request.request_id,
            fields=fields,
            close=close,
            head_only=request.method == b"HEAD",
        )

    def refusal(self, refusal: BadRequest, request_id: bytes, *, close: bool, head_only: bool) -> bytes:
        """A refused request, in the error shape of the OpenAI API."""
        return own_answer(
            refusal.status,
            error_body(refusal.status, refusal.reason, refusal.sentence),
            request_id=request_id,
            fields=(self._retry_after,) if refusal.status == 503 else (),
            close=close,
            head_only=head_only,
        )

    def _health(self) -> tuple[int, bytes]:
        healthy, total = self._dispatcher.healthy_count, len(self._dispatcher.engines)
        if healthy:
            return 200, msgspec.json.encode(HealthPage("ok", healthy, total))
        return 503, error_body(503, "no_engine", f"none of {total} engines is healthy; GET /engines says why")


def _row(engine: Engine) -> EngineRow:
    return EngineRow(
        name=engine.name,
        url=engine.url,
        health=engine.liveness.state.value,
        why=engine.liveness.why,
        breaker="closed" if engine.breaker.closed else "open",
        in_flight=engine.in_flight,
        connections=len(engine.pool),
        requests=sum(engine.counts.answers.values()),
        failures=sum(engine.counts.failures.values()),
    )
