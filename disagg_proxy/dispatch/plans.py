"""From a policy's choice to the plan that the data plane carries out, and what a client may hear of it."""

from __future__ import annotations

import msgspec

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.conductor.choice import Choice
from moonpool.disagg_proxy.conductor.plan import Plan
from moonpool.disagg_proxy.data_plane.observations import HandoverForm
from moonpool.disagg_proxy.dispatch.handovers import Handovers


class Plans:
    """Thread safe. policy_name: as clients are told it."""

    def __init__(self, handovers: Handovers, policy_name: str) -> None:
        self._handovers = handovers
        self._policy_name = policy_name

    def plan(self, request: ProxyRequest, choice: Choice, *, tracked: bool, waited_s: float = 0.0) -> Plan:
        """waited_s: that the request was in the queue."""
        decode, prefill = choice.decode, choice.prefill
        if prefill is None:
            plan, form = Plan(decode.place, tracked=tracked), HandoverForm.NOT
        else:
            plan, form = self._handovers.plan(decode.place, prefill.place, request, tracked)
        if request.headers("x-moonpool-decision") is None:
            return plan
        why = {
            "policy": self._policy_name,
            "engine": decode.name,
            "prefill": prefill and prefill.name,
            "handover": form.name.lower() if form else None,
            **{
                name: round(value, 5) if isinstance(value, float) else value
                for name, value in choice.why.items()
            },
        }
        if waited_s:
            why["queued_s"] = round(waited_s, 5)
        return plan._replace(headers=((b"X-Moonpool-Decision", msgspec.json.encode(why)),))
