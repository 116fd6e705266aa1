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
from moonpool.disagg_proxy.conductor.policies.roles import Roles, is_worth_splitting

EQUAL_S = 0.001
_PREFILL = Role.PREFILL  # an enum's members are slow to look up


class Conductor:
    uses_tokens = True

    def __init__(self) -> None:
        self._turn = 0
        self._turns: dict[int, int] = {}  # by place: when it was last chosen
        self._roles = Roles()

    def choose(self, request: Request, instances: Sequence[Instance], now_s: float) -> Choice:
        answering, computing, together = self._roles.of(instances)
        if computing:
            decode, gap_s = self._decode(request, answering)
            if is_worth_splitting(request, decode):
                apart = computing
                if decode.role is _PREFILL:  # nobody else answers
                    apart = [instance for instance in computing if instance is not decode] or computing
                best, ttft_s, prefill_s = self._compute(request, apart, now_s)
                if best is decode:
                    return self._choice(request, best, None, ttft_s, prefill_s, gap_s)
                handover_s = decode.handover_model.predict(request.tokens)
                return self._choice(request, decode, best, ttft_s, prefill_s, gap_s, handover_s)
        best, ttft_s, prefill_s = self._compute(request, together or answering, now_s)
        return self._choice(request, best, None, ttft_s, prefill_s, self._gap_s(request, best))

    def _compute(
        self, request: Request, instances: Sequence[Instance], now_s: float
    ) -> tuple[Instance, float, float]:
        """(the instance of the least TTFT, that TTFT, the prefill's part of it)"""
        ranked = []
        least_s = math.inf
        tokens, in_pool, owned = request.tokens, request.pool, request.own
        known = len(owned)
        for instance in instances:
            own = owned[instance.place] if instance.place < known else 0
            prefill_s = instance.prefill_model.predict(tokens, own, in_pool - own if in_pool > own else 0)
            ttft_s = instance.books.wait_s(now_s) + prefill_s
            if ttft_s < least_s:
                least_s = ttft_s
            ranked.append((ttft_s, prefill_s, own, instance))
        near_s = least_s + EQUAL_S
        equal: list[tuple[float, float, int, Instance]] = []
        longest = -1
        for item in ranked:
            if item[0] > near_s or item[2] < longest:
                continue
            if item[2] > longest:
                equal.clear()
                longest = item[2]
            equal.append(item)
        found = equal[0]
        if len(equal) > 1:
            best = self._least([item[3] for item in equal])
            found = next(item for item in equal if item[3] is best)
        return found[3], found[0], found[1]

    def _decode(self, request: Request, instances: Sequence[Instance]) -> tuple[Instance, float]:
        tokens = request.tokens
        need = tokens + request.answer_tokens
        roomy = [instance for instance in instances if not instance.room_tokens or instance.has_room(need)]
        equal: list[Instance] = []
        least_s = math.inf
        for instance in roomy or instances:
            gap_s = round(self._gap_s(request, instance), 4)
            if gap_s < least_s:
                equal.clear()
                least_s = gap_s
            if gap_s == least_s:
                equal.append(instance)
        return equal[0] if len(equal) == 1 else self._least(equal), least_s

    def _least(self, instances: Sequence[Instance]) -> Instance:
        """Of instances that are equal otherwise: the fewest requests, then who was chosen longest ago."""
        turns = self._turns.get
        return min(instances, key=lambda each: (each.in_flight, turns(each.place, -1)))

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
        handover_s: float = 0.0,
    ) -> Choice:
        """ttft_s: without the hand-over."""
        computes = prefill or decode
        self._turn += 1
        self._turns[computes.place] = self._turns[decode.place] = self._turn
        return Choice(
            decode,
            prefill,
            prefill_s,
            {
                "predicted_ttft_s": ttft_s + handover_s,
                "predicted_gap_s": gap_s,
                "wait_s": ttft_s - prefill_s,
                "prompt_tokens": request.tokens,
                "own_tokens": request.own_at(computes),
                "pool_tokens": request.from_pool(computes),
            },
        )
