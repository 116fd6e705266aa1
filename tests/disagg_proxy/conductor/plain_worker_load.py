"""The books of one engine in plain Python: what the native ones must say, too."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Prefill:
    tokens: int
    own: int
    pool: int
    predicted_s: float
    sent_s: float
    silent: bool
    sent: tuple[float, float]


@dataclass(slots=True)
class _Decode:
    context: int
    first_s: float
    batch_integral: float
    context_integral: float
    prefilled_s: float
    silent: bool


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill has ended. seconds: how long the engine had it in work, the wait before it left out. batch,
    context_tokens: of those that decoded meanwhile, averages."""

    tokens: int
    own: int
    pool: int
    seconds: float
    predicted_s: float
    batch: float
    context_tokens: float


@dataclass(frozen=True, slots=True)
class Decoded:
    """A request has ended. batch, context_tokens: averages over its time. stall_s: of prefill there, for each
    of its gaps."""

    batch: float
    context_tokens: float
    gap_s: float
    stall_s: float


class WorkerLoad:
    """requests are named by any hashable id; each call about an id that is not known changes nothing, so that
    reports may come late, twice or never."""

    def __init__(self) -> None:
        # Its first is asked for all the time; a dict's lies behind all that were dropped before it.
        self._prefills: OrderedDict[int, _Prefill] = OrderedDict()
        self._prefill_sum_s = 0.0
        self._prefill_tokens = self._prefill_rest = 0
        self._head_since_s = 0.0
        self._head_since = (0.0, 0.0)
        self._mean_age_s = 0.0
        self.heard_s = math.inf  # when the proxy last got any engine's report
        self._decodes: dict[int, _Decode] = {}
        self._in_both = 0
        self._context = 0
        self._batch_integral = 0.0
        self._context_integral = 0.0
        self._integrated_to_s = -math.inf
        self._ended_s = 0.0  # seconds of prefills
        self._stalled_s = self._gaps = self._stalled_at_s = 0.0

    # What policies read

    @property
    def prefills(self) -> int:
        return len(self._prefills)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the prompts in line, those that are reused included."""
        return self._prefill_tokens

    @property
    def prefill_rest_tokens(self) -> int:
        """Those of them that are to be computed."""
        return self._prefill_rest

    @property
    def decodes(self) -> int:
        return len(self._decodes)

    @property
    def requests(self) -> int:
        return len(self._prefills) + len(self._decodes) - self._in_both

    @property
    def context_tokens(self) -> int:
        """Tokens in the KV cache of the requests that decode now, as far as known."""
        return self._context

    def stall_s(self, now_s: float) -> float:
        """Seconds of prefill for each gap of a request that decodes here, less the longer none has ended."""
        return self._fade(now_s) * self._stalled_s / self._gaps if self._gaps else 0.0

    def _fade(self, now_s: float) -> float:
        return math.exp(-max(now_s - self._stalled_at_s, 0.0) / 10.0)

    def wait_s(self, now_s: float) -> float:
        """Seconds until a prefill that came now would begin."""
        while self._prefills:
            request, head = next(iter(self._prefills.items()))
            head_ends_s = max(self._head_since_s, head.sent_s) + head.predicted_s
            if not head.silent or now_s < head_ends_s:
                free_s = self._head_since_s
                for prefill in self._prefills.values():
                    free_s = max(free_s, prefill.sent_s) + prefill.predicted_s
                # Not reported though it could have been: it still goes on, and all behind it begin later.
                late_s = max(min(now_s, self.heard_s) - max(self._mean_age_s, 0.0) - head_ends_s, 0.0)
                return min(max(free_s + late_s - now_s, 0.0), self._prefill_sum_s)
            self._ended_s += head.predicted_s
            self._begin_head(head_ends_s)
            self._drop(request)
        return 0.0

    # What happens

    def reported(self, age_s: float) -> None:
        """A report came so many seconds after its event."""
        if abs(age_s) < 60.0:
            self._mean_age_s += 0.1 * (age_s - self._mean_age_s)

    def prefill_began(
        self,
        request: int,
        tokens: int,
        own: int,
        pool: int,
        predicted_s: float,
        now_s: float,
        *,
        silent: bool = False,
    ) -> None:
        """silent: its end will not be heard of, so it is taken to last as long as predicted."""
        if request in self._prefills:
            return
        if not self._prefills:
            self._begin_head(now_s)
            self._prefill_sum_s = 0.0  # sums of floats drift
        self._prefills[request] = _Prefill(
            tokens, own, pool, predicted_s, now_s, silent, self._integrals_at(now_s)
        )
        self._in_both += request in self._decodes
        self._prefill_sum_s += predicted_s
        self._prefill_tokens += tokens
        self._prefill_rest += tokens - own - pool

    def prefill_ended(self, request: int, now_s: float, *, done: bool = True) -> Prefilled | None:
        """done: it was computed; else the request is gone and nothing can be learnt from it."""
        prefill = self._prefills.get(request)
        if prefill is None:
            return None
        head_name, head = next(iter(self._prefills.items()))
        was_head = head_name == request
        seconds = now_s - max(self._head_since_s, head.sent_s)
        began = head.sent if head.sent_s > self._head_since_s else self._head_since
        parts = [max(b - a, 0.0) for a, b in zip(began, self._integrals_at(now_s), strict=True)]
        self._drop(request)
        # Engines batch short prefills: one that overtakes the head, or leaves, says nothing of its own cost.
        clean = done and was_head and seconds >= 0
        if was_head or done:
            self._ended_s += max(seconds, 0.0)
            self._begin_head(now_s)
        if not clean:
            return None
        batch, context = (part / seconds if seconds else 0.0 for part in parts)
        return Prefilled(
            prefill.tokens, prefill.own, prefill.pool, seconds, prefill.predicted_s, batch, context
        )

    def decode_began(self, request: int, context: int, now_s: float, *, silent: bool = False) -> None:
        if request in self._decodes:
            return
        self.wait_s(now_s)
        self._integrate(now_s)
        self._decodes[request] = _Decode(
            context, now_s, self._batch_integral, self._context_integral, self._prefilled_s(now_s), silent
        )
        self._in_both += request in self._prefills
        self._context += context

    def decode_ended(self, request: int, tokens: int, now_s: float) -> Decoded | None:
        """tokens: how many were made, the first included; 0 when unknown."""
        decode = self._decodes.get(request)
        if decode is None:
            return None
        self.wait_s(now_s)
        self._integrate(now_s)
        del self._decodes[request]
        self._in_both -= request in self._prefills
        self._context -= decode.context
        lasted_s = now_s - decode.first_s
        if tokens < 2 or lasted_s <= 0:
            return None
        stalled_s = min(max(self._prefilled_s(now_s) - decode.prefilled_s, 0.0), lasted_s)
        if not decode.silent:
            before = 0.97 * self._fade(now_s)
            self._stalled_s = before * self._stalled_s + stalled_s
            self._gaps = before * self._gaps + tokens - 1
            self._stalled_at_s = now_s
        return Decoded(
            batch=(self._batch_integral - decode.batch_integral) / lasted_s,
            context_tokens=(self._context_integral - decode.context_integral) / lasted_s,
            gap_s=lasted_s / (tokens - 1),
            stall_s=stalled_s / (tokens - 1),
        )

    def _prefilled_s(self, at_s: float) -> float:
        head = next(iter(self._prefills.values()), None)
        if head is None:
            return self._ended_s
        return self._ended_s + max(at_s - max(self._head_since_s, head.sent_s), 0.0)

    def _begin_head(self, at_s: float) -> None:
        self._head_since_s = at_s
        self._head_since = self._integrals_at(at_s)

    def _integrals_at(self, at_s: float) -> tuple[float, float]:
        """As if those that decode now did then."""
        passed_s = at_s - self._integrated_to_s if self._decodes else 0.0
        batch = self._batch_integral + passed_s * len(self._decodes)
        return batch, self._context_integral + passed_s * self._context

    def forget_all(self) -> None:
        """The engine is gone, and what it had to do with it."""
        self._prefills.clear()
        self._prefill_sum_s = 0.0
        self._prefill_tokens = self._prefill_rest = 0
        self._decodes.clear()
        self._in_both = 0
        self._context = 0
        self._stalled_s = self._gaps = 0.0

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        total = sum(prefill.predicted_s for prefill in self._prefills.values())
        if abs(total - self._prefill_sum_s) > 1e-6 * max(1.0, total) and self._prefills:
            raise AssertionError(f"the line is {total} s long, not {self._prefill_sum_s}")
        if self._prefill_tokens != sum(prefill.tokens for prefill in self._prefills.values()):
            raise AssertionError("the tokens of the prefills do not add up")
        if self._context != sum(decode.context for decode in self._decodes.values()):
            raise AssertionError("the tokens of the decodes do not add up")
        if self._in_both != len(self._prefills.keys() & self._decodes.keys()):
            raise AssertionError("the requests in both do not add up")

    def _drop(self, request: int) -> None:
        prefill = self._prefills.pop(request)
        left_s = self._prefill_sum_s - prefill.predicted_s
        self._prefill_sum_s = left_s if left_s > 0.0 else 0.0
        self._prefill_tokens -= prefill.tokens
        self._prefill_rest -= prefill.tokens - prefill.own - prefill.pool
        self._in_both -= request in self._decodes

    def _integrate(self, now_s: float) -> None:
        passed_s = now_s - self._integrated_to_s
        if passed_s <= 0.0:
            return
        self._integrated_to_s = now_s
        if self._decodes:
            self._batch_integral += passed_s * len(self._decodes)
            self._context_integral += passed_s * self._context
