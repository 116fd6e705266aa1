"""The policy that gives each worker its turn."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool._native import Turns
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
        self.turns = Turns()  # to compute a prompt
        self._decode_turns = Turns()

    def choose(self, request: Request, workers: Sequence[Worker], now_s: float) -> Choice:
        """Looks at neither load nor prompt. Changes no turn: ``sent`` does."""
        groups = self._roles.of(workers)
        if not groups.decode_workers:
            return Choice(_next(groups.self_sufficient, self.turns))
        kinds = {each.self_sufficient for each in groups.decode_workers}
        computes = _next([each for kind in kinds for each in groups.computing[kind]], self.turns)
        if computes.role is not _PREFILL:
            return Choice(computes)
        kind = computes.self_sufficient
        paired = [each for each in groups.decode_workers if each.self_sufficient is kind]
        paired = paired or list(groups.decode_workers)
        # The turn to compute is a whole worker's.
        decode = _next([each for each in paired if each.role is not _BOTH] or paired, self._decode_turns)
        return Choice(computes) if decode.role is _PREFILL else Choice(decode, computes)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        """Gives the turn to the workers of the choice. Turns to compute and turns to decode are counted
        apart."""
        self.turns.took(choice.computes.place)
        if choice.prefill is not None:
            self._decode_turns.took(choice.decode.place)


def _next(group: Sequence[Worker], turns: Turns) -> Worker:
    return group[turns.next([each.place for each in group])]
