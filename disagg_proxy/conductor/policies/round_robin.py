"""The policy that gives each worker its turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policies.roles import Roles
from moonpool.disagg_proxy.conductor.worker import Role, Worker

_PREFILL = Role.PREFILL  # an enum's members are slow to look up
_BOTH = Role.BOTH


class RoundRobin:
    """The worker whose last turn is longest ago is next, so that requests for other models, and workers that
    leave or return, move no other's turn. Prefill and decode workers have separate turns; where there is a
    prefill worker every request is split, except in the turn of a worker that serves requests whole."""

    uses_tokens = False

    def __init__(self) -> None:
        self._roles = Roles()
        self._turn = 0
        self._computed: dict[int, int] = {}  # the last turn, by place
        self._decoded: dict[int, int] = {}

    def choose(self, request: Request, workers: Sequence[Worker], now_s: float) -> Choice:
        """Looks at neither load nor prompt. Changes no turn: ``sent`` does."""
        groups = self._roles.of(workers)
        if not groups.decode_workers:
            return Choice(_next(groups.self_sufficient, self._computed))
        kinds = {each.self_sufficient for each in groups.decode_workers}
        computes = _next((each for kind in kinds for each in groups.computing[kind]), self._computed)
        if computes.role is not _PREFILL:
            return Choice(computes)
        kind = computes.self_sufficient
        paired = [each for each in groups.decode_workers if each.self_sufficient is kind]
        paired = paired or list(groups.decode_workers)
        # The turn to compute is a whole worker's.
        decode = _next([each for each in paired if each.role is not _BOTH] or paired, self._decoded)
        return Choice(computes) if decode.role is _PREFILL else Choice(decode, computes)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        """Gives the turn to the workers of the choice. Turns to compute and turns to decode are counted
        apart."""
        self._turn += 1
        self._computed[choice.computes.place] = self._turn
        if choice.prefill is not None:
            self._decoded[choice.decode.place] = self._turn


def _next(group: Iterable[Worker], turns: Mapping[int, int]) -> Worker:
    return min(group, key=lambda each: turns.get(each.place, 0))  # workers without a turn go first
