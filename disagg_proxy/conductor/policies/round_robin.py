"""Each in its turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.instance import Instance, Role
from moonpool.disagg_proxy.conductor.policies.roles import Roles

_PREFILL = Role.PREFILL  # an enum's members are slow to look up
_BOTH = Role.BOTH


class RoundRobin:
    """Whose last turn is longest ago is next: requests for other models, and instances that leave or return,
    move no other's. Prefill and decode instances have a turn each; with any prefill instance there every
    request is split, but for the turns of instances that serve requests whole."""

    uses_tokens = False

    def __init__(self) -> None:
        self._roles = Roles()
        self._turn = 0
        self._computed: dict[int, int] = {}  # the last turn, by place
        self._decoded: dict[int, int] = {}

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        groups = self._roles.of(instances)
        if not groups.takers:
            return Choice(_next(groups.alone, self._computed))
        kinds = {each.alone for each in groups.takers}
        computes = _next((each for kind in kinds for each in groups.computing[kind]), self._computed)
        if computes.role is not _PREFILL:
            return Choice(computes)
        takers = [each for each in groups.takers if each.alone is computes.alone] or groups.takers
        # A whole engine has its turn to compute.
        decode = _next([each for each in takers if each.role is not _BOTH] or takers, self._decoded)
        return Choice(computes) if decode.role is _PREFILL else Choice(decode, computes)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        self._turn += 1
        self._computed[choice.computes.place] = self._turn
        if choice.prefill is not None:
            self._decoded[choice.decode.place] = self._turn


def _next(group: Iterable[Instance], turns: Mapping[int, int]) -> Instance:
    return min(group, key=lambda each: turns.get(each.place, 0))  # of those without a turn the first
