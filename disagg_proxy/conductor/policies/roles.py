"""Which instances may do what, and when prefill and decode apart are worth it."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Request
from moonpool.disagg_proxy.conductor.instance import Instance, Role

_PREFILL = Role.PREFILL  # an enum's members are slow to look up
_BOTH = Role.BOTH
SPLIT_TOKENS_MIN = 256  # a shorter rest is computed where it is decoded


def prefillers(instances: Sequence[Instance]) -> list[Instance]:
    return [instance for instance in instances if instance.role is _PREFILL]


def decoders(instances: Sequence[Instance]) -> list[Instance]:
    """Those that answer; when there is none, the prefill engines, which can do it, too."""
    return [instance for instance in instances if instance.role is not _PREFILL] or list(instances)


class Roles:
    """The instances by what they may do; asked about the same tuple again it need not look."""

    def __init__(self) -> None:
        self._of: Sequence[Instance] | None = None
        self._found: tuple[Sequence[Instance], Sequence[Instance], Sequence[Instance]] = ((), (), ())

    def of(
        self, instances: Sequence[Instance]
    ) -> tuple[Sequence[Instance], Sequence[Instance], Sequence[Instance]]:
        """(those that answer, those that compute for others, those that do both)"""
        if instances is not self._of:
            both = [instance for instance in instances if instance.role is _BOTH]
            self._found = (decoders(instances), prefillers(instances), both)
            self._of = instances if isinstance(instances, tuple) else None  # a list may change
        return self._found


def is_worth_splitting(request: Request, decode: Instance) -> bool:
    """Whether the part of the prompt that the decode instance lacks is long enough for a hand-over. A prompt
    of unknown length is, and any where the instance computes none."""
    if not request.tokens or not decode.alone:
        return True
    return request.tokens - max(request.own_at(decode), request.pool) >= SPLIT_TOKENS_MIN
