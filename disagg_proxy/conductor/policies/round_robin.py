"""Each in its turn."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.instance import Instance, Role


class RoundRobin:
    """The turn goes by place, so that an instance that leaves or returns moves no other's. Prefill and decode
    instances have a turn each; with any prefill instance there, every request is split."""

    uses_tokens = False

    def __init__(self) -> None:
        self._last = -1
        self._last_prefill = -1

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        decode = self._next(instances, self._last, prefill=False)
        prefill = self._next(instances, self._last_prefill, prefill=True)
        if decode is None:
            assert prefill is not None
            self._last_prefill = prefill.place
            return Choice(prefill)
        self._last = decode.place
        if prefill is not None:
            self._last_prefill = prefill.place
        return Choice(decode, prefill)

    @staticmethod
    def _next(instances: Sequence[Instance], last: int, *, prefill: bool) -> Instance | None:
        first: Instance | None = None
        for instance in instances:
            if (instance.role is Role.PREFILL) is not prefill:
                continue
            if instance.place > last:
                return instance
            first = first or instance
        return first
