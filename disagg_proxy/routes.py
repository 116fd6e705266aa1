"""Which paths exist: relayed to an engine, answered here, or neither."""

from __future__ import annotations

from enum import Enum

from moonpool.disagg_proxy.http.request import BadRequest, Request


class Route(Enum):
    RELAY = "relay"
    HEALTH = "/health"
    METRICS = "/metrics"
    ENGINES = "/engines"


_OWN = {route.value.encode(): route for route in (Route.HEALTH, Route.METRICS, Route.ENGINES)}
_POST_ONLY = frozenset((b"/tokenize", b"/detokenize"))
_READ = frozenset((b"GET", b"HEAD"))
_RELAYED = frozenset((b"GET", b"HEAD", b"POST"))


def route(request: Request) -> Route:
    """Where a request goes. Raises BadRequest (404, 405) for what is not served here.

    Paths of an engine outside of these (vLLM's /sleep, /collective_rpc, ...) are for its operator, not for
    clients.
    """
    path, method = request.path, request.method
    if path.startswith(b"/v1/"):
        return _allow(Route.RELAY, method, _RELAYED, path)
    if path in _POST_ONLY:
        return _allow(Route.RELAY, method, frozenset((b"POST",)), path)
    own = _OWN.get(path)
    if own is not None:
        return _allow(own, method, _READ, path)
    raise BadRequest(
        404,
        "unknown_path",
        f"there is no {_shown(path)} here; try /v1/, /tokenize, /detokenize, /health, /metrics or /engines",
    )


def _allow(chosen: Route, method: bytes, methods: frozenset[bytes], path: bytes) -> Route:
    if method not in methods:
        allowed = b", ".join(sorted(methods)).decode()
        raise BadRequest(405, "method", f"{_shown(path)} takes {allowed}, not {method.decode()}")
    return chosen


def _shown(path: bytes) -> str:
    text = path[:100].decode("ascii", "backslashreplace")
    return text + "..." if len(path) > 100 else text
