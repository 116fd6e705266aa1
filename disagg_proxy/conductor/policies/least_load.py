"""The fewest requests."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.instance import Instance, Role
from moonpool.disagg_proxy.conductor.policies.roles import Roles

_PREFILL = Role.PREFILL  # an enum's members are slow to look up


class LeastLoad:
    """By requests in flight; of equals the one that was chosen longest ago. Instances that compute
    prompts for others and those that serve requests whole are weighed together."""

    uses_tokens = False

    def __init__(self) -> None:
        self._roles = Roles()
        self._turns: dict[int, int] = {}
        self._turn = 0

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        groups = self._roles.of(instances)
        if not groups.takers:
            return Choice(self._least(groups.alone))
        decode = self._least(groups.takers)
        able = groups.able(decode)
        if not able:
            return Choice(decode)
        best = self._least(able)
        return Choice(decode, best) if best.role is _PREFILL else Choice(best)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        self._turn += 1
        self._turns[choice.decode.place] = self._turns[choice.computes.place] = self._turn

    def _least(self, instances: Sequence[Instance]) -> Instance:
        return min(instances, key=lambda each: (each.in_flight, self._turns.get(each.place, -1)))
