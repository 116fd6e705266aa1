"""vllm-router's ``kv_aware`` with its defaults (0.1.17)."""

from __future__ import annotations

from moonpool.disagg_proxy.conductor.choice import Request
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.tools.simulator.policies.scored import Scored

POOL_CREDIT = 0.6  # of a token in an external store


class VllmKvAware(Scored):
    """Tokens that wait there and those to compute for this request, less credit for what lies in the pool."""

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """In tokens. A token in the pool counts POOL_CREDIT of one in the worker's own cache."""
        held = request.own_at(worker) + POOL_CREDIT * request.from_pool(worker)
        return worker.load.prefill_rest_tokens + max(request.tokens - held, 0.0)

    def decode_cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Requests there, and those whose prompts are still computed elsewhere."""
        return worker.in_flight + worker.pending_handover
