"""Spans through OpenTelemetry's own SDK: in memory, and from a proxy to a collector over OTLP."""

from __future__ import annotations

import gzip
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType

import numpy as np
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.plan import Plan
from moonpool.disagg_proxy.data_plane.observations import RECORD, Observation, Stage
from moonpool.disagg_proxy.endpoints.relay_metrics import exposition
from moonpool.disagg_proxy.tracing import recorder as recorder_module
from moonpool.disagg_proxy.tracing.recorder import Recorder, exporter_of
from tests.disagg_proxy.data_plane.plans_bed import BODY, CHAT, pd_bed
from tests.disagg_proxy.harness import Exchange, with_deadline
from tests.disagg_proxy.tracing.engines import ENGINES, TWO_STEPS

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NO_VARIABLES: dict[str, str] = {}


class Collector:
    """What an OTLP collector got, in the order of arrival."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self.services: set[str] = set()

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.services.add(names["service.name"])
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return web.Response(content_type="application/x-protobuf")

    def named(self, name: str) -> Span:
        [found] = [span for span in self.spans if span.name == name]
        return found


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    collector.url = f"http://{host}:{port}"
    yield collector
    await runner.cleanup()


def attributes(span: Span) -> dict[str, object]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


@with_deadline
async def test_a_request_in_two_steps_is_a_tree_below_the_clients_span() -> None:
    async with collecting() as collector:
        options = {"policy": "conductor", "tokenizer": ("none",), "otlp_endpoint": collector.url}
        async with pd_bed(**options) as b:
            head = f"tracestate: a=1\r\ntraceparent: 00-{TRACE}-{CLIENT}-01\r\nX-Request-Id: one\r\n"
            assert (await b.ask("POST", CHAT, BODY, head)).status == 200
            told = [engine.seen[-1].headers for engine in b.engines]
        # The proxy has closed: everything is exported.
        request, prefill, decode = (collector.named(name) for name in (f"POST {CHAT}", "prefill", "decode"))
        assert {each.trace_id.hex() for each in (request, prefill, decode)} == {TRACE}
        assert request.parent_span_id.hex() == CLIENT
        assert prefill.parent_span_id == decode.parent_span_id == request.span_id
        assert len({each.span_id for each in (request, prefill, decode)}) == 3
        assert request.kind == Span.SPAN_KIND_SERVER
        assert prefill.kind == decode.kind == Span.SPAN_KIND_CLIENT
        # The engines' own spans belong below ours.
        for headers in told:
            assert headers["traceparent"] == f"00-{TRACE}-{request.span_id.hex()}-01"
            assert headers["tracestate"] == "a=1"
        assert request.start_time_unix_nano <= prefill.start_time_unix_nano
        assert prefill.end_time_unix_nano <= decode.start_time_unix_nano
        assert decode.end_time_unix_nano <= request.end_time_unix_nano
        assert [event.name for event in decode.events] == ["first token"]
        got = attributes(request)
        assert got["gen_ai.request.model"] == "m"
        assert got["moonpool.policy"] == "conductor"
        assert got["moonpool.request_id"] == "one"
        assert (got["moonpool.prefill_engine"], got["moonpool.engine"]) == ("engine-0", "engine-1")
        assert "moonpool.decision.predicted_ttft_s" in got
        assert attributes(prefill)["moonpool.handover"] == "two_step"
        assert collector.services == {"moonpool-proxy"}


@with_deadline
async def test_a_trace_that_begins_here_and_one_that_nobody_wants() -> None:
    async with collecting() as collector:
        async with pd_bed("b", otlp_endpoint=collector.url) as b:
            unwanted = f"traceparent: 00-{TRACE}-{CLIENT}-00\r\n"
            assert (await b.ask("POST", CHAT, BODY, unwanted)).status == 200
            told = b.engines[0].seen[-1].headers["traceparent"]
            assert told.startswith(f"00-{TRACE}-")
            assert told.endswith("-00")
            assert (await b.ask("POST", CHAT, BODY)).status == 200
            told = b.engines[0].seen[-1].headers["traceparent"]
        request, engine = collector.named(f"POST {CHAT}"), collector.named("prefill and decode")
        assert len(collector.spans) == 2
        assert request.parent_span_id == b""
        assert told == f"00-{request.trace_id.hex()}-{request.span_id.hex()}-01"
        assert engine.parent_span_id == request.span_id
        assert attributes(request)["moonpool.policy"] == "round_robin"


@with_deadline
async def test_an_engine_that_fails_in_mid_stream() -> None:
    async def cut(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event("a")
        exchange.cut()

    async with collecting() as collector:
        async with pd_bed("b", otlp_endpoint=collector.url) as b:
            b.engines[0].behave = cut
            await b.ask("POST", CHAT, BODY)
        request = collector.named(f"POST {CHAT}")
        assert request.status.code == Status.STATUS_CODE_ERROR
        assert attributes(request)["moonpool.outcome"] == "broken_off"


@with_deadline
async def test_without_a_collector_requests_go_on() -> None:
    """Nobody listens there: the exporter tries, and gives up with the proxy's end."""
    async with pd_bed("b", otlp_endpoint="http://127.0.0.1:9") as b:
        for _ in range(3):
            assert (await b.ask("POST", CHAT, BODY)).status == 200


