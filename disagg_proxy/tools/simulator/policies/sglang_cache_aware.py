"""sglang-router's ``cache_aware`` with its defaults (0.3)."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Request
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.tools.simulator.policies.scored import Scored

SHARE_MIN = 0.3  # of the prompt that must match
IMBALANCE_MIN = 64  # requests
IMBALANCE_TIMES = 1.5


class SGLangCacheAware(Scored):
    """The longest match, if it is more than SHARE_MIN of the prompt, else the fewest requests; also those
    when the numbers of requests are further apart than both limits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._balances = False

    def compare(self, request: Request, able: Sequence[Worker]) -> None:
        """Decides whether this request goes by load or by prefix; ``cost`` follows that."""
        counts = [each.in_flight for each in able]
        apart = max(counts) - min(counts)
        longest = max(request.own_at(each) for each in able)
        self._balances = (apart > IMBALANCE_MIN and max(counts) > IMBALANCE_TIMES * min(counts)) or (
            longest <= SHARE_MIN * request.tokens
        )

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Requests in flight, or minus the tokens that the worker's own cache holds."""
        return worker.in_flight if self._balances else -request.own_at(worker)

    def decode_cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Requests there, and those whose prompts are still computed elsewhere."""
        return worker.in_flight + worker.pending_handover
