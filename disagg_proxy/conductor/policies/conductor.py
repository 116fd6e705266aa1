"""Algorithm 1 of the Mooncake paper (FAST '25) with the transfer term, and with what a choice costs others.

    for each instance i that computes prompts, with u_i seconds of prefill in line:
        fetch what the pool holds behind its own, where that is predicted to be sooner than to compute it
        x_i = transfer + prefill(n, own, fetched)
        cost = urgency (u_i + x_i)  +  harm x_i (u_i + x_i / 2)  +  chance b_i (n - own)
               its own time            later requests' time         blocks that are driven out
    take the least; of equals (within 1 ms) the longest match, then the fewest requests, then the one that was
        chosen longest ago; a conversation stays where it was, when predictions are no better than to tell
    decode: among those with room for prompt and answer, the least predicted gap between tokens

The paper chooses between fetching and computing by a threshold set by hand; here the model does. Affinity
needs no slack set by hand, either: where a prefix lies work is saved, and what saved work is worth to those
who come later (``flow.harm``) grows with the load. docs/conductor.md has the sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.flow import harm
from moonpool.disagg_proxy.conductor.instance import Instance, Role
from moonpool.disagg_proxy.conductor.policies.roles import Roles, is_worth_splitting
from moonpool.disagg_proxy.conductor.sessions import Last, Sessions
from moonpool.disagg_proxy.conductor.space import Space

EQUAL_S = 0.001
EQUAL_GAP_S = 0.00005
PRIORITY_MOST = 4  # beyond it a priority weighs no more, either way
HARM_EVERY_S = 1.0  # it is an average over a minute
TRY_SHARE = 0.02  # of requests' time, that fetches may cost which seem not worth it: to find out a mistake
TRY_MOST = 20.0  # times a request's time that may be saved up for that
_PREFILL = Role.PREFILL  # an enum's members are slow to look up
_K = 1e-3
_M = 1e-6


class _Found(NamedTuple):
    """cost: what the policy compares. ttft_s: without a hand-over."""

    cost: float
    ttft_s: float
    prefill_s: float
    transfer_s: float
    own: int
    fetches: bool
    instance: Instance
    lost_s: float  # by fetching rather than computing


_Row = tuple[float, float, float, float, int, bool, Instance, float]  # a _Found, sooner made


class Conductor:
    uses_tokens = True

    def __init__(self) -> None:
        self._turn = 0
        self._roles = Roles()
        self._space = Space()
        self._sessions = Sessions()
        self._harm = 0.0
        self._harm_at_s = -math.inf
        self._harm_of: Sequence[Instance] = ()
        self._spare_s = 0.0  # for tries

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        answering, computing, together = self._roles.of(instances)
        if computing:
            decode, gap_s = self._decode(request, answering)
            if is_worth_splitting(request, decode):
                apart = computing
                if decode.role is _PREFILL:  # nobody else answers
                    apart = [instance for instance in computing if instance is not decode] or computing
                best, reason = self._compute(request, apart, now_s)
                prefill = None if best.instance is decode else best.instance
                return self._choice(request, decode, prefill, best, gap_s, reason)
        best, reason = self._compute(request, together or answering, now_s)
        return self._choice(request, best.instance, None, best, self._gap_s(request, best.instance), reason)

    def _compute(self, request: Request, instances: Sequence[Instance], now_s: float) -> tuple[_Found, str]:
        """(the instance to compute it, why)"""
        tokens, in_pool, owned = request.tokens, request.pool, request.own
        last = self._sessions.find(request.session)
        if last is not None and not tokens:  # as long as its last prompt, which is there
            tokens = last.tokens
        ahead_s = request.holder.ahead_s(now_s) if request.holder is not None else 0.0
        later = self._harm_now(instances, now_s)
        urgency = 2.0 ** max(min(request.priority, PRIORITY_MOST), -PRIORITY_MOST)
        chance = self._space.chance * _K
        spare_s = self._spare_s
        known = len(owned)
        found = []
        least = math.inf
        for instance in instances:
            place = instance.place
            own = owned[place] if place < known else 0
            if not request.tokens and last is not None and instance is last.instance:
                own = tokens
            # PrefillModel.predict, written out: most of a decision is this loop.
            a, b, c, latency, token, hidden, share = instance.prefill_model.regression.coefficients
            rest = tokens - own
            prefill_s = a + b * _K * rest + c * _M * (tokens * tokens - own * own)
            transfer_s = lost_s = 0.0
            pull = in_pool - own
            fetches = pull > 0
            wait_s = instance.books.wait_s(now_s)
            if fetches:
                transfer_s = pull_s = latency + token * _K * pull + share * ahead_s
                if wait_s:  # it hides behind others, and takes its time on the links nevertheless
                    transfer_s = hidden * _K * pull
                    pull_s = transfer_s if transfer_s > pull_s else pull_s
                saved_s = b * _K * pull + c * _M * (in_pool * in_pool - own * own)
                if pull_s < saved_s + spare_s or not instance.obeys:
                    prefill_s += transfer_s - saved_s
                    if pull_s > saved_s:
                        lost_s = pull_s - saved_s
                else:
                    transfer_s, fetches = 0.0, False
            ttft_s = wait_s + prefill_s
            cost = urgency * ttft_s + later * prefill_s * (wait_s + 0.5 * prefill_s) + chance * b * rest
            if cost < least:
                least = cost
            found.append((cost, ttft_s, prefill_s, transfer_s, own, fetches, instance, lost_s))
        best, reason = self._best(found, least, last)
        return _Found._make(best), reason

    def _best(self, found: list[_Row], least: float, last: Last | None) -> tuple[_Row, str]:
        if len(found) == 1:
            return found[0], "only"
        near = least + EQUAL_S
        equal = [each for each in found if each[0] <= near]
        if last is not None:
            stays = next((each for each in found if each[6] is last.instance), None)
            if stays is not None and stays[0] <= near + last.instance.ttft_ratios.noise * stays[1]:
                return stays, "session"
        best, reason = equal[0], ""
        if len(equal) > 1:
            longest = max(each[4] for each in equal)
            longer = [each for each in equal if each[4] == longest]
            reason = "match" if len(longer) < len(equal) else "turn"
            best = longer[0]
            if len(longer) > 1:
                instance = self._least([each[6] for each in longer])
                best = next(each for each in longer if each[6] is instance)
        if not reason:
            reason = "least_time" if best[1] <= min(each[1] for each in found) + EQUAL_S else "spares_others"
        return best, reason

    def _decode(self, request: Request, instances: Sequence[Instance]) -> tuple[Instance, float]:
        need = request.tokens + request.answer_tokens
        roomy = [
            instance
            for instance in instances
            if not instance.room_tokens or instance.has_room(need + instance.coming_tokens)
        ]
        equal: list[Instance] = []
        least_s = math.inf
        for instance in roomy or instances:
            gap_s = self._gap_s(request, instance)
            if gap_s < least_s - EQUAL_GAP_S:
                equal.clear()
                least_s = gap_s
            if gap_s < least_s + EQUAL_GAP_S:
                equal.append(instance)
        return equal[0] if len(equal) == 1 else self._least(equal), least_s

    def _harm_now(self, instances: Sequence[Instance], now_s: float) -> float:
        if instances is not self._harm_of or not 0.0 <= now_s - self._harm_at_s < HARM_EVERY_S:
            self._harm = harm([instance.flow for instance in instances], now_s)
            self._harm_of, self._harm_at_s = instances, now_s
        return self._harm

    def _least(self, instances: Sequence[Instance]) -> Instance:
        """Of instances that are equal otherwise: the fewest requests, then who was chosen longest ago."""
        return min(instances, key=lambda each: (each.in_flight, each.turn))

    def _count(self, best: _Found) -> None:
        """What may be spent on tries, and what was."""
        self._spare_s = min(self._spare_s + TRY_SHARE * best.ttft_s, TRY_MOST * best.ttft_s)
        self._spare_s = max(self._spare_s - best.lost_s, 0.0)

    @staticmethod
    def _gap_s(request: Request, instance: Instance) -> float:
        books = instance.books
        return instance.decode_model.predict(
            books.decodes + instance.coming + 1,
            books.context_tokens + instance.coming_tokens + request.tokens,
        )

    def _choice(
        self,
        request: Request,
        decode: Instance,
        prefill: Instance | None,
        best: _Found,
        gap_s: float,
        reason: str,
    ) -> Choice:
        computes = best.instance
        self._turn += 1
        computes.turn = decode.turn = self._turn
        in_pool = request.from_pool(computes)
        if in_pool and computes.obeys:
            self._count(best)
        stored = request.tokens - best.own
        self._space.observe(stored, best.own + (in_pool if best.fetches else 0))
        self._sessions.keep(request.session, computes, request.tokens)
        handover_s = 0.0 if prefill is None else decode.handover_model.predict(request.tokens)
        return Choice(
            decode,
            prefill,
            best.prefill_s,
            {
                "predicted_ttft_s": best.ttft_s + handover_s,
                "predicted_gap_s": gap_s,
                "wait_s": best.ttft_s - best.prefill_s,
                "transfer_s": best.transfer_s,
                "prefill_s": best.prefill_s - best.transfer_s,
                "handover_s": handover_s,
                "prompt_tokens": request.tokens,
                "own_tokens": request.own_at(computes),
                "pool_tokens": in_pool,
                "reason": reason,
            },
            best.fetches or not in_pool,
        )
