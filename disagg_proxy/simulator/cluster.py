"""Simulated instances under a real policy.

    arrival -> what the caches hold of it -> policy.choose -> fetch from another's cache -> prefill
            -> hand-over to decode, layer by layer while prefill runs -> decode -> Results

The policy sees what it sees in the proxy: ``Instance`` objects whose books and models are kept by
``Accounts`` from observations of the same form. It does not see the machine, nor how long an answer will be.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.accounts import Accounts
from moonpool.disagg_proxy.conductor.admission import Admission, Outlook, Refusal, ttft_s
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.gate import HOLD_S, RELEASE_EVERY_S, Asked, Gate
from moonpool.disagg_proxy.conductor.instance import Instance, Role
from moonpool.disagg_proxy.conductor.policy import Policy
from moonpool.disagg_proxy.observations import Handed, Observation, Outcome, Stage
from moonpool.disagg_proxy.simulator.cache import Caches
from moonpool.disagg_proxy.simulator.engine import PrefillEngine, WholeEngine
from moonpool.disagg_proxy.simulator.events import Events
from moonpool.disagg_proxy.simulator.eviction.study import make_cache
from moonpool.disagg_proxy.simulator.job import Job
from moonpool.disagg_proxy.simulator.links import Links
from moonpool.disagg_proxy.simulator.loads import Loads
from moonpool.disagg_proxy.simulator.machine import MACHINES, Machine
from moonpool.disagg_proxy.simulator.trace import BLOCK_TOKENS, Arrival


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """prefill, decode, whole: how many instances of each role; whole ones do both. Prefill without decode or
    whole ones: answers end with their first token.

    pool:         an instance fetches what others' caches hold; else each has its own alone.
    chunk_tokens: of a prompt that are computed at one time; 0: whole prompts.
    width:        nodes of a prefill instance, in a pipeline of chunks.
    layerwise:    KV is handed over while it is computed; else after the whole prompt.
    eviction:     a name of CACHES: what an instance's prefix cache does when it is full.
    """

    prefill: int = 0
    decode: int = 0
    whole: int = 0
    machine: Machine = MACHINES["paper"]
    pool: bool = True
    chunk_tokens: int = 8192
    width: int = 1
    layerwise: bool = True
    eviction: str = "lru"

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode, self.whole) < 0 or not self.prefill + self.whole:
            raise _bad("a cluster needs instances that compute prompts: prefill or whole ones")
        if self.decode and not self.prefill:
            raise _bad("decode instances need prefill instances that compute the prompts")
        make_cache(self.eviction, 0)
        if self.width < 1 or self.chunk_tokens < 0 or (self.width > 1 and not self.chunk_tokens):
            raise _bad("a pipeline has a width of 1 or more, and chunks of some tokens")


class Cluster:
    """done: hears of each request when it is over or refused. queue: so many may wait before they are sent,
    up to queue_deadline_s."""

    def __init__(
        self,
        settings: ClusterSettings,
        policy: Policy,
        done: Callable[[Job], None],
        admission: Admission | None = None,
        queue: int = 0,
        queue_deadline_s: float = 30.0,
    ) -> None:
        self.settings = settings
        self.events = Events()
        machine = settings.machine
        # Where nobody decodes, a policy must not look for somebody who does.
        computing = Role.PREFILL if settings.decode or settings.whole else Role.BOTH
        roles = (
            [computing] * settings.prefill + [Role.DECODE] * settings.decode + [Role.BOTH] * settings.whole
        )
        self.instances = tuple(
            Instance(place, f"{role.value}-{place}", role, room_tokens=machine.room_tokens)
            for place, role in enumerate(roles)
        )
        for instance in self.instances:
            instance.obeys = True
        self.caches = Caches(
            len(roles), machine.cache_tokens // BLOCK_TOKENS, functools.partial(make_cache, settings.eviction)
        )
        self.links = Links(len(roles), machine.link_bytes_s)
        self.loads = Loads()
        self.accounts = Accounts(self.instances, admission)
        self._policy = policy
        self._admission = admission
        self._done = done
        self._gate: Gate[Job] = Gate(self, queue, queue_deadline_s)
        self._releases = False  # an event for that is planned
        self._computing = tuple(each for each in self.instances if each.role is not Role.DECODE)
        self._arrived = 0
        self.engines = [self._engine(instance) for instance in self.instances]

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """All of them, to the last token."""
        for arrival in arrivals:
            self.events.run_before(arrival.at_s)
            if arrival.at_s >= self.loads.next_s:
                self._look(arrival.at_s)
            self._arrive(arrival)
        self.events.run_before(float("inf"))

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of a part is broken."""
        self.accounts.check_integrity()
        self.caches.check_integrity()

    # What engines say

    def next(self, job: Job) -> None:
        blocks, place, now_s = job.arrival.full_blocks, job.prefill_place, self.events.now_s
        held = self.caches.find(blocks)
        own = held.by_place[place]
        job.own, job.ready_s = own * BLOCK_TOKENS, now_s
        if job.fetches and held.anywhere > own:
            job.fetched = (held.anywhere - own) * BLOCK_TOKENS
            size = job.fetched * self.settings.machine.kv_bytes
            job.ready_s = self.links.send(held.best, place, size, now_s)
            self.caches.keep(place, blocks[: held.anywhere], now_s)

    def computed(self, job: Job) -> None:
        """By a prefill engine."""
        self.caches.arrived(job.prefill_place, job.arrival.full_blocks)
        decode = self.engines[job.decode_place]
        if isinstance(decode, PrefillEngine):  # nobody decodes
            job.first_s = job.done_s = self.events.now_s
            self._observe(job, Stage.BEGUN, handed=Handed.NOT)
            self.ended(job)
            return
        self._observe(job, Stage.PREFILLED, handed=Handed.TWO_STEP)
        if self._admission is not None and job.choice is not None:
            refusal = self._admission.after_prefill(job.name, *job.choice)
            if refusal is not None:
                self._observe(job, Stage.ENDED, handed=Handed.NOT)
                self._refuse(job, refusal)
                return
        machine = self.settings.machine
        size = job.arrival.tokens * machine.kv_bytes
        begun_s = job.begun_s if self.settings.layerwise else self.events.now_s
        sent_s = self.links.send(job.prefill_place, job.decode_place, size, begun_s)
        there_s = max(sent_s, self.events.now_s) + machine.handover_s
        self.events.at(there_s, functools.partial(decode.submit, job))

    def began(self, job: Job) -> None:
        apart = job.prefill_place != job.decode_place
        if not apart:
            self.caches.arrived(job.prefill_place, job.arrival.full_blocks)
        self._observe(job, Stage.BEGUN, handed=Handed.TWO_STEP if apart else Handed.NOT)

    def ended(self, job: Job) -> None:
        self._observe(job, Stage.ENDED, handed=Handed.NOT)
        self._done(job)

    # What happens to a request

    def _arrive(self, arrival: Arrival) -> None:
        self._arrived += 1
        job = Job(self._arrived, arrival)
        longest_s = math.inf if self._admission is None else self._admission.objective.ttft_s
        refusal, out = self._gate.arrive(job, None, 0, longest_s, arrival.at_s)
        if refusal is not None:
            self._refuse(job, refusal)
        if out is not None:
            self._refuse(*out)
        self._release_later()

    def _release_later(self) -> None:
        if self._gate.line and not self._releases:
            self._releases = True
            self.events.at(self.events.now_s + RELEASE_EVERY_S, self._release)

    def _release(self) -> None:
        self._releases = False
        now_s = self.events.now_s
        for job, refusal in (*self._gate.expire(now_s), *self._gate.release(now_s)):
            if refusal is not None:
                self._refuse(job, refusal)
        self._release_later()

    def _refuse(self, job: Job, refusal: Refusal) -> None:
        job.why_not = refusal.reason
        self._done(job)

    # What the gate asks

    def is_busy(self, ticket: Job, now_s: float) -> bool:
        return all(each.books.wait_s(now_s) >= HOLD_S for each in self._computing)

    def share(self, ticket: Job) -> int:
        return len(self._computing)

    def is_gone(self, ticket: Job) -> bool:
        return False

    def ask(self, ticket: Job, waited_s: float, now_s: float, *, send: bool) -> Asked:
        job, blocks = ticket, ticket.arrival.full_blocks
        held = self.caches.find(blocks, expected=True, unit=BLOCK_TOKENS)
        asked = Request(
            job.arrival.tokens,
            held.by_place,
            held.anywhere * BLOCK_TOKENS if self.settings.pool else 0,
            holder=self.instances[held.best].sender if self.settings.pool and held.anywhere else None,
        )
        choice = self._policy.choose(asked, self.instances, now_s)
        outlook = None
        if self._admission is not None:
            outlook = self._admission.outlook(asked, choice, now_s, waited_s=waited_s)
        refusal = None if outlook is None else outlook.refusal
        if send and refusal is None:
            self._send(job, asked, choice, outlook)
        return Asked(choice.prefill_s, refusal, final=refusal is not None and refusal.reason == "ttft")

    def _send(self, job: Job, asked: Request, choice: Choice, outlook: Outlook | None) -> None:
        now_s, computes = self.events.now_s, choice.computes
        job.choice = (asked, choice)
        job.prefill_place, job.decode_place = computes.place, choice.decode.place
        job.fetches = self.settings.pool and choice.fetch
        job.predicted_ttft_s = now_s - job.arrival.at_s + ttft_s(asked, choice, now_s)
        self.accounts.sent(job.name, choice, asked, streams=True, now_s=now_s, outlook=outlook)
        self.caches.expect(computes.place, job.arrival.full_blocks)
        self.engines[computes.place].submit(job)

    def _look(self, now_s: float) -> None:
        """How loaded prefill and decode are."""
        waits_s = [each.books.wait_s(now_s) for each in self.instances if each.role is not Role.DECODE]
        gaps_s = [engine.gap_s(now_s) for engine in self.engines if isinstance(engine, WholeEngine)]
        self.loads.add(now_s, sum(waits_s) / max(len(waits_s), 1), sum(gaps_s) / max(len(gaps_s), 1))

    def _engine(self, instance: Instance) -> PrefillEngine | WholeEngine:
        settings, place = self.settings, instance.place
        if place < settings.prefill:
            return PrefillEngine(
                place,
                settings.machine,
                self.events,
                self.caches,
                self,
                width=settings.width,
                chunk_tokens=settings.chunk_tokens or 1 << 31,
            )
        return WholeEngine(
            place, settings.machine, self.events, self.caches, self, chunk_tokens=settings.chunk_tokens
        )

    def _observe(self, job: Job, stage: Stage, handed: Handed) -> None:
        """As the data plane of a proxy would have recorded it."""
        now_s = self.events.now_s
        apart = job.prefill_place != job.decode_place
        self.accounts.learn(
            Observation(
                request=job.name,
                note=1,
                prefill=job.prefill_place if apart else -1,
                decode=job.decode_place,
                arrived_s=job.arrival.at_s,
                sent_prefill_s=job.arrival.at_s if apart else 0.0,
                prefill_done_s=job.computed_s if apart else 0.0,
                sent_decode_s=job.computed_s if apart else job.arrival.at_s,
                first_byte_s=now_s if stage is Stage.BEGUN else job.first_s,
                last_byte_s=now_s if stage is Stage.ENDED else 0.0,
                prompt_tokens=job.arrival.tokens,
                cached_tokens=job.own + job.fetched,
                completion_tokens=job.arrival.answer_tokens,
                prefill_cached_tokens=job.own + job.fetched,
                status=200,
                outcome=Outcome.ANSWERED,
                attempts=1,
                handed_over=handed,
                stream=1,
                stage=stage,
                sampled=0,
                trace_id=b"",
                parent_id=b"",
                span_id=b"",
            )
        )


def _bad(sentence: str) -> ConfigError:
    return ConfigError(sentence, operation="simulate")
