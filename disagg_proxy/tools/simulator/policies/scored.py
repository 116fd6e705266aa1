"""A policy that gives every instance a cost for a request."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.instance import Instance, Role
from moonpool.disagg_proxy.conductor.policies.roles import Roles, is_worth_splitting

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

    def compare(self, request: Request, able: Sequence[Instance]) -> None:
        """They are those whose ``cost`` is asked next."""

    def cost(self, request: Request, instance: Instance, now_s: float) -> float:
        raise NotImplementedError

    def decode_cost(self, request: Request, instance: Instance, now_s: float) -> float:
        """Tokens in the KV cache of those that decode there, and will when their prompts are computed."""
        return instance.books.context_tokens + instance.coming_tokens

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        groups = self._roles.of(instances)
        if groups.takers:
            takers = groups.takers
            decode = self._least(takers, [self.decode_cost(request, each, now_s) for each in takers])
            able = groups.able(decode)
            if able and is_worth_splitting(request, decode):
                best, least = self._cheapest(request, able, now_s)
                if best.role is _PREFILL:
                    return self._choice(request, decode, best, least)
                return self._choice(request, best, None, least)
            return self._choice(request, decode, None, 0.0)
        best, least = self._cheapest(request, groups.alone, now_s)
        return self._choice(request, best, None, least)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        self._turn += 1
        self._turns[choice.decode.place] = self._turns[choice.computes.place] = self._turn

    def _cheapest(self, request: Request, able: Sequence[Instance], now_s: float) -> tuple[Instance, float]:
        self.compare(request, able)
        costs = [self.cost(request, each, now_s) for each in able]
        return self._least(able, costs), min(costs)

    def _least(self, instances: Sequence[Instance], costs: Sequence[float]) -> Instance:
        least = min(costs)
        turns = self._turns.get
        equal = [each for each, cost in zip(instances, costs, strict=True) if cost <= least]
        return min(equal, key=lambda each: turns(each.place, -1)) if len(equal) > 1 else equal[0]

    def _choice(self, request: Request, decode: Instance, prefill: Instance | None, cost: float) -> Choice:
        own = request.own_at(prefill or decode)
        return Choice(decode, prefill, why={"cost": cost, "own_tokens": own})
