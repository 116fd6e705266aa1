"""Which instances may do what, and when prefill and decode apart are worth it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from math import inf

from moonpool._native import Candidates
from moonpool.disagg_proxy.conductor.choice import Request
from moonpool.disagg_proxy.conductor.flow import harm
from moonpool.disagg_proxy.conductor.instance import Instance, Role

_PREFILL = Role.PREFILL  # an enum's members are slow to look up
_BOTH = Role.BOTH
HARM_EVERY_S = 1.0  # it is an average over a minute
KNOWN_MAX = 16  # tuples of instances: of each model and kind of request one is in use
SPLIT_TOKENS_MIN = 256  # a shorter rest is computed where it is decoded


def computers(instances: Sequence[Instance]) -> list[Instance]:
    """Those that compute prompts, for others or for themselves."""
    return [instance for instance in instances if instance.role is _PREFILL or instance.role is _BOTH]


def decoders(instances: Sequence[Instance]) -> list[Instance]:
    """Those that answer; when there is none, the prefill engines, which can do it, too."""
    return [instance for instance in instances if instance.role is not _PREFILL] or list(instances)


class Group(tuple[Instance, ...]):
    """Instances to choose among. candidates: the same, to be weighed all at once."""

    _harm = 0.0
    _harm_at_s = -inf

    @cached_property
    def candidates(self) -> Candidates:
        return Candidates(self)

    def harm(self, now_s: float) -> float:
        """What ``flow.harm`` says of them, up to HARM_EVERY_S old."""
        if not 0.0 <= now_s - self._harm_at_s < HARM_EVERY_S:
            self._harm, self._harm_at_s = harm([instance.flow for instance in self], now_s), now_s
        return self._harm


Groups = tuple[Group, Group, Group]


class Roles:
    """The instances by what they may do; asked about one of the last tuples again it need not look."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Sequence[Instance], Groups]] = {}  # by the tuple's identity

    def of(self, instances: Sequence[Instance]) -> Groups:
        """(those that answer, those that compute for others, those that do both)"""
        known = self._known.get(id(instances))
        if known is not None and known[0] is instances:
            return known[1]
        prefill = [instance for instance in instances if instance.role is _PREFILL]
        both = [instance for instance in instances if instance.role is _BOTH]
        found = (Group(decoders(instances)), Group(prefill), Group(both))
        if isinstance(instances, tuple):  # a list may change
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[id(instances)] = (instances, found)
        return found


def is_worth_splitting(request: Request, decode: Instance) -> bool:
    """Whether the part of the prompt that the decode instance lacks is long enough for a hand-over, or would
    keep those that decode there from their next token for too long. A prompt of unknown length is, and any
    where the instance computes none."""
    own = request.own_at(decode)
    if not request.tokens or not decode.alone:
        return True
    if request.tokens - max(own, request.pool) >= SPLIT_TOKENS_MIN:
        return True
    if request.gap_s == math.inf or not decode.books.decodes:
        return False
    stall_s = decode.prefill_model.predict(request.tokens, own, request.from_pool(decode))
    return decode.gap_s(request.tokens) + stall_s > request.gap_s
