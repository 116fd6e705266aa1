"""Makes spans from the relay's records and exports them by OpenTelemetry, on a thread of its own."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moonpool import __version__
from moonpool.disagg_proxy.conductor.choice import Choice
from moonpool.disagg_proxy.data_plane import observations
from moonpool.disagg_proxy.data_plane.observations import Observation, Stage
from moonpool.disagg_proxy.dispatch.observer import DispatchObserver
from moonpool.disagg_proxy.metric_family import family
from moonpool.disagg_proxy.setting_error import bad
from moonpool.disagg_proxy.tracing.spans import Span, TracedDecision, spans_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

    from moonpool._native import ProxyRequest

NOTED_MAX = 65_536  # stored decisions; there are fewer, unless records get lost
BATCHES_MAX = 1_024  # batches of records that wait for the thread
FLUSH_S = 2.0  # longest wait for the exporter at the end
_NEEDS = "spans for OpenTelemetry need its packages: pip install 'moonpool[otel]'"

_log = logging.getLogger("moonpool.proxy")


class Recorder(Collector, DispatchObserver):
    """Thread safe. Beyond its maxima it drops and counts records; it never delays requests.

    exporter: OpenTelemetry's; closed with the recorder.
    engines:  names by place. Places are reused, so each batch of records takes a copy.
    clock:    the clock of the records, in seconds.
    wall:     seconds since 1970.
    dropped:  number of records without spans: too many waited, or they were malformed.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        engines: Sequence[str],
        policy: str,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self.dropped = 0
        self._processor: SpanProcessor = BatchSpanProcessor(exporter)
        self._make = SpanFactory()
        self.engines = tuple(engines)
        self._policy = policy
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._noted: dict[int, TracedDecision] = {}
        self._records: queue.Queue[tuple[bytes, tuple[str, ...]] | None] = queue.Queue(BATCHES_MAX)
        self._thread = threading.Thread(target=self._run, name="moonpool-spans", daemon=True)
        self._thread.start()

    def on_choice(self, request: ProxyRequest, choice: Choice) -> None:
        """Stores the decision of a request; the last one counts."""
        noted = TracedDecision(
            request.method.decode("latin-1"),
            request.path.decode("latin-1"),
            request.model,
            request.request_id,
            choice.why,
        )
        with self._lock:
            self._noted[request.id] = noted
            if len(self._noted) > NOTED_MAX:
                del self._noted[next(iter(self._noted))]

    def on_records(self, records: bytes) -> None:
        """Queues the relay's records."""
        if records:
            try:
                self._records.put_nowait((records, self.engines))
            except queue.Full:
                self.dropped += len(records) // observations.RECORD.size

    def close(self) -> None:
        """Exports the queued spans. Spans that the collector has not taken within FLUSH_S seconds are lost;
        OpenTelemetry itself would wait for tens of seconds."""
        with suppress(queue.Full):
            self._records.put(None, timeout=FLUSH_S)
            self._thread.join(FLUSH_S)

    def collect(self) -> Iterator[Metric]:
        """Metric families, as of now."""
        yield family("spans_dropped_total", "Records of which no spans were made", self.dropped)

    def _run(self) -> None:
        told = False
        while (taken := self._records.get()) is not None:
            records, engines = taken
            offset_s = self._wall() - self._clock()
            for observation in observations.read(records):
                if observation.stage != Stage.ENDED:
                    continue
                try:
                    self._record(observation, engines, offset_s)
                except Exception:  # a custom policy may give unusual values: skip this request
                    self.dropped += 1
                    if not told:
                        _log.exception("a request has no spans; further ones are only counted")
                    told = True
        self._processor.shutdown()  # exports the rest

    def _record(self, observation: Observation, engines: Sequence[str], offset_s: float) -> None:
        with self._lock:
            noted = self._noted.pop(observation.request, None)
        if not observation.sampled:
            return
        for span in spans_of(observation, noted, engines, self._policy):
            self._processor.on_end(self._make(span, offset_s))


class SpanFactory:
    """Converts our spans to OpenTelemetry's."""

    def __init__(self) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        resource = Resource.create()  # heeds OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "moonpool-proxy"}))
        self._resource = resource
        self._scope = InstrumentationScope("moonpool.proxy", __version__)

    def __call__(self, span: Span, offset_s: float) -> ReadableSpan:
        """offset_s: from the clock of its times to seconds since 1970."""
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span_id: int, *, remote: bool) -> SpanContext:
            flags = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(span.trace_id, span_id, is_remote=remote, trace_flags=flags)

        def nanoseconds(at_s: float) -> int:
            return int((at_s + offset_s) * 1e9)

        events = []
        if span.first_byte_s:
            events.append(Event("first token", timestamp=nanoseconds(span.first_byte_s)))
        return ReadableSpan(
            name=span.name,
            context=context(span.span_id, remote=False),
            parent=context(span.parent_id, remote=span.server) if span.parent_id else None,
            resource=self._resource,
            attributes=dict(span.attributes),
            events=events,
            kind=SpanKind.SERVER if span.server else SpanKind.CLIENT,
            status=Status(StatusCode.ERROR, span.failure) if span.failure else Status(),
            start_time=nanoseconds(span.start_s),
            end_time=nanoseconds(span.end_s),
            instrumentation_scope=self._scope,
        )


def exporter_of(endpoint: str, environ: Mapping[str, str] = os.environ) -> SpanExporter | None:
    """OTLP over HTTP to ``endpoint`` (the root of a collector, or the whole URL), or, when that is "", to
    where OpenTelemetry's variables say; None when no endpoint is named.

    Raises ConfigError when an endpoint is given and the packages are missing; where only the variables are
    there, which may be meant for others, one warning says so.
    """
    named = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not endpoint and (not named or off or environ.get("OTEL_TRACES_EXPORTER") == "none"):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        if endpoint:
            raise bad("otlp_endpoint", _NEEDS) from error
        _log.warning("%s", _NEEDS)
        return None
    if not endpoint:
        return OTLPSpanExporter()
    whole = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
    return OTLPSpanExporter(endpoint=whole)
