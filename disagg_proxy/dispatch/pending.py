"""A request of the proxy that its scheduler judges, and the answers to requests that reach no engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.conductor.admission import Refusal
from moonpool.disagg_proxy.conductor.choice import Choice
from moonpool.disagg_proxy.conductor.plan import Answer, refused
from moonpool.disagg_proxy.conductor.scheduler import EligibleWorkers, PendingRequest
from moonpool.disagg_proxy.conductor.worker import Role
from moonpool.disagg_proxy.dispatch.candidates import GENERATES
from moonpool.disagg_proxy.dispatch.prefix_locator import PrefixMatch
from moonpool.disagg_proxy.engines.sglang import PROMPTS_MAX

RETRY_AFTER_S_MAX = 3600.0


@dataclass(slots=True, eq=False, kw_only=True)
class PendingProxyRequest(PendingRequest):
    """match: where its prompt lies, as of its arrival; None: not known. able: the workers that it could go
    to then. is_judged: by admission. answer: why no engine can serve it, whatever the load."""

    request: ProxyRequest
    match: PrefixMatch | None
    able: EligibleWorkers
    is_judged: bool = False
    answer: Answer | None = None

    def answer_to(self, refusal: Refusal) -> Answer:
        """What the client gets: ``answer`` where it is set, else 429 with the refusal's sentence."""
        return self.answer or too_many(refusal)


def too_many(refusal: Refusal) -> Answer:
    """429, which says when to come again."""
    seconds = max(math.ceil(min(refusal.retry_after_s, RETRY_AFTER_S_MAX)), 1)
    answer = refused(429, f"{refusal.sentence}; try again in {seconds} s", refusal.reason)
    return answer._replace(headers=((b"Retry-After", b"%d" % seconds),))


def none_left() -> Answer:
    """503: no engine is a candidate any more."""
    why = "the engines that this request might have gone to have left; try again"
    return refused(503, why, "no_engine")


def objection(request: ProxyRequest, choice: Choice) -> Answer | None:
    """Why the chosen engines, which cannot answer alone, are not asked; None: they are."""
    if choice.decode.self_sufficient or request.kind not in GENERATES:
        return None  # what is no generation needs no cache
    if choice.prefill is None or choice.decode.role is Role.PREFILL:
        who = "prefill" if choice.decode.role is Role.DECODE else "decode"
        why = f"no healthy {who} engine is left for {choice.decode.name}, which does not answer alone"
        return refused(503, f"{why}; GET /engines says why, try again soon", "no_engine")
    if choice.prefill.self_sufficient:
        why = f"{choice.decode.name} is SGLang's, and its prefill engine {choice.prefill.name} is not"
        return refused(503, f"{why}: give them model names of their own, or a proxy each", "no_engine")
    if (request.prompt_count() or 0) > PROMPTS_MAX:
        why = f"a request has {PROMPTS_MAX} prompts at most; send several"
        return refused(400, why, "too_many_prompts")
    return None
