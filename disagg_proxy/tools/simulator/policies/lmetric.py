"""LMetric (arXiv 2603.15202): one product and nothing to tune."""

from __future__ import annotations

from moonpool.disagg_proxy.conductor.choice import Request
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.tools.simulator.policies.scored import Scored


class LMetric(Scored):
    """(Tokens to compute there, this request's included) x (requests there, this one included)."""

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Tokens x requests. A prompt that is held whole counts as one token, or the requests would not
        count."""
        rest = worker.load.prefill_rest_tokens + request.tokens - request.own_at(worker)
        return max(rest, 1) * (worker.in_flight + 1)

    def decode_cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Requests there, and those whose prompts are still computed elsewhere."""
        return worker.in_flight + worker.pending_handover