@with_deadline
async def test_nothing_is_made_when_nobody_wants_it() -> None:
    async with pd_bed("b", decide=lambda request: Plan(0)) as b:
        assert b.proxy._recorder is None
        assert not any(isinstance(each, Recorder) for each in b.proxy._dispatcher._observers)
        sent = f"00-{TRACE}-{CLIENT}-01"
        assert (await b.ask("POST", CHAT, BODY, f"traceparent: {sent}\r\n")).status == 200
        assert b.engines[0].seen[-1].headers["traceparent"] == sent


@with_deadline
async def test_records_become_spans_of_the_sdk() -> None:
    exporter = InMemorySpanExporter()
    recorder = Recorder(exporter, ENGINES, "conductor", clock=lambda: 100.0, wall=lambda: 1100.0)
    begun = TWO_STEPS._replace(stage=Stage.BEGUN)
    unwanted = TWO_STEPS._replace(sampled=0)
    records = b"".join(RECORD.pack(*each) for each in (begun, TWO_STEPS, unwanted))
    recorder.on_records(records)
    recorder.close()
    request, prefill, decode = exporter.get_finished_spans()
    assert request.start_time == 1_010_000_000_000
    assert request.parent is not None
    assert request.parent.is_remote
    assert request.parent.span_id == int.from_bytes(b"p" * 8, "big")
    assert prefill.kind is SpanKind.CLIENT
    assert decode.parent is not None
    assert decode.parent.span_id == request.context.span_id
    assert decode.instrumentation_scope is not None
    assert decode.instrumentation_scope.name == "moonpool.proxy"


def test_what_is_noted_is_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "NOTED_MAX", 8)
    exporter = InMemorySpanExporter()
    recorder = Recorder(exporter, ENGINES, "conductor", clock=lambda: 0.0, wall=lambda: 0.0)
    for number in range(20):
        recorder.on_choice(FakeRequest(number), FakeChoice())  # type: ignore[arg-type]
    assert len(recorder._noted) == 8
    recorder.on_records(b"".join(RECORD.pack(*ended(number)) for number in range(20)))
    recorder.close()
    assert not recorder._noted
    names = [span.name for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert names == ["request"] * 12 + ["POST /v1/completions"] * 8


def test_a_collector_that_takes_nothing_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_S", 0.05)
    exporter = StuckExporter()
    recorder = Recorder(exporter, ENGINES, "conductor", clock=lambda: 0.0, wall=lambda: 0.0)
    recorder.on_records(RECORD.pack(*TWO_STEPS))
    began = time.monotonic()
    recorder.close()
    assert time.monotonic() - began < 5.0
    exporter.goon.set()
    recorder._thread.join(20.0)
    assert not recorder._thread.is_alive()


def test_one_odd_decision_costs_no_other_spans(caplog: pytest.LogCaptureFixture) -> None:
    exporter = InMemorySpanExporter()
    recorder = Recorder(exporter, ENGINES, "conductor", clock=lambda: 0.0, wall=lambda: 0.0)
    whys: list[dict[str, object]] = [
        {"a": None, "b": [1, 2], "c": np.array([1, 2]), "d": 0.5},
        {"a": Unsayable()},
        {"a": Unsayable()},
        {},
    ]
    for number, why in enumerate(whys):
        choice = FakeChoice()
        choice.why = MappingProxyType(why)  # type: ignore[assignment]
        recorder.on_choice(FakeRequest(number), choice)  # type: ignore[arg-type]
    recorder.on_records(b"".join(RECORD.pack(*ended(number)) for number in range(len(whys))))
    recorder.close()
    requests = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    odd, plain = [span.attributes or {} for span in requests]
    told = {name: value for name, value in odd.items() if name.startswith("moonpool.decision.")}
    assert told == {
        "moonpool.decision.b": "[1, 2]",
        "moonpool.decision.c": "[1 2]",
        "moonpool.decision.d": 0.5,
    }
    assert plain["moonpool.request_id"] == "r-3"
    assert len(caplog.records) == 1
    assert b"moonpool_proxy_spans_dropped_total 2.0" in exposition(list(recorder.collect()))


def test_the_variables_of_opentelemetry() -> None:
    named = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    assert exporter_of("", NO_VARIABLES) is None
    assert exporter_of("", {**named, "OTEL_SDK_DISABLED": "true"}) is None
    assert exporter_of("", {**named, "OTEL_TRACES_EXPORTER": "none"}) is None
    assert exporter_of("", named) is not None
    assert exporter_of("http://127.0.0.1:4318", NO_VARIABLES)._endpoint.endswith(":4318/v1/traces")  # type: ignore[union-attr]
    assert exporter_of("http://c/own/path", NO_VARIABLES)._endpoint == "http://c/own/path"  # type: ignore[union-attr]


def test_without_the_packages_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'moonpool\[otel\]'"):
        exporter_of("http://127.0.0.1:4318", NO_VARIABLES)
    with caplog.at_level(logging.WARNING):
        assert exporter_of("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}) is None
    assert [record.message for record in caplog.records] == [recorder_module._NEEDS]


def ended(request: int) -> Observation:
    return TWO_STEPS._replace(request=request)


class StuckExporter(SpanExporter):
    """As the one of OpenTelemetry when nobody answers: it heeds no deadline."""

    def __init__(self) -> None:
        self.goon = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.goon.wait(20.0)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


class Unsayable:
    def __str__(self) -> str:
        raise ValueError


class FakeRequest:
    method = b"POST"
    path = b"/v1/completions"
    model = "m"

    def __init__(self, number: int) -> None:
        self.id = number
        self.request_id = f"r-{number}"


class FakeChoice:
    why = MappingProxyType({"own_tokens": 1})
