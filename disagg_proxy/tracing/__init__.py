"""OpenTelemetry spans of requests (``pip install 'moonpool[otel]'``), when the operator names an OTLP
endpoint.

    spans.py      what the data plane observed of a request, as spans. Values only, no OpenTelemetry
    recorder.py   the thread that makes them and hands them to OpenTelemetry's own exporter

Nothing happens while a request runs, but that its decision is noted: spans are made from the records of
requests that are over. Without a collector to export to, OpenTelemetry is not even imported. What is in a
span: docs/proxy.md.
"""
