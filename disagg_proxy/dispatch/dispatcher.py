"""Turns a scheduler's decision into a plan: which of the engines that may be chosen can do what, what is
known of the prompt, and what is on its way already.

``decide`` runs on the data plane's thread, once for each request and attempt, and never blocks: a prompt
whose token ids an engine must be asked for goes to the event loop, and the plan is handed in later. Text that
is tokenised here does not come to ``decide`` at all, unless too much of it is in line:
``tokens/tokenizer_threads.py`` calls ``prompts.tokenise`` and ``told``. The lock guards the scheduler, and
the candidates of requests that wait.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from typing import TypeVar

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.clients import Client, Clients
from moonpool.disagg_proxy.conductor.admission import Admission, Refusal
from moonpool.disagg_proxy.conductor.admission_controller import RELEASE_EVERY_S
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.hidden_pool import HiddenPool
from moonpool.disagg_proxy.conductor.inflight import InflightTracker
from moonpool.disagg_proxy.conductor.plan import Answer, Decision, Plan, refused
from moonpool.disagg_proxy.conductor.policy import Policy
from moonpool.disagg_proxy.conductor.scheduler import (
    Dispatched,
    EligibleWorkers,
    QueueLimits,
    Refused,
    Scheduler,
)
from moonpool.disagg_proxy.conductor.worker import Role, Worker
from moonpool.disagg_proxy.data_plane import observations
from moonpool.disagg_proxy.dispatch import request_switches
from moonpool.disagg_proxy.dispatch.candidates import GENERATES, Candidates
from moonpool.disagg_proxy.dispatch.handovers import Handovers
from moonpool.disagg_proxy.dispatch.intake import Intake
from moonpool.disagg_proxy.dispatch.neighbours import NeighbourHints, without_cached_at
from moonpool.disagg_proxy.dispatch.observer import DispatchObserver
from moonpool.disagg_proxy.dispatch.pending import PendingProxyRequest, none_left, objection
from moonpool.disagg_proxy.dispatch.prefix_locator import PrefixLocator, PrefixMatch
from moonpool.disagg_proxy.dispatch.request_hints import BadHeader, asks_why
from moonpool.disagg_proxy.engines.engine import Engine
from moonpool.disagg_proxy.peers.host_identity import site_of
from moonpool.disagg_proxy.settings import AdmissionSettings
from moonpool.disagg_proxy.tokens.local_source import LocalSource
from moonpool.disagg_proxy.tokens.prompt_ids import PromptIds
from moonpool.disagg_proxy.tokens.source import TokenSource

UNKNOWN = Request()
TRACEBACKS_MAX = 5
Result = TypeVar("Result")
ADMIT_ALL = AdmissionSettings()
NO_CLIENT = refused(
    401, "the operator of this proxy has withdrawn this key; ask for another", "invalid_api_key"
)
_SAID = Refusal("no_engine", 0.0, "")  # why, ``PendingProxyRequest.answer`` says

_log = logging.getLogger("moonpool.proxy")


class Dispatcher:
    """tokens: where ids of text come from, None for nowhere; places: for engines, which join and leave on
    the event loop; resume: hands in a decision that comes later; observed: takes what the data plane has
    recorded; clock: the data plane's; handover, admission: the settings; hidden_pool: detects a pool whose
    nodes' KV events the proxy does not receive; clients: the rows of their keys, None: they have none;
    switch_headers: the switches that clients may say by a header; neighbour_tokens_min: the setting;
    withdrawn: is told of each request whose key may ask no more."""

    def __init__(
        self,
        policy: Policy,
        locator: PrefixLocator,
        tokens: TokenSource | LocalSource | None,
        *,
        places: int,
        loop: asyncio.AbstractEventLoop,
        resume: Callable[[ProxyRequest, Decision], None],
        observed: Callable[[], bytes],
        clock: Callable[[], float],
        handover: str = "auto",
        admission: AdmissionSettings = ADMIT_ALL,
        hidden_pool: HiddenPool | None = None,
        policy_name: str = "",
        clients: Clients | None = None,
        switch_headers: Collection[str] = (),
        neighbour_tokens_min: int = 0,
        withdrawn: Callable[[ProxyRequest], None] = lambda request: None,
    ) -> None:
        self.candidates = Candidates(places)
        self.at = self.candidates.at
        self._those = self.candidates.of
        self.scheduler: Scheduler[PendingProxyRequest] = Scheduler(
            policy,
            self,
            Admission(admission.objective) if admission.any else None,
            QueueLimits(admission.queue_max, admission.queue_deadline),
            is_heard=locator.is_heard,
            hidden_pool=hidden_pool,
            policy_failed=self._policy_failed,
        )
        self._letting_in: asyncio.Task[None] | None = None
        self.handovers = Handovers(
            self.at, handover=handover, policy_name=policy_name or type(policy).__name__
        )
        self.neighbours = NeighbourHints(self.at, locator.is_heard, neighbour_tokens_min)
        self.prompts = PromptIds(tokens, loop, self.told)
        self._clients = clients
        self._switch_headers = switch_headers
        self._withdrawn = withdrawn
        self._intake = Intake(self.candidates, locator, self.scheduler)
        self.blind = 0
        self.late_errors = 0  # of the policy, that the data plane does not count
        self._observers: tuple[DispatchObserver, ...] = ()  # replaced whole: they leave on any thread
        self.uses_tokens = policy.uses_tokens  # prompts are looked at; without, none is tracked
        # Of a policy that looks at prompts every record is kept account of.
        self._read = observations.read if policy.uses_tokens else observations.read_kept
        self._locator = locator
        self._resume = resume
        self._observed = observed
        self._clock = clock
        self._lock = threading.Lock()
        self._loop = loop

    def subscribe(self, observer: DispatchObserver) -> None:
        """The observer hears of all decisions from now on. On any thread."""
        self._observers += (observer,)

    def unsubscribe(self, observer: DispatchObserver) -> None:
        """Idempotent. On any thread."""
        self._observers = tuple(each for each in self._observers if each is not observer)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """That requests may go to, ordered by place."""
        return self.candidates.engines

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Of the engines, ordered by place."""
        return self.candidates.workers

    @property
    def healthy_count(self) -> int:
        """Of the engines that requests may go to; one that leaves is not counted."""
        return sum(engine.liveness.healthy for engine in self.engines)

    def decide(self, request: ProxyRequest, now_s: float, records: bytes, ids: bytes | None) -> Decision:
        """The plan for a request, or None when it comes later. Called by the data plane with all that it
        knows at that moment, where the policy looks at prompts: records, of requests before it; ids, of a
        prompt that is a list of them. No other thread learns of later records before these, since only the
        calling thread makes records. One may have decided by a later time than ``now_s`` meanwhile."""
        if (answer := self._switch(request)) is not None:
            return answer
        try:
            return self._decide(request, now_s, records, ids)
        except Exception:
            if not request.switches:
                raise  # the data plane chooses
            self._policy_failed()
            return self._without_policy(request)

    def _decide(self, request: ProxyRequest, now_s: float, records: bytes, ids: bytes | None) -> Decision:
        if not self.uses_tokens:
            return self._choose_simply(request)
        if records:
            with self._lock:
                self._learn(records)
        if request.kind not in GENERATES:
            return self._choose(request, UNKNOWN, None, now_s)
        if ids is None:
            ids, later = self.prompts.find(request)
            if later:
                return None
        return self._choose_by(request, ids, now_s)

    def told(self, request: ProxyRequest, ids: bytes | None) -> None:
        """Decides about a text, now that its ids are there or not to be had. On any thread."""
        if request.gone:
            return
        try:
            decision: Decision = self._switch(request)
            if decision is None:
                with self._lock:
                    self._learn(self._observed())
                decision = self._choose_by(request, ids, self._clock())
            if decision is not None:  # else it waits in the queue
                self._resume(request, decision)
        except Exception:
            self._policy_failed()
            self._resume(request, self._without_policy(request))

    def learn(self) -> None:
        """Takes in what the data plane has observed."""
        now_s = self._clock()
        with self._lock:
            self._learn(self._observed())
            self.scheduler.expire(now_s)
        self._locator.expire(now_s)

    def with_tracker(self, act: Callable[[InflightTracker, float], Result]) -> Result:
        """What another part has to do with the tracker, under the lock."""
        with self._lock:
            return act(self.scheduler.inflight, self._clock())

    def join(self, engine: Engine) -> None:
        """There is one more engine, at a place where none is."""
        worker = Worker(
            engine.place,
            engine.name,
            Role(engine.role),
            relay_requests=engine.load,
            known_as=engine.spec.known_as,
            site=site_of(*engine.spec.address),
        )
        with self._lock:
            self.scheduler.join(worker)
        self.candidates.join(engine, worker)
        self.became(engine)

    def part(self, engine: Engine) -> None:
        """The engine is leaving: no request goes there any more, of those that wait neither."""
        self.candidates.part(engine)
        with self._lock:
            self.candidates.look_anew()

    def leave(self, engine: Engine) -> None:
        """All that was sent to the engine is over, and its place is free."""
        self.learn()
        with self._lock:
            self.scheduler.leave(engine.place)
        self.candidates.leave(engine)

    def became(self, engine: Engine) -> None:
        """The engine turned out to be something else than it was given as."""
        worker = self.candidates.worker_at[engine.place]
        self.candidates.became(engine)
        with self._lock:
            self.candidates.look_anew()
            if worker is not None:
                worker.join_kind(self.candidates.same_kind(engine))

    def forget(self, engine: Engine) -> None:
        """The engine left the rotation: what it had in work and in its cache is not counted on."""
        with self._lock:
            self.scheduler.forget(engine.place)
        self._locator.forget(engine.place)

    def limit_wait(self, seconds: float) -> None:
        """The proxy ends: no request waits for longer than this to be sent."""
        with self._lock:
            self.scheduler.limit_wait(self._clock() + seconds)

    async def close(self) -> None:
        """Cancels the release of waiting requests, and ends tokenisation. Waiting requests get no answer. On
        the event loop."""
        if self._letting_in is not None:
            self._letting_in.cancel()
            await asyncio.gather(self._letting_in, return_exceptions=True)
        await self.prompts.close()

    def check_integrity(self, remote_requests: int = 0) -> None:
        """Raises AssertionError when an invariant of a part is broken. remote_requests: see Scheduler."""
        self.learn()
        self.prompts.check_integrity()
        with self._lock:
            self.scheduler.check_integrity(remote_requests)

    # The choice

    def _choose_by(self, request: ProxyRequest, ids: bytes | None, now_s: float) -> Decision:
        if ids is None:
            self.blind += 1
            return self._choose(request, UNKNOWN, None, now_s)
        return self._choose(request, *self._intake.look_up(request, ids), now_s)

    def _choose(
        self, request: ProxyRequest, asked: Request, match: PrefixMatch | None, now_s: float
    ) -> Decision:
        able = self._those(request)
        if not able.workers:
            return none_left()
        client = self._client_of(request)
        if isinstance(client, Answer):
            return client
        try:
            pending = self._intake.pending(request, asked, match, able, client)
        except BadHeader as error:
            return refused(400, str(error), "bad_header")
        with self._lock:
            if pending.is_judged:
                effects = self.scheduler.submit(pending, now_s)
            else:
                effects = [self.scheduler.dispatch(pending, now_s)]
        for effect in effects:
            if effect.pending is not pending:
                self._carry_out(effect)
        if pending.waits:
            self._loop.call_soon_threadsafe(self._let_in_soon)
            return None
        own = effects[-1]
        return pending.answer_to(own.refusal) if isinstance(own, Refused) else self._sent(pending, own.choice)

    def _switch(self, request: ProxyRequest) -> Answer | None:
        """Sets the request's switches, before all else: they then hold whatever becomes of the choice. An
        Answer: why they cannot."""
        if request.attempt and request.switches:
            request.switches = without_cached_at(request.switches)
        client = None if self._clients is None else self._clients.find(request.headers("authorization"))
        try:
            switches = request_switches.read(request.moonpool_headers, self._switch_headers, client)
        except BadHeader as error:
            return refused(400, str(error), "bad_header")
        members = switches.members
        if not members or request_switches.uses_no_pool(request):
            return None
        request.switches = members
        why = request_switches.hindrance(request, switches)
        return None if why is None else request_switches.untold(request, why)

    def _objection(self, request: ProxyRequest, choice: Choice, workers: Collection[Worker]) -> Answer | None:
        """Why the chosen engines are not asked; None: they are. workers: those that may be chosen."""
        for worker in (choice.decode, choice.prefill) if request.switches else ():
            if worker is None:
                continue
            engine = self.at[worker.place]
            if worker not in workers:  # the data plane would choose another, whatever its kind
                why = f"engine {worker.name}, which the policy chose and must not, cannot be told to"
            elif engine is not None and not engine.takes_switches:
                why = f"engine {engine.name}, which is not vLLM's, cannot be told to"
            else:
                continue
            if (answer := request_switches.untold(request, why)) is not None:
                return answer
        return objection(request, choice)

    def _without_policy(self, request: ProxyRequest) -> Plan | Answer:
        """A policy of the user's own failed: any engine is better than none, if it can be told the request's
        switches."""
        places = request.candidates
        if request.switches:
            engines = [self.at[place] for place in places]
            places = tuple(each.place for each in engines if each is not None and each.takes_switches)
            if not places:
                why = "no engine that is left for it can be told to"
                if (answer := request_switches.untold(request, why)) is not None:
                    return answer
        return Plan((places or request.candidates)[0], tracked=self.uses_tokens)

    def _client_of(self, request: ProxyRequest) -> Client | Answer | None:
        """Whose key the request came with; an Answer: a key that may ask no more, since the clients were read
        again."""
        if self._clients is None:
            return None
        client = self._clients.find(request.headers("authorization"))
        if client is not None and "ask" in client.may:
            return client
        self._withdrawn(request)
        return NO_CLIENT

    def _sent(self, pending: PendingProxyRequest, choice: Choice) -> Plan:
        """The request is accounted for."""
        request, match, sent_s = pending.request, pending.match, pending.sent_s
        if match is not None:
            self._locator.sent(match, choice.computes.place, sent_s)
            for each in self._observers:
                each.on_prompt(choice.computes, match)
        for each in self._observers:
            each.on_choice(request, choice)
        waited_s = sent_s - request.arrived_s if pending.waits else 0.0
        neighbour = "" if match is None else self.neighbours.name(request, choice, match)
        if neighbour:
            with self._lock:
                self.scheduler.inflight.has_neighbour(pending.name)
        return self.handovers.plan(request, choice, tracked=True, waited_s=waited_s, neighbour=neighbour)

    # Requests that wait

    def _let_in_soon(self) -> None:
        if self._letting_in is None or self._letting_in.done():
            self._letting_in = self._loop.create_task(self._let_in())

    async def _let_in(self) -> None:
        """As long as a request waits."""
        scheduler = self.scheduler
        while scheduler.waiting:
            await asyncio.sleep(RELEASE_EVERY_S)
            with self._lock:
                self._learn(self._observed())
                self.candidates.look_again(map(str, scheduler.controller.queue.groups), self._clock())
            self._tick()
            while scheduler.unfinished:
                await asyncio.sleep(0)  # others want the lock, and the loop, too
                self._tick()

    def _tick(self) -> None:
        with self._lock:
            effects = self.scheduler.tick(self._clock())
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Dispatched[PendingProxyRequest] | Refused[PendingProxyRequest]) -> None:
        """Of a request that waited."""
        pending = effect.pending
        if isinstance(effect, Refused):
            self._resume(pending.request, pending.answer_to(effect.refusal))
            return
        try:
            plan = self._sent(pending, effect.choice)
        except Exception:  # of a policy's choice: the others must not wait in vain for it
            self._policy_failed()
            plan = Plan(effect.choice.decode.place, tracked=True)
        self._resume(pending.request, plan)

    # What the scheduler asks

    def is_gone(self, pending: PendingProxyRequest) -> bool:
        """Whether the data plane has lost the client."""
        return pending.request.gone

    def eligible(self, pending: PendingProxyRequest) -> EligibleWorkers:
        """The workers as of the request's arrival; for one that waits, those of its model as of the last
        ``look_again``. Under the lock."""
        if not pending.waits:
            return pending.able
        return self.candidates.of_waiting(str(pending.group), self._clock())

    def refresh(self, pending: PendingProxyRequest) -> Request:
        """What is known since the request's arrival: where a prompt lies is looked up once."""
        return pending.asked  # where the prompt lies is looked up when it comes

    def none_eligible(self, pending: PendingProxyRequest) -> Refusal:
        """Sets the request's answer, which says why, and returns a refusal without a sentence."""
        pending.answer = none_left()
        return _SAID

    def objection(self, pending: PendingProxyRequest, choice: Choice) -> Refusal | None:
        """Sets the request's answer where the chosen engines cannot serve it, such as a decode engine whose
        prefill engines have left; None: they can."""
        pending.answer = self._objection(pending.request, choice, self.eligible(pending).workers)
        return None if pending.answer is None else _SAID

    def _policy_failed(
        self, what: str = "the policy failed; the request goes to the first engine that may have it"
    ) -> None:
        self.late_errors += 1
        if self.late_errors <= TRACEBACKS_MAX:
            _log.exception(what)

    def _choose_simply(self, request: ProxyRequest) -> Decision:
        workers = self._those(request).workers
        if not workers:
            return none_left()
        if isinstance(client := self._client_of(request), Answer):
            return client
        choice = self.scheduler.policy.choose(UNKNOWN, workers, request.arrived_s)
        if (request.switches or not choice.decode.self_sufficient) and (
            answer := self._objection(request, choice, workers)
        ):
            return answer
        self.scheduler.tell_policy(UNKNOWN, choice, request.arrived_s)
        for each in self._observers:
            each.on_choice(request, choice)
        if choice.prefill is None and not choice.why and not asks_why(request):
            return choice.decode.place
        return self.handovers.plan(request, choice, tracked=False)

    def _learn(self, records: bytes) -> None:
        if records:
            for each in self._observers:
                each.on_records(records)
        for observation in self._read(records):
            self.scheduler.observe(observation)
            if observation.handed_over:
                self.handovers.observed(observation)
