"""The policy that chooses the fewest requests in flight."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policies.roles import Roles
from moonpool.disagg_proxy.conductor.worker import Role, Worker

_PREFILL = Role.PREFILL  # an enum's members are slow to look up


class LeastLoad:
    """By requests in flight; of equals the one that was chosen longest ago. Workers that compute prompts for
    others and those that serve requests whole are weighed together."""

    uses_tokens = False

    def __init__(self) -> None:
        self._roles = Roles()
        self._turns: dict[int, int] = {}
        self._turn = 0

    def choose(self, request: Request, workers: Sequence[Worker], now_s: float) -> Choice:
        """Costs one pass over the workers of each role. The request is split where, of the workers that may
        compute it, a prefill worker has the fewest requests."""
        groups = self._roles.of(workers)
        if not groups.decode_workers:
            return Choice(self._least(groups.self_sufficient))
        decode = self._least(groups.decode_workers)
        able = groups.able(decode)
        if not able:
            return Choice(decode)
        best = self._least(able)
        return Choice(decode, best) if best.role is _PREFILL else Choice(best)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        """Both workers of the choice go to the end of the order among equals."""
        self._turn += 1
        self._turns[choice.decode.place] = self._turns[choice.computes.place] = self._turn

    def _least(self, workers: Sequence[Worker]) -> Worker:
        return min(workers, key=lambda each: (each.in_flight, self._turns.get(each.place, -1)))
