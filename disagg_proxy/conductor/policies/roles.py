"""Which instances may do what, and when prefill and decode apart are worth it."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Request
from moonpool.disagg_proxy.conductor.instance import Instance, Role

_PREFILL = Role.PREFILL  # an enum's members are slow to look up
SPLIT_TOKENS_MIN = 256  # a shorter rest is computed where it is decoded


def prefillers(instances: Sequence[Instance]) -> list[Instance]:
    return [instance for instance in instances if instance.role is _PREFILL]


def decoders(instances: Sequence[Instance]) -> list[Instance]:
    """Those that answer; when there is none, the prefill engines, which can do it, too."""
    return [instance for instance in instances if instance.role is not _PREFILL] or list(instances)


def is_worth_splitting(request: Request, decode: Instance) -> bool:
    """Whether the part of the prompt that the decode instance lacks is long enough for a hand-over. A prompt
    of unknown length is."""
    if not request.tokens:
        return True
    return request.tokens - max(request.own_at(decode), request.pool) >= SPLIT_TOKENS_MIN
