"""What the scheduler is told of a request that comes: where its prompt lies, what its client says of it, and
which objective it is judged by."""

from __future__ import annotations

from collections.abc import Mapping

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.clients import Client
from moonpool.disagg_proxy.conductor.choice import ANSWER_TOKENS, Request
from moonpool.disagg_proxy.conductor.scheduler import NO_OBJECTIVE, EligibleWorkers, Scheduler
from moonpool.disagg_proxy.conductor.transfer_backlog import TransferBacklog
from moonpool.disagg_proxy.dispatch import request_hints, request_switches
from moonpool.disagg_proxy.dispatch.candidates import GENERATES, Candidates
from moonpool.disagg_proxy.dispatch.pending import PendingProxyRequest
from moonpool.disagg_proxy.dispatch.prefix_locator import PrefixLocator, PrefixMatch, seed_of

ANSWER_TOKENS_MAX = 1 << 30  # that a request is taken to ask for; no engine has room for more


class Intake:
    """Thread safe."""

    def __init__(
        self, candidates: Candidates, locator: PrefixLocator, scheduler: Scheduler[PendingProxyRequest]
    ) -> None:
        self._candidates = candidates
        self._locator = locator
        self._scheduler = scheduler
        self._pool = TransferBacklog()  # all of its nodes: which of them will send is not known

    def look_up(self, request: ProxyRequest, ids: bytes) -> tuple[Request, PrefixMatch]:
        """ids: of its prompt, u32 little-endian."""
        model = request.model
        match = self._locator.find(ids, seed_of(request.cache_salt, model, self._models(request, model)))
        # A client may write any number of 64 bits, and what is reckoned with it must still be one.
        answer_tokens = min(max(request.max_tokens or ANSWER_TOKENS, 1), ANSWER_TOKENS_MAX)
        known = match.pool if request_switches.loads(request) else 0
        pool, hidden = known, self._scheduler.inflight.hidden_pool
        if hidden.seen and request_switches.loads(request):
            pool = max(pool, self._reachable(request, match))
        presumed = pool - known
        asked = Request(len(ids) // 4, match.own, pool, answer_tokens, holder=self._pool, presumed=presumed)
        return asked, match

    def pending(
        self,
        request: ProxyRequest,
        asked: Request,
        match: PrefixMatch | None,
        able: EligibleWorkers,
        client: Client | None = None,
    ) -> PendingProxyRequest:
        """able: the workers that the request may go to now. client: whose key it came with; None: clients
        have no rows, and the headers are believed. Raises BadHeader."""
        hints = request_hints.read(request.moonpool_headers)
        if client is not None:
            hints = hints.of(client)
        if hints is not request_hints.NO_HINTS:
            asked = asked._replace(tenant=hints.tenant, priority=hints.priority, session=hints.session)
        objective, model, admission = NO_OBJECTIVE, "", self._scheduler.admission
        if request.kind not in GENERATES:
            admission = None
        elif not request.wants_one:
            asked = asked._replace(one=False)
        if admission is not None:
            objective = hints.objective(admission.objective)
            # A client that takes any gap shares its engine with others, which do not.
            asked = asked._replace(gap_s=admission.gap_limit_s(objective.gap_s))
            if self._models(request, request.model) is not None:
                model = request.model  # those that may go to the same engines, which may change meanwhile
        return PendingProxyRequest(
            name=request.id,
            asked=asked,
            objective=objective,
            group=model,
            streams=request.stream,
            request=request,
            match=match,
            able=able,
            is_judged=admission is not None and not request.attempt,
        )

    def _reachable(self, request: ProxyRequest, match: PrefixMatch) -> int:
        """Tokens of the prompt that some engine of its model holds, and has saved in a pool of all."""
        own, workers = match.own, self._candidates.of(request).workers
        return max((own[each.place] for each in workers if each.place < len(own)), default=0)

    def _models(self, request: ProxyRequest, model: str) -> Mapping[str, bytes] | None:
        """Of an engine that has the model; None: no candidate says that it does."""
        for place in request.candidates:
            engine = self._candidates.at[place]
            models: Mapping[str, bytes] | None = None if engine is None else engine.models
            if models and model in models:
                return models
        return None
