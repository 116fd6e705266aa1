"""Each in its turn."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.instance import Instance, Role
from moonpool.disagg_proxy.conductor.policies.roles import Roles

_PREFILL = Role.PREFILL  # an enum's members are slow to look up


class RoundRobin:
    """The turn goes by place, so that an instance that leaves or returns moves no other's. Prefill and decode
    instances have a turn each; with any prefill instance there every request is split, but for the turns of
    instances that serve requests whole."""

    uses_tokens = False

    def __init__(self) -> None:
        self._roles = Roles()
        self._last = -1
        self._last_computing = -1

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        groups = self._roles.of(instances)
        if not groups.takers:
            return Choice(_behind(groups.alone, self._last))
        decode = _behind(groups.takers, self._last)
        computes = _behind(groups.computing[decode.alone], self._last_computing)
        if computes.role is not _PREFILL or decode.role is _PREFILL:
            return Choice(computes)
        return Choice(decode, computes)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        self._last_computing = choice.computes.place
        self._last = choice.decode.place


def _behind(group: Sequence[Instance], place: int) -> Instance:
    """The next one in turn."""
    return next((each for each in group if each.place > place), group[0])
