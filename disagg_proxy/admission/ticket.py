"""A request at the gate, and the answer to those that do not pass it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.conductor.admission import Objective, Refusal
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.plan import Answer, refused
from moonpool.disagg_proxy.dispatch.locality import Place

RETRY_AFTER_S_MAX = 3600.0


@dataclass(slots=True, eq=False)
class Ticket:
    """place: where its prompt lies, as of its arrival. waits: it is or was in the line. choice, sent_s: how
    and when it was sent; answer: why it can never be, whatever the load."""

    request: ProxyRequest
    asked: Request
    place: Place | None
    objective: Objective
    model: str  # "": engines do not say which they serve
    waits: bool = False
    choice: Choice | None = None
    sent_s: float = 0.0
    answer: Answer | None = None

    def turned_away(self, refusal: Refusal) -> Answer:
        return self.answer or too_many(refusal)


def too_many(refusal: Refusal) -> Answer:
    """429, which says when to come again."""
    seconds = max(math.ceil(min(refusal.retry_after_s, RETRY_AFTER_S_MAX)), 1)
    answer = refused(429, f"{refusal.sentence}; try again in {seconds} s", refusal.reason)
    return answer._replace(headers=((b"Retry-After", b"%d" % seconds),))
