"""The fewest requests."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.instance import Instance
from moonpool.disagg_proxy.conductor.policies.roles import decoders, prefillers


class LeastLoad:
    """By requests in flight; of equals the one that was chosen longest ago."""

    uses_tokens = False

    def __init__(self) -> None:
        self._turns: dict[int, int] = {}
        self._turn = 0

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        decode = self._least(decoders(instances))
        apart = [instance for instance in prefillers(instances) if instance is not decode]
        return Choice(decode, self._least(apart) if apart else None)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        self._turn += 1
        self._turns[choice.decode.place] = self._turns[choice.computes.place] = self._turn

    def _least(self, instances: Sequence[Instance]) -> Instance:
        return min(instances, key=lambda each: (each.in_flight, self._turns.get(each.place, -1)))
