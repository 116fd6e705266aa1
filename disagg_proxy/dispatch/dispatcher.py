"""Turns a policy's choice into a plan: which of the engines that may be chosen can do what, what is known of
the prompt, and what is on its way already.

``decide`` runs on the data plane's thread, once for each request and attempt, and never blocks: a prompt
whose token ids an engine must be asked for goes to the event loop, and the plan is handed in later. Text that
is tokenised here does not come to ``decide`` at all, unless too much of it is in line:
``tokens/tokenizer_threads.py`` calls ``ids_of`` and ``told``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.admission import wishes
from moonpool.disagg_proxy.admission.settings import AdmissionSettings
from moonpool.disagg_proxy.admission.ticket import Ticket
from moonpool.disagg_proxy.admission.wishes import BadHeader
from moonpool.disagg_proxy.conductor.admission import Admission, Objective, Refusal
from moonpool.disagg_proxy.conductor.choice import ANSWER_TOKENS, Choice, Request
from moonpool.disagg_proxy.conductor.demand import Dear
from moonpool.disagg_proxy.conductor.gate import HOLD_S, RELEASE_EVERY_S, RELEASED_MAX, Asked, Gate, Send
from moonpool.disagg_proxy.conductor.instance import Instance, Role
from moonpool.disagg_proxy.conductor.plan import Answer, Decision, Plan, refused
from moonpool.disagg_proxy.conductor.policies.roles import Groups
from moonpool.disagg_proxy.conductor.policy import Policy, hook_of
from moonpool.disagg_proxy.conductor.sender import Sender
from moonpool.disagg_proxy.data_plane import observations
from moonpool.disagg_proxy.data_plane.observations import Handed
from moonpool.disagg_proxy.dispatch.accounts import Accounts
from moonpool.disagg_proxy.dispatch.candidates import GENERATES, Candidates, Fit
from moonpool.disagg_proxy.dispatch.handovers import Handovers
from moonpool.disagg_proxy.dispatch.locality import Locality, Place, seed_of
from moonpool.disagg_proxy.engines.engine import Engine
from moonpool.disagg_proxy.engines.sglang import PROMPTS_MAX
from moonpool.disagg_proxy.peers.host_identity import site_of
from moonpool.disagg_proxy.tokens.local_source import LocalSource
from moonpool.disagg_proxy.tokens.source import PromptCache, TextPrompt, TokenSource

UNKNOWN = Request()
ANSWER_TOKENS_MAX = 1 << 30  # that a request is taken to ask for; no engine has room for more
TEXT_BYTES_MAX = 4 << 20  # of a body whose text is tokenised: about a million tokens
ASKED_MAX = 1024  # prompts that are being tokenised; beyond it a request is routed without its prefix
TRACEBACKS_MAX = 5
Result = TypeVar("Result")
EVERYBODY = AdmissionSettings()

_log = logging.getLogger("moonpool.proxy")


class Dispatcher:
    """tokens: where ids of text come from, None for nowhere; places: for engines, which join and leave on
    the event loop; resume: hands in a decision that comes later; observed: takes what the data plane has
    recorded; clock: the data plane's; handover, admission: the settings; hears_pool: whether the pool's KV
    events are followed."""

    def __init__(
        self,
        policy: Policy,
        locality: Locality,
        tokens: TokenSource | LocalSource | None,
        *,
        places: int,
        loop: asyncio.AbstractEventLoop,
        resume: Callable[[ProxyRequest, Decision], None],
        observed: Callable[[], bytes],
        clock: Callable[[], float],
        handover: str = "auto",
        admission: AdmissionSettings = EVERYBODY,
        hears_pool: bool = False,
        policy_name: str = "",
    ) -> None:
        self.candidates = Candidates(places)
        self.at = self.candidates.at
        self._those = self.candidates.of
        self.admission = Admission(admission.objective) if admission.any else None
        self.gate: Gate[Ticket] | None = None
        if self.admission is not None:
            self.gate = Gate(self, admission.queue_max, admission.queue_deadline)
        self._letting_in: asyncio.Task[None] | None = None
        self.accounts = Accounts(admission=self.admission)
        self.accounts.hears = locality.is_heard
        if hears_pool:
            self.accounts.hidden_pool = None
        self.handovers = Handovers(self.at, handover=handover)
        self.known = PromptCache()
        self._pool = Sender()  # all of its nodes: which of them will send is not known
        self.blind = 0
        self.late_errors = 0  # of the policy, that the data plane does not count
        self.chosen: Callable[[ProxyRequest, Choice], None] | None = None  # hears of each choice
        self.seen: Callable[[bytes], None] | None = None  # hears of all records that are read
        self.placed: Callable[[Instance, Place], None] | None = None  # hears where each prompt went
        self._policy, self._hook = policy, hook_of(policy)
        self.policy_name = policy_name or type(policy).__name__
        self.accounts.went = self._went
        self.accounts.learnt = self._learnt
        # Of a policy that looks at prompts every record is kept account of.
        self._read = observations.read if policy.uses_tokens else observations.read_kept
        self._locality = locality
        self._tokens = tokens
        self._resume = resume
        self._observed = observed
        self._clock = clock
        self._lock = threading.Lock()
        self._loop = loop
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """That requests may go to, ordered by place."""
        return self.candidates.engines

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Of the engines, ordered by place."""
        return self.candidates.instances

    @property
    def uses_tokens(self) -> bool:
        """Whether prompts are looked at; without, no books are kept."""
        return self._policy.uses_tokens

    @property
    def healthy_count(self) -> int:
        return sum(engine.liveness.healthy for engine in self.engines)

    def decide(self, request: ProxyRequest) -> Decision:
        """The plan for a request, or None when it comes later."""
        if not self._policy.uses_tokens:
            return self._choose_simply(request)
        if request.kind not in GENERATES:
            return self._choose(request, UNKNOWN, None)
        ids = request.prompt_tokens()
        if ids is not None:
            return self._choose_by(request, ids)
        if len(request.body) > TEXT_BYTES_MAX:  # to copy and to tokenise it would hold up all others
            self.blind += 1
            return self._choose(request, UNKNOWN, None)
        prompt = TextPrompt(request.kind, request.model, bytes(request.body))
        with self._lock:
            ids = self.known.find(prompt)
        if ids is not None:
            return self._choose_by(request, ids)
        source = self._tokens
        if source is None or isinstance(source, LocalSource) or len(self._asking) >= ASKED_MAX:
            self.blind += 1
            return self._choose(request, UNKNOWN, None)
        self._loop.call_soon_threadsafe(self._ask, source, request, prompt)
        return None

    def ids_of(self, request: ProxyRequest) -> bytes | None:
        """The ids of a text that is tokenised here; None when they are not to be had. Blocks."""
        assert isinstance(self._tokens, LocalSource)
        prompt = TextPrompt(request.kind, request.model, bytes(request.body))
        with self._lock:
            ids = self.known.find(prompt)
        if ids is None:
            ids = self._tokens.ids(prompt)
            if ids is not None:
                with self._lock:
                    self.known.keep(prompt, ids)
        return ids

    def told(self, request: ProxyRequest, ids: bytes | None) -> None:
        """Decides about a text, now that its ids are there or not to be had. On any thread."""
        if request.gone:
            return
        try:
            if ids is None:
                self.blind += 1
                decision = self._choose(request, UNKNOWN, None)
            else:
                decision = self._choose_by(request, ids)
            if decision is not None:  # else it waits at the gate
                self._resume(request, decision)
        except Exception:  # a policy of the user's own: any engine is better than none
            self._policy_failed()
            self._resume(request, Plan(request.candidates[0], note=1))

    def learn(self) -> None:
        """Takes in what the data plane has observed."""
        now_s = self._clock()
        with self._lock:
            self._learn(self._observed())
            self.accounts.expire(now_s)
        self._locality.expire(now_s)

    def in_books(self, act: Callable[[Accounts, float], Result]) -> Result:
        """What another part has to do with the books, now."""
        with self._lock:
            return act(self.accounts, self._clock())

    def join(self, engine: Engine) -> None:
        """There is one more engine, at a place where none is."""
        instance = Instance(
            engine.place,
            engine.name,
            Role(engine.role),
            load=engine.load,
            known_as=engine.spec.known_as,
            site=site_of(*engine.spec.address),
        )
        with self._lock:
            self.accounts.join(instance)
        self.candidates.join(engine, instance)
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
            self.accounts.leave(engine.place)
        self.candidates.leave(engine)

    def became(self, engine: Engine) -> None:
        """The engine turned out to be something else than it was given as."""
        instance = self.candidates.instance_at[engine.place]
        self.candidates.became(engine)
        with self._lock:
            self.candidates.look_anew()
            if instance is not None:
                instance.learn_from(self.candidates.sisters(engine))

    def forget(self, engine: Engine) -> None:
        """The engine left the rotation: what it had in work and in its cache is not counted on."""
        with self._lock:
            self.accounts.forget(engine.place)
        self._locality.forget(engine.place)

    def hurry(self, seconds: float) -> None:
        """The proxy ends: no request waits for longer than this to be sent."""
        if self.gate is not None:
            with self._lock:
                self.gate.hurry(self._clock() + seconds)

    async def close(self) -> None:
        tasks = [*self._asking, *([self._letting_in] if self._letting_in is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._tokens is not None and not isinstance(self._tokens, LocalSource):
            await self._tokens.close()

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of a part is broken."""
        self.learn()
        with self._lock:
            self.accounts.check_integrity()
            self.known.check_integrity()
            if self.gate is not None:
                self.gate.line.check_integrity()

    # Ids of text that another process knows, on the event loop

    def _ask(self, source: TokenSource, request: ProxyRequest, prompt: TextPrompt) -> None:
        task = self._loop.create_task(self._ids_then_choose(source, request, prompt))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ids_then_choose(self, source: TokenSource, request: ProxyRequest, prompt: TextPrompt) -> None:
        ids = await source.ids(prompt)
        if ids is not None:
            with self._lock:
                self.known.keep(prompt, ids)
        self.told(request, ids)

    # The choice

    def _choose_by(self, request: ProxyRequest, ids: bytes) -> Decision:
        model = request.model
        seed = seed_of(request.cache_salt, model, self._models(request, model))
        place = self._locality.find(ids, seed)
        # A client may write any number of 64 bits, and what is reckoned with it must still be one.
        answer_tokens = min(max(request.max_tokens or ANSWER_TOKENS, 1), ANSWER_TOKENS_MAX)
        pool, hidden = place.pool, self.accounts.hidden_pool
        if hidden is not None and hidden.seen:
            pool = self._reachable(request, place)
        asked = Request(len(ids) // 4, place.own, pool, answer_tokens, holder=self._pool)
        return self._choose(request, asked, place)

    def _reachable(self, request: ProxyRequest, place: Place) -> int:
        """Tokens of the prompt that some engine of its model holds, and has saved in a pool of all."""
        own = place.own
        held = (own[each.place] for each in self._those(request).instances if each.place < len(own))
        return max(held, default=0)

    def _choose(self, request: ProxyRequest, asked: Request, place: Place | None) -> Decision:
        instances = self._those(request).instances
        if not instances:
            return _nobody()
        try:
            wished = wishes.read(request.headers)
        except BadHeader as error:
            return refused(400, str(error), "bad_header")
        if wished is not wishes.NOTHING:
            asked = asked._replace(tenant=wished.tenant, priority=wished.priority, session=wished.session)
        if request.kind in GENERATES:
            if not request.wants_one:
                asked = asked._replace(one=False)
            if self.admission is not None:
                objective = wished.objective(self.admission.objective)
                # A client that takes any gap shares its engine with others, which do not.
                asked = asked._replace(gap_s=self.admission.gap_limit_s(objective.gap_s))
                if not request.attempt:
                    return self._admit(request, asked, place, objective)
        with self._lock:
            self._learn(self._observed())
            now_s = self._clock()
            choice = self._policy.choose(asked, instances, now_s)
            if not choice.decode.alone and (refusal := _refusal(request, choice)):
                return refusal
            self.accounts.sent(request.id, choice, asked, streams=request.stream, now_s=now_s)
        return self._sent(request, choice, place, now_s)

    def _sent(
        self, request: ProxyRequest, choice: Choice, place: Place | None, now_s: float, waited_s: float = 0.0
    ) -> Plan:
        """It is in the books."""
        if place is not None:
            self._locality.sent(place, choice.computes.place, now_s)
            if self.placed is not None:
                self.placed(choice.computes, place)
        if self.chosen is not None:
            self.chosen(request, choice)
        return self._plan(request, choice, note=1, waited_s=waited_s)

    # The gate

    def _admit(
        self, request: ProxyRequest, asked: Request, place: Place | None, objective: Objective
    ) -> Decision:
        """None: it waits."""
        assert self.gate is not None
        assert self.admission is not None
        # Those that may go to the same engines; which ones these are may change while they wait.
        model = "" if self._models(request, request.model) is None else request.model
        ticket = Ticket(request, asked, place, objective, model)
        with self._lock:
            self._learn(self._observed())
            now_s = self._clock()
            refusal, out = self.gate.arrive(
                ticket, model, asked.tenant, asked.priority, ticket.objective.ttft_s, now_s
            )
            ticket.waits = refusal is None and ticket.choice is None
        if out is not None:
            self._turn_away(*out)
        if refusal is not None:
            return ticket.turned_away(refusal)
        if ticket.waits:
            self._loop.call_soon_threadsafe(self._let_in_soon)
            return None
        assert ticket.choice is not None
        return self._sent(request, ticket.choice, place, ticket.sent_s)

    def _let_in_soon(self) -> None:
        if self._letting_in is None or self._letting_in.done():
            self._letting_in = self._loop.create_task(self._let_in())

    async def _let_in(self) -> None:
        """As long as a request waits."""
        assert self.gate is not None
        while self.gate.line:
            await asyncio.sleep(RELEASE_EVERY_S)
            with self._lock:
                self._learn(self._observed())
                self.candidates.look_again(map(str, self.gate.line.groups), self._clock())
                late = self.gate.expire(self._clock())
            for ticket, refusal in late:
                self._turn_away(ticket, refusal)
            while self._released() == RELEASED_MAX:
                await asyncio.sleep(0)  # others want the lock, and the loop, too

    def _released(self) -> int:
        """How many wait no longer."""
        assert self.gate is not None
        with self._lock:
            left = self.gate.release(self._clock())
        for ticket, refusal in left:
            if refusal is not None:
                self._turn_away(ticket, refusal)
            elif ticket.choice is not None:
                self._send_later(ticket, ticket.choice)
        return len(left)

    def _send_later(self, ticket: Ticket, choice: Choice) -> None:
        request = ticket.request
        try:
            waited_s = ticket.sent_s - request.arrived_s
            plan = self._sent(request, choice, ticket.place, ticket.sent_s, waited_s)
        except Exception:  # of a policy's choice: the others must not wait in vain for it
            self._policy_failed()
            plan = Plan(choice.decode.place, note=1)
        self._resume(request, plan)

    def _turn_away(self, ticket: Ticket, refusal: Refusal) -> None:
        self._resume(ticket.request, ticket.turned_away(refusal))

    # What the gate asks

    def is_busy(self, ticket: Ticket, now_s: float) -> bool:
        computing = self._able(ticket).computing
        return bool(computing) and all(each.books.wait_s(now_s) >= HOLD_S for each in computing)

    def share(self, ticket: Ticket) -> int:
        return len(self._able(ticket).computing)

    def is_gone(self, ticket: Ticket) -> bool:
        return ticket.request.gone

    def gap_s(self, ticket: Ticket) -> float:
        return ticket.objective.gap_s

    def how_dear(self, ticket: Ticket, now_s: float) -> Dear:
        assert self.admission is not None
        instances = self._able(ticket).instances
        if not instances:
            return Dear.ALL
        return self.admission.how_dear(ticket.model, ticket.asked, instances, now_s)

    def ask(self, ticket: Ticket, waited_s: float, now_s: float, send: Send, *, dear: bool = False) -> Asked:
        assert self.admission is not None
        request, asked = ticket.request, ticket.asked
        able = self._able(ticket)
        instances = able.instances
        if not instances:
            ticket.answer = _nobody()
            return Asked(0.0, Refusal("no_engine", 0.0, ""), final=True)
        choice = self._choice_at_gate(ticket, instances, now_s)
        if not choice.decode.alone and (answer := _refusal(request, choice)):
            ticket.answer = answer
            return Asked(0.0, Refusal("no_engine", 0.0, ""), final=True)
        if send is Send.BESIDE and choice.computes not in able.computing:
            send, waited_s = Send.NOW, 0.0
        outlook = self.admission.outlook(
            asked, choice, now_s, objective=ticket.objective, waited_s=waited_s, dear=dear
        )
        refusal = outlook.refusal
        sent = refusal is None and send is Send.NOW
        if sent:
            self.accounts.sent(
                request.id,
                choice,
                asked,
                streams=request.stream,
                now_s=now_s,
                outlook=outlook,
                objective=ticket.objective,
            )
            ticket.choice, ticket.sent_s = choice, now_s
        return Asked(
            choice.prefill_s,
            refusal,
            sent=sent,
            final=self.admission.is_final(refusal, asked, instances, ticket.objective),
            prompt=asked.tokens - asked.own_at(choice.computes),
            answer=round(self.admission.answers.tokens),
        )

    def _choice_at_gate(self, ticket: Ticket, instances: Sequence[Instance], now_s: float) -> Choice:
        try:
            choice = self._policy.choose(ticket.asked, instances, now_s)
            if choice.decode not in instances:
                raise LookupError(f"the policy chose {choice.decode.name}, which is not among the candidates")
            return choice
        except Exception:  # what comes to the gate is weighed there, whatever chose
            self._policy_failed("the policy failed; the request goes to the engine with the least work")
            return _without_policy(ticket.asked, instances, now_s)

    def _able(self, ticket: Ticket) -> Fit:
        """The instances that its request may go to now."""
        if not ticket.waits:
            return self._those(ticket.request)
        return self.candidates.of_waiting(ticket.model, self._clock())

    def _went(self, asked: Request, choice: Choice, now_s: float) -> None:
        try:
            self._hook(asked, choice, now_s)
        except Exception:  # a policy of the user's own; the request is on its way
            self._policy_failed("the policy failed when it was told what was sent; the request goes on")

    def _learnt(self, instance: Instance) -> None:
        engine = self.candidates.at[instance.place]
        if engine is not None:
            instance.teach(list(self.candidates.sisters(engine)))

    def _policy_failed(
        self, what: str = "the policy failed; the request goes to the first engine that may have it"
    ) -> None:
        self.late_errors += 1
        if self.late_errors <= TRACEBACKS_MAX:
            _log.exception(what)

    def _choose_simply(self, request: ProxyRequest) -> Decision:
        instances = self._those(request).instances
        if not instances:
            return _nobody()
        choice = self._policy.choose(UNKNOWN, instances, request.arrived_s)
        if not choice.decode.alone and (refusal := _refusal(request, choice)):
            return refusal
        self._went(UNKNOWN, choice, request.arrived_s)
        if self.chosen is not None:
            self.chosen(request, choice)
        if choice.prefill is None and not choice.why and request.headers("x-moonpool-decision") is None:
            return choice.decode.place
        return self._plan(request, choice, note=0)

    def _plan(self, request: ProxyRequest, choice: Choice, *, note: int, waited_s: float = 0.0) -> Plan:
        decode, prefill = choice.decode, choice.prefill
        if prefill is None:
            plan, form = Plan(decode.place, note=note), Handed.NOT
        else:
            plan, form = self.handovers.plan(decode.place, prefill.place, request, note)
        if request.headers("x-moonpool-decision") is None:
            return plan
        why = {
            "policy": self.policy_name,
            "engine": decode.name,
            "prefill": prefill and prefill.name,
            "handover": form.name.lower() if form else None,
            **{
                name: round(value, 5) if isinstance(value, float) else value
                for name, value in choice.why.items()
            },
        }
        if waited_s:
            why["queued_s"] = round(waited_s, 5)
        return plan._replace(headers=((b"X-Moonpool-Decision", msgspec.json.encode(why)),))

    def _models(self, request: ProxyRequest, model: str) -> Mapping[str, bytes] | None:
        for place in request.candidates:
            engine = self.at[place]
            models: Mapping[str, bytes] | None = None if engine is None else engine.models
            if models and model in models:
                return models
        return None

    def _learn(self, records: bytes) -> None:
        if self.seen is not None and records:
            self.seen(records)
        for observation in self._read(records):
            self.accounts.learn(observation)
            if observation.handed_over:
                self.handovers.observed(observation)


def _without_policy(asked: Request, instances: Sequence[Instance], now_s: float) -> Choice:
    """The engine with the least work; with a prefill engine where it does not answer alone."""

    def wait_s(instance: Instance) -> float:
        return instance.books.wait_s(now_s)

    groups = Groups.of(instances)
    decode = min((*groups.alone, *groups.takers), key=wait_s)
    computing = () if decode.alone else groups.givers[False]
    computes = min(computing, key=wait_s, default=decode)
    took_s = computes.prefill_model.predict(asked.tokens, asked.own_at(computes), asked.from_pool(computes))
    return Choice(decode, computes if computing else None, took_s)


def _nobody() -> Answer:
    why = "the engines that this request might have gone to have left; try again"
    return refused(503, why, "no_engine")


def _refusal(request: ProxyRequest, choice: Choice) -> Answer | None:
    """Why engines that cannot answer alone are not asked; None: they are."""
    if request.kind not in GENERATES:
        return None  # it needs no cache
    if choice.prefill is None or choice.decode.role is Role.PREFILL:
        who = "prefill" if choice.decode.role is Role.DECODE else "decode"
        why = f"no healthy {who} engine is left for {choice.decode.name}, which does not answer alone"
        return refused(503, f"{why}; GET /engines says why, try again soon", "no_engine")
    if choice.prefill.alone:
        why = f"{choice.decode.name} is SGLang's, and its prefill engine {choice.prefill.name} is not"
        return refused(503, f"{why}: give them model names of their own, or a proxy each", "no_engine")
    if (request.prompt_count() or 0) > PROMPTS_MAX:
        why = f"a request has {PROMPTS_MAX} prompts at most; send several"
        return refused(400, why, "too_many_prompts")
    return None
