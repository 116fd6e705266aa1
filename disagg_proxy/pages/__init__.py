"""What the proxy itself answers: /health, /metrics, /engines and the page of ``ui/``. Made on the event loop,
where it holds up no request."""
