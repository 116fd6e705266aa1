"""Which workers may compute a prompt, which may answer, and when separate prefill and decode pay.

The rule for all policies: a request is answered by a worker that needs no other, or by one whose prompt a
prefill worker of the same kind computes. Where such pairs exist, prefill workers are weighed beside those
that serve requests whole; where none exist, all workers that answer alone are weighed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import NamedTuple

from moonpool._native import Candidates
from moonpool.disagg_proxy.conductor.arrival_rate import marginal_delay
from moonpool.disagg_proxy.conductor.choice import Request
from moonpool.disagg_proxy.conductor.worker import Role, Worker, answering

_PREFILL = Role.PREFILL  # an enum's members are slow to look up
_BOTH = Role.BOTH
_KINDS = (False, True)
_place = attrgetter("place")
DELAY_EVERY_S = 1.0  # it is an average over a minute
KNOWN_MAX = 16  # tuples of workers: of each model and kind of request one is in use
SPLIT_TOKENS_MIN = 256  # tokens to compute; fewer are computed by the decode worker


class Group(tuple[Worker, ...]):
    """Workers to choose among. candidates: the same in C++, to be weighed in one call."""

    _delay = _unseen = 0.0
    _known_at_s = -inf

    @cached_property
    def candidates(self) -> Candidates:
        """The C++ form, made at the first use and kept as long as the group."""
        return Candidates(self)

    def marginal_delay(self, now_s: float) -> float:
        """What ``arrival_rate.marginal_delay`` says of them, up to DELAY_EVERY_S old."""
        self._refresh(now_s)
        return self._delay

    def unseen_s(self, now_s: float) -> float:
        """Seconds of prefill that other proxies are expected to have sent to them and have not reported yet,
        up to DELAY_EVERY_S old."""
        self._refresh(now_s)
        return self._unseen

    def _refresh(self, now_s: float) -> None:
        if not 0.0 <= now_s - self._known_at_s < DELAY_EVERY_S:
            self._known_at_s = now_s
            self._delay = marginal_delay([worker.arrival_rate for worker in self], now_s)
            self._unseen = sum(worker.remote_arrivals.unseen_s(now_s) for worker in self)


class Groups(NamedTuple):
    """Each is ordered by place.

    self_sufficient: can prefill and decode. decode_workers: need a prefill worker, or can use one; empty if
    no pair can be made. whole: the self-sufficient that are weighed beside pairs; decoding: the others, which
    compute a prompt only if that is short. prefill_workers: compute prompts for others, by whether those are
    self-sufficient; SGLang's are not, and work only with each other. computing: prefill_workers and whole.
    """

    self_sufficient: Group
    decode_workers: Group
    whole: Group
    decoding: Group
    prefill_workers: Mapping[bool, Group]
    computing: Mapping[bool, Group]

    @classmethod
    def of(cls, workers: Sequence[Worker]) -> Groups:
        """Sorts the workers by what they may do, in one pass for each group. Where none can serve a request,
        all workers stand in, so that the engine's refusal says why."""
        prefill = [each for each in workers if each.role is _PREFILL]
        answers = answering(workers)
        kinds = {each.self_sufficient for each in prefill}
        alone = [each for each in answers if each.self_sufficient]
        able = [each for each in answers if each.self_sufficient or each.role is not _PREFILL]
        paired = [each for each in able if each.self_sufficient in kinds]
        if not alone and not paired:  # none can serve the request: the chosen worker's refusal says why
            alone, paired = answers, answers if prefill else []
        places = frozenset(each.place for each in paired)
        whole = [each for each in alone if each.role is _BOTH or each.place not in places]
        decoding = [
            each
            for each in alone
            if each.role is Role.DECODE and each.self_sufficient and each.place in places
        ]
        computing = {
            kind: [each for each in prefill if each.self_sufficient is kind] or prefill for kind in _KINDS
        }
        return cls(
            Group(alone),
            Group(paired),
            Group(whole),
            Group(decoding),
            {kind: Group(computing[kind]) for kind in _KINDS},
            {kind: Group(sorted(computing[kind] + whole, key=_place)) for kind in _KINDS},
        )

    def able(self, decode: Worker) -> Sequence[Worker]:
        """Workers that may compute a prompt for this decode worker, and whole ones that may serve the request
        in its place."""
        able = self.computing[decode.self_sufficient]
        return [each for each in able if each is not decode] if decode.role is _PREFILL else able


class Roles:
    """The groups of the last tuples of workers, remembered by the tuple's identity."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Sequence[Worker], Groups]] = {}  # by the tuple's identity

    def of(self, workers: Sequence[Worker]) -> Groups:
        """The groups of these workers. Only a tuple is remembered, by its identity, up to KNOWN_MAX of them:
        a list may change."""
        known = self._known.get(id(workers))
        if known is not None and known[0] is workers:
            return known[1]
        found = Groups.of(workers)
        if isinstance(workers, tuple):  # a list may change
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[id(workers)] = (workers, found)
        return found


def is_worth_splitting(request: Request, decode: Worker) -> bool:
    """Whether the decode worker lacks enough of the prompt for a hand-over, or would delay the next token of
    requests that decode there for too long. True for a prompt of unknown length, and where the worker
    computes no prompts."""
    own = request.own_at(decode)
    if not request.tokens or not decode.self_sufficient:
        return True
    if request.tokens - max(own, request.pool) >= SPLIT_TOKENS_MIN:
        return True
    if request.gap_s == math.inf or not decode.load.decodes:
        return False
    # This prompt is the stall: the usual one of decode.load.stall_s is left out.
    stall_s = decode.prefill_s(request.tokens, own, request.from_pool(decode))
    return decode.gap_s(request.tokens) + stall_s > request.gap_s
