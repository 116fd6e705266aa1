"""Algorithm 1 of the Mooncake paper (FAST '25), with the transfer term: the least predicted time to the first
token, then the decode instance that slows down least.

    for each instance that computes prompts:
        reuse what it holds itself and, behind that, what the pool holds
        TTFT = wait (seconds of prefill in line) + prefill(n, own, pool) [+ hand-over]
    take the least; of equals (within 1 ms) the longest match of its own, then the fewest requests, then the
        one that was chosen longest ago
    decode: among those with room for prompt and answer, the least predicted gap between tokens

The paper chooses between computing and fetching by a threshold set by hand; here the connector fetches what
the pool holds, and the model has learnt what a fetched token costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.instance import Instance, Role
from moonpool.disagg_proxy.conductor.policies.roles import decoders, is_worth_splitting, prefillers

EQUAL_S = 0.001
_BOTH = Role.BOTH  # an enum's members are slow to look up


class Conductor:
    uses_tokens = True

    def __init__(self) -> None:
        self._turn = 0
        self._turns: dict[int, int] = {}  # by place: when it was last chosen

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        answering, computing = decoders(instances), prefillers(instances)
        if computing:
            decode, gap_s = self._decode(request, answering)
            if is_worth_splitting(request, decode):
                handover_s = decode.handover_model.predict(request.tokens)
                apart = [instance for instance in computing if instance is not decode]
                best, ttft_s, prefill_s = self._compute(request, apart or computing, now_s)
                if best is decode:
                    return self._choice(request, best, None, ttft_s, prefill_s, gap_s, now_s)
                return self._choice(request, decode, best, ttft_s + handover_s, prefill_s, gap_s, now_s)
        together = [instance for instance in answering if instance.role is _BOTH]
        best, ttft_s, prefill_s = self._compute(request, together or answering, now_s)
        return self._choice(request, best, None, ttft_s, prefill_s, self._gap_s(request, best), now_s)

    def _compute(
        self, request: Request, instances: Sequence[Instance], now_s: float
    ) -> tuple[Instance, float, float]:
        """(the instance of the least TTFT, that TTFT, the prefill's part of it)"""
        ranked = []
        least_s = math.inf
        tokens, in_pool = request.tokens, request.pool
        for instance in instances:
            own = request.own_at(instance)
            prefill_s = instance.prefill_model.predict(tokens, own, in_pool - own if in_pool > own else 0)
            ttft_s = instance.books.wait_s(now_s) + prefill_s
            if ttft_s < least_s:
                least_s = ttft_s
            ranked.append((ttft_s, prefill_s, own, instance))
        near = [item for item in ranked if item[0] <= least_s + EQUAL_S]
        longest = max(own for _, _, own, _ in near)
        equal = [item for item in near if item[2] == longest]
        ttft_s, prefill_s, _, best = min(equal, key=lambda item: self._rank(item[3]))
        return best, ttft_s, prefill_s

    def _decode(self, request: Request, instances: Sequence[Instance]) -> tuple[Instance, float]:
        need = request.tokens + request.answer_tokens
        roomy = [instance for instance in instances if instance.has_room(need)] or instances
        gaps = [(round(self._gap_s(request, each), 4), each) for each in roomy]
        least_s = min(gap_s for gap_s, _ in gaps)
        return min((each for gap_s, each in gaps if gap_s == least_s), key=self._rank), least_s

    def _rank(self, instance: Instance) -> tuple[int, int]:
        """Of instances that are equal otherwise."""
        return instance.in_flight, self._turns.get(instance.place, -1)

    @staticmethod
    def _gap_s(request: Request, instance: Instance) -> float:
        books = instance.books
        return instance.decode_model.predict(books.decodes + 1, books.context_tokens + request.tokens)

    def _choice(
        self,
        request: Request,
        decode: Instance,
        prefill: Instance | None,
        ttft_s: float,
        prefill_s: float,
        gap_s: float,
        now_s: float,
    ) -> Choice:
        computes = prefill or decode
        self._turn += 1
        self._turns[computes.place] = self._turns[decode.place] = self._turn
        return Choice(
            decode,
            prefill,
            prefill_s,
            {
                "predicted_ttft_s": round(ttft_s, 4),
                "predicted_gap_s": round(gap_s, 5),
                "wait_s": round(computes.books.wait_s(now_s), 4),
                "prompt_tokens": request.tokens,
                "own_tokens": request.own_at(computes),
                "pool_tokens": request.from_pool(computes),
            },
        )
