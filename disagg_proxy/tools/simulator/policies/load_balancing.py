"""The Mooncake paper's load balancing: by load, caches left out of account."""

from __future__ import annotations

from moonpool.disagg_proxy.conductor.choice import Request
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.tools.simulator.policies.scored import Scored


class LoadBalancing(Scored):
    """The fewest seconds of prefill in line."""

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Seconds of prefill in the worker's queue, without this request's own."""
        return worker.load.wait_s(now_s)
