"""Each in its turn."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.instance import Instance, Role

_PREFILL = Role.PREFILL  # an enum's members are slow to look up
_DECODE = Role.DECODE


class RoundRobin:
    """The turn goes by place, so that an instance that leaves or returns moves no other's. Prefill and decode
    instances have a turn each; with any prefill instance there every request is split, but for the turns of
    instances that serve requests whole."""

    uses_tokens = False

    def __init__(self) -> None:
        self._last = -1
        self._last_computing = -1

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        # Whose turn it is to answer, and to compute: the next behind the last one, else the first of all.
        decode = computes = None
        apart = False
        for instance in instances:
            role = instance.role
            if role is not _PREFILL and (decode is None or decode.place <= self._last < instance.place):
                decode = instance
            if role is not _DECODE and (
                computes is None or computes.place <= self._last_computing < instance.place
            ):
                computes = instance
            apart = apart or role is _PREFILL
        if decode is None:
            assert computes is not None
            return Choice(computes)
        if not apart or computes is None:
            return Choice(decode)
        return Choice(decode, computes) if computes.role is _PREFILL else Choice(computes)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        if choice.computes.role is not _DECODE:
            self._last_computing = choice.computes.place
        if choice.decode.role is not _PREFILL:
            self._last = choice.decode.place
