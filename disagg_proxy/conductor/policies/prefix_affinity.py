"""The policy that chooses the longest cached prefix, unless that worker is much busier than the others."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policies.roles import Roles, is_worth_splitting
from moonpool.disagg_proxy.conductor.worker import Role, Worker

BUSIER_MAX = 8  # requests more than the least busy one has
SHARE_MIN = 0.1  # of the prompt, below which a match decides nothing
_PREFILL = Role.PREFILL  # an enum's members are slow to look up


class PrefixAffinity:
    """The longest match in a worker's own cache, among those that have at most BUSIER_MAX requests more than
    the least busy; without a match the least busy. Workers that compute prompts for others and those that
    serve requests whole are weighed together. It needs no model; ``conductor`` weighs both in seconds.
    """

    uses_tokens = True

    def __init__(self) -> None:
        self._roles = Roles()

    def choose(self, request: Request, workers: Sequence[Worker], now_s: float) -> Choice:
        """With prefill and decode apart: where little is left to compute, the decode worker with the longest
        match answers alone; otherwise the least busy one decodes, and the longest match computes."""
        groups = self._roles.of(workers)
        decode = self._near(request, groups.decode_workers or groups.self_sufficient)
        if not groups.decode_workers or not is_worth_splitting(request, decode):
            return self._choice(request, decode, None)
        least_busy = min(groups.decode_workers, key=lambda each: (each.in_flight, each.place))
        able = groups.able(least_busy)
        if not able:
            return Choice(decode)
        best = self._near(request, able)
        if best.role is _PREFILL:
            return self._choice(request, least_busy, best)
        return self._choice(request, best, None)

    @staticmethod
    def _near(request: Request, workers: Sequence[Worker]) -> Worker:
        least = min(worker.in_flight for worker in workers)
        near = [worker for worker in workers if worker.in_flight <= least + BUSIER_MAX]

        def rank(worker: Worker) -> tuple[int, int, int]:
            own = request.own_at(worker)
            return (-own if own >= SHARE_MIN * request.tokens else 0, worker.in_flight, worker.place)

        return min(near, key=rank)

    @staticmethod
    def _choice(request: Request, decode: Worker, prefill: Worker | None) -> Choice:
        computes = prefill or decode
        return Choice(
            decode, prefill, why={"own_tokens": request.own_at(computes), "in_flight": computes.in_flight}
        )
