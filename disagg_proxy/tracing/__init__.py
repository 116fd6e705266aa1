"""OpenTelemetry spans of requests (``pip install 'moonpool[otel]'``), when the operator names an OTLP
endpoint.

    spans.py      spans from the relay's record of a request. Values only, no OpenTelemetry
    recorder.py   the thread that makes spans and passes them to OpenTelemetry's exporter

While a request runs only its decision is stored; spans are made from the records of finished requests.
Without a collector OpenTelemetry is not even imported. docs/proxy.md describes the spans.
"""
