"""Whether a request is taken at all: early rejection at its arrival, by what is predicted for it.

    its first token   the instance's line in seconds + its own prefill [+ hand-over]
    its gaps          the decode instance as it will be when this prefill ends: those that decode now and will
                      still, and those whose prefill ends before

A request that is refused at once costs nothing, and its client can go elsewhere; one that is let in and fails
its objective has kept others waiting. To look at the decode instances as they are *now* makes the load of
prefill and of decode swing against each other, because what is let in arrives there a whole prefill later
(Mooncake, arXiv 2407.00079, section 7: "early rejection based on prediction"). The paper takes one decode
time for all; here it is learnt. Pure: ``now_s`` is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from moonpool.disagg_proxy.conductor.answers import AnswerTimes
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.instance import Instance, Role


class Objective(NamedTuple):
    """Seconds; infinity for what does not matter. gap_s: between two tokens of an answer."""

    ttft_s: float = math.inf
    gap_s: float = math.inf


class Look(Enum):
    """At which moment of the decode instances admission looks."""

    AHEAD = "ahead"  # when this request's prefill will end
    NOW = "now"
    NEVER = "never"  # at prefill alone


class Refusal(NamedTuple):
    """reason: a label (ttft, gap); retry_after_s: when it may be better; sentence: for the client."""

    reason: str
    retry_after_s: float
    sentence: str


def ttft_s(request: Request, choice: Choice, now_s: float) -> float:
    """When the first token is predicted, whoever chose."""
    computes = choice.computes
    prefill_s = choice.prefill_s or computes.prefill_model.predict(
        request.tokens, request.own_at(computes), request.from_pool(computes)
    )
    handover_s = choice.decode.handover_model.predict(request.tokens) if choice.prefill is not None else 0.0
    return computes.books.wait_s(now_s) + prefill_s + handover_s


class Admission:
    def __init__(self, objective: Objective, look: Look = Look.AHEAD) -> None:
        self.objective = objective
        self.answers = AnswerTimes()
        self._look = look

    def refuse(
        self, request: Request, choice: Choice, instances: Sequence[Instance], now_s: float
    ) -> Refusal | None:
        """None: it is taken."""
        first_s = ttft_s(request, choice, now_s)
        if first_s > self.objective.ttft_s:
            later_s = first_s - self.objective.ttft_s
            return Refusal(
                "ttft",
                later_s,
                f"its first token would come after {first_s:.1f} s, and {self.objective.ttft_s:g} s are "
                f"allowed",
            )
        if self._look is Look.NEVER or self.objective.gap_s == math.inf:
            return None
        gap_s = self._gap_s(request, choice, instances, first_s, now_s)
        if gap_s > self.objective.gap_s:
            return Refusal(
                "gap",
                self.answers.ahead_s,
                f"its tokens would come every {gap_s * 1000:.0f} ms, and at most "
                f"{self.objective.gap_s * 1000:g} ms are allowed",
            )
        return None

    def _gap_s(
        self,
        request: Request,
        choice: Choice,
        instances: Sequence[Instance],
        first_s: float,
        now_s: float,
    ) -> float:
        """Between its tokens, were it taken. Those who compute prompts for others spread what they make over
        the decode instances, so that these are looked at together."""
        decode = choice.decode
        deciding = [each for each in instances if each.role is not Role.PREFILL] or [decode]
        requests: float = sum(each.books.decodes for each in deciding)
        context: float = sum(each.books.context_tokens for each in deciding)
        if self._look is Look.AHEAD:
            kept = self.answers.left_after(first_s)
            begun, begun_context = 0.0, 0.0
            for each in instances:
                line_s = each.books.wait_s(now_s)
                if line_s > 0:
                    share = min(first_s / line_s, 1.0) * self.answers.left_of_begun(min(first_s, line_s))
                    begun += each.books.prefills * share
                    begun_context += each.books.prefill_tokens * share
            requests, context = requests * kept + begun, context * kept + begun_context
        return decode.decode_model.predict(
            requests / len(deciding) + 1, context / len(deciding) + request.tokens
        )
