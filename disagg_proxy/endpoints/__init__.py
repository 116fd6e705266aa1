"""HTTP endpoints of the proxy itself: /health, /metrics, /engines, /v1/models and the page of ``ui/``.

They run on the event loop, so that they delay no request: requests are relayed by another thread.
"""
