"""Decides whether a request is accepted: early rejection at its arrival, by what is predicted for it.

    its first token   the worker's prefill queue in seconds + its own prefill [+ hand-over + wait for room]
    its gaps          the decode worker as it will be when this prefill ends: ``decode_forecast.py``

A request that is refused at once costs nothing, and its client can go elsewhere; an accepted request that
misses its objective has delayed others. A prediction from the *current* state of the decode workers makes the
loads of prefill and decode oscillate, because accepted requests reach decode a whole prefill later (Mooncake,
arXiv 2407.00079, section 7: "early rejection based on prediction"). The paper takes one decode time for all
requests; this module learns the times, and by how much they exceed the predictions. The paper does not count
requests that arrive between now and then, which prefers prompts with a long prefill: their forecast is too
low. Pure: ``now_s`` is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from moonpool.disagg_proxy.conductor.answer_lengths import AnswerLengthStats, Times
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.decode_forecast import DecodeForecast, Occupancy
from moonpool.disagg_proxy.conductor.demand import PER_OCTAVE, Capacity, Demand
from moonpool.disagg_proxy.conductor.quantile_margin import QuantileMargin
from moonpool.disagg_proxy.conductor.worker import Worker, answering

LEAD_PRIOR_S = 2.0
SHORTEST = 2.0 ** (-1 / PER_OCTAVE) * (1 - 1e-9)  # of the lengths of a class, over those behind it; rounded
GROUPS_MAX = 64  # groups with a demand of their own: one for each model that is served


class Objective(NamedTuple):
    """Seconds; infinity for what does not matter. gap_s: between two tokens of an answer."""

    ttft_s: float = math.inf
    gap_s: float = math.inf

    @property
    def any(self) -> bool:
        """Whether one of the two is finite."""
        return min(self) < math.inf


class Lookahead(Enum):
    """At which moment of the decode worker admission looks."""

    AHEAD = "ahead"  # when this request's prefill will end
    NOW = "now"
    AFTER = "after"  # when this request's prefill has ended; a refusal then wastes the prefill
    NEVER = "never"  # at prefill alone


class Refusal(NamedTuple):
    """reason: a label (ttft, gap, ...). retry_after_s: seconds until a new attempt may succeed. sentence: for
    the client."""

    reason: str
    retry_after_s: float
    sentence: str


class Prediction(NamedTuple):
    """The prediction for a request that arrives now, and why it is refused; None: it is accepted.

    ttft_s: seconds from now. gap_s: NaN where none is predicted.
    """

    ttft_s: float
    gap_s: float
    refusal: Refusal | None


@dataclass(slots=True)
class _Taken:
    decode: Worker
    at_s: float
    objective: Objective
    prediction: Prediction


def ttft_s(request: Request, choice: Choice, now_s: float) -> float:
    """Predicted seconds from now to the first token, whichever policy made the choice."""
    computes = choice.computes
    prefill_s = choice.prefill_s or computes.prefill_s(
        request.tokens, request.own_at(computes), request.from_pool(computes)
    )
    handover_s = choice.decode.handover_model.predict(request.tokens) if choice.prefill is not None else 0.0
    return computes.load.wait_s(now_s) + prefill_s + handover_s


class Admission:
    """Not thread safe. ``taken``, ``began`` and ``over`` report the life of an accepted request; each report
    may come late, twice or never."""

    def __init__(self, objective: Objective, look: Lookahead = Lookahead.AHEAD) -> None:
        self.objective = objective
        self.lookahead = look
        self.answers = AnswerLengthStats()
        self.leads = Times(LEAD_PRIOR_S)
        self.ttft_margin = QuantileMargin()
        self.gap_margin = QuantileMargin()
        self._demand: dict[Hashable, Demand] = {}
        self._ahead: dict[Worker, DecodeForecast] = {}
        self._taken: dict[int, _Taken] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def capacity_class(
        self, group: Hashable, request: Request, workers: Sequence[Worker], now_s: float
    ) -> Capacity:
        """Whether the request takes room at decode in which several shorter ones could be served
        (``demand.py``). Called once for each arriving request. group: requests of one group may go to the
        same workers."""
        if self.lookahead is not Lookahead.AHEAD or not self.objective.any:
            return Capacity.FITS
        demand = self._demand.get(group)
        if demand is None:
            if len(self._demand) >= GROUPS_MAX:
                del self._demand[next(iter(self._demand))]
            demand = self._demand[group] = Demand()
        demand.add(request.tokens, now_s)
        limit_s = self.objective.gap_s / self.gap_margin.factor
        longest = demand.longest(workers, limit_s, self.answers, now_s)
        longest *= request.urgency  # one step of priority doubles the length that is accepted
        if request.tokens >= longest:
            return Capacity.EXCEEDS
        return Capacity.MARGINAL if request.tokens >= longest * SHORTEST else Capacity.FITS

    def gap_limit_s(self, own_s: float = math.inf) -> float:
        """The largest gap, in seconds, that may be predicted if this request's own objective and the proxy's
        are to be met: less than both where observed gaps exceed the predictions."""
        return min(own_s, self.objective.gap_s) / max(self.gap_margin.factor, 1.0)

    def predict(
        self,
        request: Request,
        choice: Choice,
        now_s: float,
        *,
        objective: Objective | None = None,
        waited_s: float = 0.0,
        only_if_spare: bool = False,
    ) -> Prediction:
        """objective: this request's own; None: the proxy's. waited_s: seconds that it has waited, or will
        wait before it is sent. only_if_spare: it is accepted only where decode has more room than other
        requests are likely to need."""
        wanted = objective or self.objective
        first_s = ttft_s(request, choice, now_s)
        gap_s, there = math.nan, Occupancy(0.0, 0.0)
        if self.lookahead in (Lookahead.AHEAD, Lookahead.NOW):
            there = self._then(choice.decode, first_s, now_s)
            first_s += self._room_wait_s(request, choice.decode, there)
            gap_s = self._gap_s(request, choice.decode, there, choice.decode.load.stall_s(now_s))
        likely_s, left_s = first_s * self.ttft_margin.factor, wanted.ttft_s - waited_s
        refusal = None
        if likely_s > left_s and likely_s - self._doubt_s(request, choice, now_s) > left_s:
            likely_s += waited_s
            said = f"{likely_s:.3g}" if likely_s < 10 else f"{likely_s:.1f}"
            refusal = Refusal(
                "ttft",
                likely_s - wanted.ttft_s,
                f"its first token would come after {said} s, and {wanted.ttft_s:g} s are allowed",
            )
        elif self._exceeds(gap_s, wanted):
            refusal = self._too_slow(gap_s, wanted)
        elif only_if_spare and self._is_wanted(request, choice.decode, there, wanted, now_s):
            refusal = Refusal(
                "long",
                self.answers.times.mean_s,
                f"more comes than decode can take, and {request.tokens} tokens take the room of others",
            )
        return Prediction(first_s, gap_s, refusal)

    def is_final(
        self, refusal: Refusal | None, request: Request, workers: Sequence[Worker], wanted: Objective
    ) -> bool:
        """Whether waiting cannot help: its TTFT is missed already, or its gap would be too long on an idle
        decode worker. A margin above one is not counted, because it may shrink again."""
        if refusal is None or refusal.reason != "gap":
            return refusal is not None and refusal.reason == "ttft"
        margin = min(self.gap_margin.factor, 1.0)
        idle = Occupancy(0.0, 0.0)
        return all(self._gap_s(request, each, idle) * margin > wanted.gap_s for each in answering(workers))

    def after_prefill(self, name: int, request: Request, choice: Choice, now_s: float) -> Refusal | None:
        """With ``Lookahead.AFTER``: judges the decode worker once the prompt is computed. None: the request
        goes on."""
        taken = self._taken.get(name)
        if self.lookahead is not Lookahead.AFTER or taken is None:
            return None
        there = self._now(choice.decode)
        if self._lacks(request, choice.decode, there) > 0:
            return Refusal("gap", self.answers.times.mean_s, "no room is left for its answer")
        gap_s = self._gap_s(request, choice.decode, there, choice.decode.load.stall_s(now_s))
        taken.prediction = taken.prediction._replace(gap_s=gap_s)
        return self._too_slow(gap_s, taken.objective) if self._exceeds(gap_s, taken.objective) else None

    # The life of accepted requests

    def taken(
        self,
        name: int,
        request: Request,
        choice: Choice,
        prediction: Prediction,
        now_s: float,
        *,
        objective: Objective | None = None,
        silent: bool = False,
    ) -> None:
        """silent: the data plane will not report its first token."""
        self.over(name, now_s)
        self._taken[name] = _Taken(choice.decode, now_s, objective or self.objective, prediction)
        self._of(choice.decode).taken(name, request.tokens, now_s + prediction.ttft_s, silent=silent)

    def began(self, name: int, now_s: float, *, heard: bool = True) -> None:
        """Its first token is there. heard: the data plane saw it; otherwise only the end of its prefill is
        known."""
        taken = self._taken.get(name)
        if taken is None:
            return
        ahead, took_s = self._of(taken.decode), now_s - taken.at_s
        ahead.began(name, now_s)
        self._note(taken.decode, ahead, now_s)
        self.leads.observe(took_s)
        if heard:
            self.ttft_margin.observe(taken.prediction.ttft_s, took_s, taken.objective.ttft_s, now_s)

    def over(
        self,
        name: int,
        now_s: float,
        *,
        gap_s: float = math.nan,
        answer_s: float = math.nan,
        tokens: int = 0,
    ) -> None:
        """gap_s: the mean of its gaps; answer_s: from its first to its last token; tokens: of its answer. NaN
        and 0: not known."""
        taken = self._taken.pop(name, None)
        if taken is None:
            return
        ahead = self._of(taken.decode)
        longest_s = ahead.longest_s(name, gap_s, tokens - 1, now_s)
        self.gap_margin.observe(taken.prediction.gap_s, longest_s, taken.objective.gap_s, now_s)
        ahead.over(name)
        self._note(taken.decode, ahead, now_s)
        self.answers.observe(answer_s, tokens)

    def stalled(self, worker: Worker, seconds: float, now_s: float) -> None:
        """This decode worker computed a prompt for so many seconds, in which the requests that decode there
        got no token."""
        ahead = self._ahead.get(worker)
        if ahead is not None and 0.0 <= seconds < math.inf:
            self._note(worker, ahead, now_s, stall_s=seconds)

    def forget(self, worker: Worker) -> None:
        """The worker is gone, and its requests with it."""
        self._ahead.pop(worker, None)
        for name in [name for name, taken in self._taken.items() if taken.decode is worker]:
            del self._taken[name]

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        for ahead in self._ahead.values():
            ahead.check_integrity()
        if len(self._taken) != sum(map(len, self._ahead.values())):
            raise AssertionError("the requests that were taken do not add up")

    def _of(self, worker: Worker) -> DecodeForecast:
        ahead = self._ahead.get(worker)
        if ahead is None:
            ahead = self._ahead[worker] = DecodeForecast(self.answers, self.leads)
        return ahead

    def _now(self, decode: Worker) -> Occupancy:
        own = self._of(decode).now()
        # Requests of other proxies, and those from before admission, are assumed to stay as many as now.
        return Occupancy(
            max(own.requests, decode.load.decodes), max(own.context_tokens, decode.load.context_tokens)
        )

    def _then(self, decode: Worker, first_s: float, now_s: float) -> Occupancy:
        there = self._now(decode)
        if self.lookahead is Lookahead.NOW:
            return there
        ahead = self._of(decode)
        own, then = ahead.now(), ahead.at(now_s, first_s)
        return Occupancy(
            there.requests - own.requests + then.requests,
            there.context_tokens - own.context_tokens + then.context_tokens,
        )

    @staticmethod
    def _gap_s(request: Request, decode: Worker, there: Occupancy, stall_s: float = 0.0) -> float:
        """stall_s: seconds of prompts that are computed there, for each gap."""
        context_tokens = there.context_tokens + request.tokens
        return decode.decode_model.predict(there.requests + 1, context_tokens, stall_s)

    def _doubt_s(self, request: Request, choice: Choice, now_s: float) -> float:
        """By how much the predicted TTFT may be too long for what the worker's model has not learnt yet: of
        this prompt, and of the queue before it, whose prompts are taken to be as their mean."""
        computes = choice.computes
        model, load = computes.prefill_model, computes.load
        own, pool = request.own_at(computes), request.from_pool(computes) if choice.fetch else 0
        ahead_s = request.holder.ahead_s(now_s) if pool and request.holder is not None else 0.0
        step_s = computes.decode_model.step_s(load.decodes, load.context_tokens)
        wait_s = load.wait_s(now_s)
        asked, queued = (request.tokens, own, pool, ahead_s), wait_s > 0
        prefill_s = model.predict(*asked, queued=queued, step_s=step_s)
        doubt_s = min(model.doubt_s(*asked, queued=queued, step_s=step_s), prefill_s)
        if queued:
            tokens = load.prefill_tokens // load.prefills
            reused = tokens - load.prefill_rest_tokens // load.prefills
            mean_s = model.predict(tokens, reused, step_s=step_s)
            doubt_s += wait_s * min(model.doubt_s(tokens, reused, step_s=step_s) / mean_s, 1.0)
        return doubt_s * self.ttft_margin.factor

    def _lacks(self, request: Request, decode: Worker, there: Occupancy) -> float:
        """Tokens by which the request exceeds the decode worker's room; 0 where the room is not known."""
        if not decode.room_tokens:
            return 0.0
        answers = self.answers.tokens * (there.requests + 1)
        return there.context_tokens + request.tokens + answers - decode.room_tokens

    def _room_wait_s(self, request: Request, decode: Worker, there: Occupancy) -> float:
        """Seconds that a request which does not fit waits for other requests to end. A full worker is assumed
        to be empty after the mean time of an answer."""
        lacks = self._lacks(request, decode, there)
        return lacks / decode.room_tokens * self.answers.times.mean_s if lacks > 0 else 0.0

    def _is_wanted(
        self, request: Request, decode: Worker, there: Occupancy, wanted: Objective, now_s: float
    ) -> bool:
        """Whether other requests are likely to need the room: the number at one time varies by about the root
        of its mean, and seldom by twice that."""
        more = 1.0 + 2.0 / math.sqrt(max(there.requests, 1.0))
        fuller = Occupancy(there.requests * more, there.context_tokens * more)
        gap_s = self._gap_s(request, decode, fuller, decode.load.stall_s(now_s))
        return self._exceeds(gap_s, wanted) or self._lacks(request, decode, fuller) > 0

    def _exceeds(self, gap_s: float, wanted: Objective) -> bool:
        return gap_s * self.gap_margin.factor > wanted.gap_s

    def _too_slow(self, gap_s: float, wanted: Objective) -> Refusal:
        likely_s = gap_s * self.gap_margin.factor
        return Refusal(
            "gap",
            (1 - wanted.gap_s / likely_s) * self.answers.times.mean_s,  # until enough requests have ended
            f"its tokens would come every {likely_s * 1000:.0f} ms, and at most {wanted.gap_s * 1000:g} ms "
            f"are allowed",
        )

    @staticmethod
    def _note(decode: Worker, ahead: DecodeForecast, now_s: float, *, stall_s: float = 0.0) -> None:
        ahead.note(decode.decode_model.predict(*ahead.now()), now_s, stall_s=stall_s)
