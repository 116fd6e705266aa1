"""The fewest requests."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.instance import Instance, Role
from moonpool.disagg_proxy.conductor.policies.roles import computers, decoders

_BOTH = Role.BOTH  # an enum's members are slow to look up


class LeastLoad:
    """By requests in flight; of equals the one that was chosen longest ago. Who computes prompts for others
    and who serves requests whole are weighed together."""

    uses_tokens = False

    def __init__(self) -> None:
        self._turns: dict[int, int] = {}
        self._turn = 0

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        decode = self._least(decoders(instances))
        apart = [each for each in computers(instances) if each is not decode or each.role is _BOTH]
        best = self._least(apart) if apart else decode
        return Choice(best) if best.role is _BOTH else Choice(decode, None if best is decode else best)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        self._turn += 1
        self._turns[choice.decode.place] = self._turns[choice.computes.place] = self._turn

    def _least(self, instances: Sequence[Instance]) -> Instance:
        return min(instances, key=lambda each: (each.in_flight, self._turns.get(each.place, -1)))
