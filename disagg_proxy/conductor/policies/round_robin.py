"""Each in its turn."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.instance import Instance, Role

_PREFILL = Role.PREFILL  # an enum's members are slow to look up


class RoundRobin:
    """The turn goes by place, so that an instance that leaves or returns moves no other's. Prefill and decode
    instances have a turn each; with any prefill instance there, every request is split."""

    uses_tokens = False

    def __init__(self) -> None:
        self._last = -1
        self._last_prefill = -1

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        decode = prefill = None  # whose turn it is: the next behind the last one, else the first of all
        for instance in instances:
            if instance.role is _PREFILL:
                if prefill is None or prefill.place <= self._last_prefill < instance.place:
                    prefill = instance
            elif decode is None or decode.place <= self._last < instance.place:
                decode = instance
        if decode is None:
            assert prefill is not None
            return Choice(prefill)
        return Choice(decode, prefill)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        for each in (choice.decode, choice.computes):
            if each.role is _PREFILL:
                self._last_prefill = each.place
            else:
                self._last = each.place
