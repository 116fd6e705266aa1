"""Algorithm 1 of the Mooncake paper without its transfer: cache-aware scheduling by local caches alone."""

from __future__ import annotations

from moonpool.disagg_proxy.conductor.choice import Request
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.tools.simulator.policies.scored import Scored


class MinTtft(Scored):
    """The least predicted time to the first token, as if nothing could be fetched."""

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Seconds: the prefill in the worker's queue, and this request's own by the worker's model."""
        own = request.own_at(worker)
        return worker.load.wait_s(now_s) + worker.prefill_model.predict(request.tokens, own)
