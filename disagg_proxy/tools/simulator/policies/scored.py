"""A policy that gives every worker a cost for a request."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policies.roles import Roles, is_worth_splitting
from moonpool.disagg_proxy.conductor.worker import Role, Worker

_PREFILL = Role.PREFILL  # an enum's members are slow to look up


class Scored:
    """The least ``cost`` computes; with prefill and decode apart, the least ``decode_cost`` decodes. Where
    some serve requests whole beside those, the least ``cost`` of all that compute (the projects do not say;
    it is the plain generalisation). Of equals the one that was chosen longest ago.
    """

    uses_tokens = True

    def __init__(self) -> None:
        self._roles = Roles()
        self._turn = 0
        self._turns: dict[int, int] = {}

    def compare(self, request: Request, able: Sequence[Worker]) -> None:
        """They are those whose ``cost`` is asked next."""

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """What to compute this request there costs, in any unit; the least wins. May be negative. A subclass
        must have it."""
        raise NotImplementedError

    def decode_cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Tokens in the KV cache of those that decode there, and will when their prompts are computed."""
        return worker.load.context_tokens + worker.pending_handover_tokens

    def choose(self, request: Request, workers: Sequence[Worker], now_s: float) -> Choice:
        """``compare``, then ``cost`` once for each worker that may compute, in the order of the places."""
        groups = self._roles.of(workers)
        if groups.decode_workers:
            decode_workers = groups.decode_workers
            decode = self._least(
                decode_workers, [self.decode_cost(request, each, now_s) for each in decode_workers]
            )
            able = groups.able(decode)
            if able and is_worth_splitting(request, decode):
                best, least = self._cheapest(request, able, now_s)
                if best.role is _PREFILL:
                    return self._choice(request, decode, best, least)
                return self._choice(request, best, None, least)
            return self._choice(request, decode, None, 0.0)
        best, least = self._cheapest(request, groups.self_sufficient, now_s)
        return self._choice(request, best, None, least)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        """Both workers of the choice go to the end of the order among equals."""
        self._turn += 1
        self._turns[choice.decode.place] = self._turns[choice.computes.place] = self._turn

    def _cheapest(self, request: Request, able: Sequence[Worker], now_s: float) -> tuple[Worker, float]:
        self.compare(request, able)
        costs = [self.cost(request, each, now_s) for each in able]
        return self._least(able, costs), min(costs)

    def _least(self, workers: Sequence[Worker], costs: Sequence[float]) -> Worker:
        least = min(costs)
        turns = self._turns.get
        equal = [each for each, cost in zip(workers, costs, strict=True) if cost <= least]
        return min(equal, key=lambda each: turns(each.place, -1)) if len(equal) > 1 else equal[0]

    def _choice(self, request: Request, decode: Worker, prefill: Worker | None, cost: float) -> Choice:
        own = request.own_at(prefill or decode)
        return Choice(decode, prefill, why={"cost": cost, "own_tokens": own})
