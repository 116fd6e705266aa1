"""A policy that gives every instance a cost for a request."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.instance import Instance
from moonpool.disagg_proxy.conductor.policies.roles import Roles, is_worth_splitting


class Scored:
    """The least ``cost`` computes; with prefill and decode apart, the least ``decode_cost`` decodes. Of
    equals the one that was chosen longest ago.
    """

    uses_tokens = True

    def __init__(self) -> None:
        self._roles = Roles()
        self._turn = 0
        self._turns: dict[int, int] = {}

    def cost(self, request: Request, instance: Instance, now_s: float) -> float:
        raise NotImplementedError

    def decode_cost(self, request: Request, instance: Instance, now_s: float) -> float:
        """Tokens in the KV cache of those that decode there, and will when their prompts are computed."""
        return instance.books.context_tokens + instance.coming_tokens

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        answering, computing, _ = self._roles.of(instances)
        if computing:
            decode = self._least(answering, [self.decode_cost(request, each, now_s) for each in answering])
            apart = [instance for instance in computing if instance is not decode]
            if apart and is_worth_splitting(request, decode):
                costs = [self.cost(request, each, now_s) for each in apart]
                return self._choice(request, decode, self._least(apart, costs), min(costs))
            return self._choice(request, decode, None, 0.0)
        costs = [self.cost(request, each, now_s) for each in answering]
        return self._choice(request, self._least(answering, costs), None, min(costs))

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        self._turn += 1
        self._turns[choice.decode.place] = self._turns[choice.computes.place] = self._turn

    def _least(self, instances: Sequence[Instance], costs: Sequence[float]) -> Instance:
        least = min(costs)
        turns = self._turns.get
        equal = [each for each, cost in zip(instances, costs, strict=True) if cost <= least]
        return min(equal, key=lambda each: turns(each.place, -1)) if len(equal) > 1 else equal[0]

    def _choice(self, request: Request, decode: Instance, prefill: Instance | None, cost: float) -> Choice:
        own = request.own_at(prefill or decode)
        return Choice(decode, prefill, why={"cost": cost, "own_tokens": own})
