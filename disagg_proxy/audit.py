"""What the audit log says of a proxy's clients and registrars (core/service/audit.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from moonpool._native import ProxyRequest
from moonpool.core.service import audit
from moonpool.core.service.audit import Refusals, Value
from moonpool.disagg_proxy.clients import Clients
from moonpool.disagg_proxy.conductor.plan import Answer
from moonpool.disagg_proxy.data_plane.counters import Counters
from moonpool.disagg_proxy.discovery.registration import Registration

SUMMARY_EVERY_S = 10.0
# Reasons of refusals that the data plane counts, and the events that sum them up.
_SUMMED = {
    "invalid_api_key": "keys_refused",
    "address_connections": "rate_limited",
    "address_bodies": "rate_limited",
    "plain_http": "plain_http_refused",
    "tls_handshake": "tls_handshakes_failed",
}


class ProxyAudit:
    """Thread safe, but for ``sum_up``. clients: their rows; None: keys have no names."""

    def __init__(self, clients: Clients | None = None) -> None:
        self._clients = clients
        self._refusals = Refusals()
        self._summed: Counter[str] = Counter()
        self._summed_s = 0.0

    def key_refused(self, request: ProxyRequest) -> None:
        """A key that may not do what the request asks for, or none."""
        path = request.path.decode("latin-1")
        self._refusals.record("key_refused", path=path, **self._sender(request))

    def registered(self, request: ProxyRequest, told: Registration) -> None:
        """An engine, or a publisher of events, is new, or has changed what it says."""
        audit.record(
            "engine_registered",
            instance=told.instance_id,
            tenant=told.tenant_id,
            url=told.url or None,
            endpoint=told.endpoint or None,
            role=told.role,
            **self._sender(request),
        )

    def unregistered(self, request: ProxyRequest, answer: Answer) -> None:
        """What a registrar has removed, as the answer says."""
        removed = msgspec.json.decode(answer.body)["removed_instances"]
        audit.record("engine_unregistered", instances=", ".join(removed), **self._sender(request))

    def registration_refused(self, request: ProxyRequest, answer: Answer) -> None:
        """A registration, or its end, was refused with this answer."""
        why = msgspec.json.decode(answer.body)["error"]["message"]
        self._refusals.record("registration_refused", status=answer.status, why=why, **self._sender(request))

    def sum_up(self, look: Callable[[], Counters], now_s: float) -> None:
        """Tells of refusals that the data plane has counted, every SUMMARY_EVERY_S seconds: it refuses keys
        by a request's head, and keeps nothing of it. On one thread. look: returns the counters."""
        if now_s - self._summed_s < SUMMARY_EVERY_S:
            return
        self._summed_s = now_s
        counters = look()
        for reason, event in _SUMMED.items():
            more = counters.rejected.get(reason, 0) - self._summed[reason]
            if more:
                last = counters.handshake_failure if reason == "tls_handshake" else None
                audit.record(event, reason=reason, count=more, seconds=SUMMARY_EVERY_S, last=last)
            self._summed[reason] += more

    def _sender(self, request: ProxyRequest) -> dict[str, Value]:
        """Whose key came with the request."""
        shown = request.headers("authorization")
        client = None if self._clients is None else self._clients.find(shown)
        if client is not None:
            return {"client": client.name, "request": request.request_id}
        key = (shown or b"").partition(b" ")[2].strip()
        return {"key": audit.key_digest(key) or None, "request": request.request_id}
