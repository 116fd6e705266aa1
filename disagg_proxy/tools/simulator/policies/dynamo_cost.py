"""NVIDIA Dynamo's KV router with its defaults (1.6)."""

from __future__ import annotations

from moonpool.disagg_proxy.conductor.choice import Request
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.tools.simulator.policies.scored import Scored

BLOCK_TOKENS = 64
POOL_CREDIT = 0.75  # of a block in the host's memory


class DynamoCost(Scored):
    """Prefill blocks that wait there and are to be computed for this request, less the blocks it holds, and
    the blocks of those that decode there. Among decode workers alone what is held counts for nothing.
    """

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """In blocks of BLOCK_TOKENS tokens. A token in the pool counts POOL_CREDIT of one in the worker's own
        cache."""
        load = worker.load
        held = request.own_at(worker) + POOL_CREDIT * request.from_pool(worker)
        prefill = max(load.prefill_rest_tokens + request.tokens - held, 0.0)
        return (prefill + load.context_tokens) / BLOCK_TOKENS
