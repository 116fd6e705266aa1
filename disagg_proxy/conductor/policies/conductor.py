"""Algorithm 1 of the Mooncake paper (FAST '25) with the transfer term, and with what a choice costs others.

    for each worker i that computes prompts, with u_i seconds of prefill in its queue:
        fetch what the pool holds behind its own, where that is predicted to be sooner than to compute it
        x_i = transfer + prefill(n, own, fetched)
        cost = urgency (u_i + x_i)  +  delay x_i (u_i + x_i / 2)  +  reuse b_i (n - own)
               its own time            later requests' time         blocks that are driven out
    where other proxies choose at the same time, draw one of the cheapest (``Candidates::draw``); else
    take the least; of equals (within 1 ms) the longest match, then the fewest requests, then the one that was
        chosen longest ago; a conversation stays where it was, within the noise of the predictions
    decode: among those with room for prompt and answer, the least predicted gap between tokens
    where some engines serve requests whole beside others for prefill and decode: the best of those, at
        cost + x (requests that decode there), or the best pair, at cost + urgency hand-over; so decode
        engines, too, for what makes no gap of more than 0.3 s, where a prefill engine has less of it or would
        keep it waiting

The paper chooses between fetching and computing by a threshold set by hand; here the model does. Affinity
needs no slack set by hand, either: where a prefix lies work is saved, and what saved work is worth to those
that come later (``arrival_rate.marginal_delay``) grows with the load. docs/conductor.md has the sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policies.roles import (
    SPLIT_TOKENS_MIN,
    Group,
    Groups,
    Roles,
    is_worth_splitting,
)
from moonpool.disagg_proxy.conductor.reuse_estimator import ReuseEstimator
from moonpool.disagg_proxy.conductor.sessions import Sessions
from moonpool.disagg_proxy.conductor.worker import Role, Worker

TRY_SHARE = 0.02  # of requests' time, that fetches which seem slower may cost: to discover a wrong model
TRY_MOST = 20.0  # times a request's time that may be saved up for that
GAP_MOST_S = 0.3  # between two tokens, for a prompt in between, without an objective: the paper's loosest
_PREFILL = Role.PREFILL  # an enum's members are slow to look up


class _Found(NamedTuple):
    """The worker that is to compute a prompt, and why. ttft_s: without a hand-over. lost_s: by fetching
    rather than computing. gap_s: between its tokens, if it answers, too."""

    worker: Worker
    reason: str
    ttft_s: float
    prefill_s: float
    transfer_s: float
    own: int
    fetches: bool
    lost_s: float
    cost: float
    gap_s: float


class Conductor:
    """The policy of the name ``conductor``. Not thread safe: the scheduler's driver holds a lock. All workers
    of a group are weighed in one call into C++."""

    uses_tokens = True

    def __init__(self) -> None:
        self._turn = 0
        self._roles = Roles()
        self._reuse = ReuseEstimator()
        self._sessions = Sessions()
        self._spare_s = 0.0  # for fetches that seem slower

    def choose(self, request: Request, workers: Sequence[Worker], now_s: float) -> Choice:
        """Algorithm 1, as at the top of this file. Each worker's load and models must be up to date to
        ``now_s``."""
        groups = self._roles.of(workers)
        if groups.decode_workers:
            decode, gap_s = self._decode(request, groups.decode_workers, now_s)
            if is_worth_splitting(request, decode):
                taken = decode if decode.role is _PREFILL else None  # it is the only one that answers
                best = self._compute(
                    request, groups.prefill_workers[decode.self_sufficient], now_s, without=taken
                )
                handover_s = decode.handover_model.predict(request.tokens)
                apart = best.cost + request.urgency * handover_s
                whole = self._beside(request, groups, best, now_s)
                if whole is None or apart < whole.cost:
                    if best.worker is decode:
                        return self._choice(request, decode, None, best, gap_s)
                    return self._choice(request, decode, best.worker, best, gap_s, handover_s)
                return self._whole(request, whole)
        return self._whole(request, self._compute(request, groups.self_sufficient, now_s))

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        """Takes turns, the spare seconds for tries, block reuse and the session's worker into account."""
        computes, decode = choice.computes, choice.decode
        self._turn += 1
        computes.turn = decode.turn = self._turn
        own, in_pool = request.own_at(computes), request.from_pool(computes)
        if in_pool and computes.obeys:  # what may be spent on fetches that seem slower, and what was
            ttft_s = float(choice.why.get("wait_s", 0.0)) + choice.prefill_s
            self._spare_s = min(self._spare_s + TRY_SHARE * ttft_s, TRY_MOST * ttft_s)
            self._spare_s = max(self._spare_s - choice.lost_s, 0.0)
        self._reuse.observe(request.tokens - own, own + (in_pool if choice.fetch else 0))
        self._sessions.keep(request.session, computes, request.tokens)

    def _beside(self, request: Request, groups: Groups, apart: _Found, now_s: float) -> _Found | None:
        """The worker that would serve the request without a hand-over, at the least cost to itself and to
        requests that decode there. apart: the prefill worker that would compute it. Decode workers are
        considered only if the request would wait at ``apart``, or if they hold so much more of the prompt
        that no hand-over is worth it."""
        whole = self._compute(request, groups.whole, now_s, stalled=1.0) if groups.whole else None
        if not groups.decoding or not request.tokens:
            return whole
        found = self._compute(
            request,
            groups.decoding,
            now_s,
            stalled=1.0,
            gap_most_s=min(request.gap_s, GAP_MOST_S),
            need_tokens=request.tokens + request.answer_tokens,
        )
        if found.cost == math.inf or (whole is not None and whole.cost <= found.cost):
            return whole
        waits = apart.ttft_s > apart.prefill_s
        there = max(apart.own, request.pool if apart.fetches else 0)
        if not waits and found.own < there + SPLIT_TOKENS_MIN:
            return whole
        return found._replace(reason="prefill_busy") if waits else found

    def _compute(
        self,
        request: Request,
        group: Group,
        now_s: float,
        *,
        without: Worker | None = None,
        stalled: float = 0.0,
        gap_most_s: float = math.inf,
        need_tokens: int = 0,
    ) -> _Found:
        """stalled: the weight of a second in which requests that decode there get no tokens. gap_most_s: the
        longest gap that a worker may have there, its queued prompts computed in the same step. need_tokens:
        the room that it must have. Where no worker is left the cost is infinite."""
        tokens, last_own = request.tokens, -1
        last = self._sessions.find(request.session)
        if last is not None and not tokens:  # assumed as long as the session's last prompt, which is there
            tokens = last_own = last.tokens
        which, *found = group.candidates.cheapest(
            tokens,
            request.own,
            request.pool,
            now_s,
            ahead_s=request.holder.ahead_s(now_s) if request.holder is not None else 0.0,
            urgency=request.urgency,
            marginal_delay=group.marginal_delay(now_s),
            reuse_probability=self._reuse.probability,
            spare_s=self._spare_s,
            stalled=stalled,
            gap_most_s=gap_most_s,
            need_tokens=need_tokens,
            without=without,
            last=last and last.worker,
            last_own=last_own,
            noise=last.worker.ttft_ratios.noise if last is not None else 0.0,
            unseen_s=group.unseen_s(now_s) if request.draws else 0.0,
        )
        return _Found(group[which], *found)

    @staticmethod
    def _decode(request: Request, group: Group, now_s: float) -> tuple[Worker, float]:
        need_tokens = request.tokens + request.answer_tokens
        which, gap_s = group.candidates.least_gap(request.tokens, need_tokens, now_s)
        return group[which], gap_s

    def _whole(self, request: Request, best: _Found) -> Choice:
        return self._choice(request, best.worker, None, best, best.gap_s)

    @staticmethod
    def _choice(
        request: Request,
        decode: Worker,
        prefill: Worker | None,
        best: _Found,
        gap_s: float,
        handover_s: float = 0.0,
    ) -> Choice:
        in_pool = request.from_pool(best.worker)
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
                "own_tokens": request.own_at(best.worker),
                "pool_tokens": in_pool,
                "reason": best.reason,
            },
            best.fetches or not in_pool,
            best.lost_s,
        )
