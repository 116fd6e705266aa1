"""What a client says of its request besides the body: whose it is, how urgent, and by when it is wanted."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.clients import PRIORITY_MOST, Client
from moonpool.disagg_proxy.conductor.admission import Objective

_HINTS = ("tenant", "priority", "session", "ttft-slo", "gap-slo")
_NAME = re.compile(rb"[\x21-\x7e]{1,128}")
_NUMBER = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")
_PRIORITY = re.compile(rb"[+-]?[0-9]{1,3}")


class RequestHints(NamedTuple):
    """ttft_s, gap_s: NaN where the client says nothing; 0: any will do."""

    tenant: str = ""
    priority: int = 0
    session: str = ""
    ttft_s: float = math.nan
    gap_s: float = math.nan

    def objective(self, usual: Objective) -> Objective:
        """usual: of requests that say nothing."""
        return Objective(_or(self.ttft_s, usual.ttft_s), _or(self.gap_s, usual.gap_s))

    def of(self, client: Client) -> RequestHints:
        """With the tenant and at most the priority of the client's row, whatever its headers claim. A session
        is the tenant's own: no other tenant's has its name."""
        return self._replace(
            tenant=client.tenant_name,
            priority=min(self.priority, client.max_priority),
            session=self.session and f"{client.tenant_name} {self.session}",
        )


class BadHeader(ValueError):
    """One sentence for the client."""


NO_HINTS = RequestHints()


def read(fields: Mapping[str, bytes] | None) -> RequestHints:
    """fields: ``ProxyRequest.moonpool_headers``. Raises BadHeader."""
    if fields is None or fields.keys().isdisjoint(_HINTS):
        return NO_HINTS
    return RequestHints(
        _name("X-Moonpool-Tenant", fields.get("tenant")),
        _priority(fields.get("priority")),
        _name("X-Moonpool-Session", fields.get("session")),
        _seconds("X-Moonpool-TTFT-SLO", fields.get("ttft-slo")),
        _seconds("X-Moonpool-Gap-SLO", fields.get("gap-slo")),
    )


def asks_why(request: ProxyRequest) -> bool:
    """Whether its client wants to know the reasons of the decision: it sent X-Moonpool-Decision."""
    fields = request.moonpool_headers
    return fields is not None and "decision" in fields


def _name(field: str, value: bytes | None) -> str:
    if value is None:
        return ""
    if not _NAME.fullmatch(value):
        raise BadHeader(f"{field} is a name of 1 to 128 visible ASCII characters")
    return value.decode()


def _priority(value: bytes | None) -> int:
    if value is None:
        return 0
    if not _PRIORITY.fullmatch(value) or abs(int(value)) > PRIORITY_MOST:
        raise BadHeader(
            f"X-Moonpool-Priority is a whole number from -{PRIORITY_MOST} to {PRIORITY_MOST}; more is more "
            f"urgent"
        )
    return int(value)


def _seconds(field: str, value: bytes | None) -> float:
    if value is None:
        return math.nan
    if not _NUMBER.fullmatch(value):
        raise BadHeader(f"{field} is a number of seconds, such as 2.5; 0 stands for any time")
    return float(value)


def _or(own_s: float, usual_s: float) -> float:
    return usual_s if math.isnan(own_s) else own_s or math.inf
