"""Which instance may compute a prompt and which answers, and when prefill and decode apart are worth it.

The rule for all policies: a request is answered by one that needs no other, or by one whose prompt a
prefill engine of the same kind computes. Where such pairs can be made, the prefill engines are weighed beside
those that serve requests whole; where none can, all are weighed that answer alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import NamedTuple

from moonpool._native import Candidates
from moonpool.disagg_proxy.conductor.choice import Request
from moonpool.disagg_proxy.conductor.flow import harm
from moonpool.disagg_proxy.conductor.instance import Instance, Role

_PREFILL = Role.PREFILL  # an enum's members are slow to look up
_BOTH = Role.BOTH
_KINDS = (False, True)
_place = attrgetter("place")
HARM_EVERY_S = 1.0  # it is an average over a minute
KNOWN_MAX = 16  # tuples of instances: of each model and kind of request one is in use
SPLIT_TOKENS_MIN = 256  # a shorter rest is computed where it is decoded


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


class Groups(NamedTuple):
    """Each is ordered by place.

    alone: can answer without another's prefill. takers: can answer with it; none where no pair can be made.
    whole: of those alone the ones that are weighed beside pairs; decoding: the others, which compute a prompt
    only if that is short. givers: compute prompts for others, by whether those can answer alone; SGLang's
    cannot, and meet only each other. computing: givers and whole.
    """

    alone: Group
    takers: Group
    whole: Group
    decoding: Group
    givers: Mapping[bool, Group]
    computing: Mapping[bool, Group]

    @classmethod
    def of(cls, instances: Sequence[Instance]) -> Groups:
        prefill = [each for each in instances if each.role is _PREFILL]
        answering = decoders(instances)
        kinds = {each.alone for each in prefill}
        alone = [each for each in answering if each.alone]
        able = [each for each in answering if each.alone or each.role is not _PREFILL]
        takers = [each for each in able if each.alone in kinds]
        if not alone and not takers:  # none can serve it: the chosen one says why
            alone, takers = answering, answering if prefill else []
        pairs = frozenset(each.place for each in takers)
        whole = [each for each in alone if each.role is _BOTH or each.place not in pairs]
        givers = {kind: [each for each in prefill if each.alone is kind] or prefill for kind in _KINDS}
        return cls(
            Group(alone),
            Group(takers),
            Group(whole),
            Group(each for each in alone if each.role is Role.DECODE and each.alone and each.place in pairs),
            {kind: Group(givers[kind]) for kind in _KINDS},
            {kind: Group(sorted(givers[kind] + whole, key=_place)) for kind in _KINDS},
        )

    def able(self, decode: Instance) -> Sequence[Instance]:
        """Those that may compute a prompt for this taker; or instead of it, being whole."""
        able = self.computing[decode.alone]
        return [each for each in able if each is not decode] if decode.role is _PREFILL else able


class Roles:
    """The instances by what they may do; asked about one of the last tuples again it need not look."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Sequence[Instance], Groups]] = {}  # by the tuple's identity

    def of(self, instances: Sequence[Instance]) -> Groups:
        known = self._known.get(id(instances))
        if known is not None and known[0] is instances:
            return known[1]
        found = Groups.of(instances)
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
