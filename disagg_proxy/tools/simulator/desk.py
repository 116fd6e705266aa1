"""One simulated proxy: what a real one decides and keeps account of, with the same objects.

    arrival -> gate: refused, waits, or -> what the caches hold -> policy.choose -> admission -> sent

What the engines do with it comes back by ``observe``, as a data plane would have recorded it. Several desks
have instances, books and models of their own, and tell each other what they have in flight, and which blocks
it brings where.
"""

from __future__ import annotations

import math
from typing import Protocol

from moonpool.disagg_proxy.conductor.admission import Admission, Outlook, Refusal, ttft_s
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.demand import Dear
from moonpool.disagg_proxy.conductor.gate import HOLD_S, RELEASE_EVERY_S, Asked, Gate, Send
from moonpool.disagg_proxy.conductor.instance import Instance, Role
from moonpool.disagg_proxy.conductor.policy import Policy, hook_of
from moonpool.disagg_proxy.data_plane.observations import Handed, Observation, Outcome, Stage
from moonpool.disagg_proxy.dispatch.accounts import Accounts
from moonpool.disagg_proxy.peers.remote_inflight import RemoteInflight
from moonpool.disagg_proxy.peers.wire import BlocksExpected
from moonpool.disagg_proxy.tools.simulator.cache import Caches
from moonpool.disagg_proxy.tools.simulator.events import Events
from moonpool.disagg_proxy.tools.simulator.expected import Expected
from moonpool.disagg_proxy.tools.simulator.fleet import Fleet
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS

NO_INSTANCE = "no_instance"
KEY_BYTES = 16  # of a block, between proxies

_BEGUN, _ENDED = Stage.BEGUN, Stage.ENDED  # an enum's members are slow to look up
_DECODE = Role.DECODE


class Engines(Protocol):
    """What a desk stands before."""

    events: Events
    caches: Caches

    def submit(self, job: Job) -> None:
        """It is sent, to where its places say."""

    def refused(self, job: Job) -> None:
        """It is not sent; ``why_not`` says why."""


class Desk:
    """queue: so many requests may wait before they are sent, up to queue_deadline_s."""

    def __init__(
        self,
        policy: Policy,
        admission: Admission | None = None,
        queue: int = 0,
        queue_deadline_s: float = 30.0,
    ) -> None:
        self.accounts = Accounts((), admission)
        self.accounts.went = hook_of(policy)
        self.accounts.learnt = lambda instance: instance.teach(self.fleet.sisters(instance))
        self.expected = Expected()
        self._policy = policy
        self._admission = admission
        self._gate: Gate[Job] = Gate(self, queue, queue_deadline_s)
        self._releases = False  # an event for that is planned

    def open(self, engines: Engines, fleet: Fleet, *, pool: bool) -> None:
        """Before the first request. pool: instances fetch what others hold."""
        self.fleet = fleet
        self._engines = engines
        self._events = engines.events
        self._pool = pool
        self.shared = RemoteInflight(
            lambda name, _: next((each for each in fleet.instances if each.name == name), None), self._placed
        )
        for instance in fleet.instances:
            self.accounts.join(instance)

    def join(self, name: str) -> int:
        """An instance of this name, or kind; its place."""
        instance = self.fleet.join(name)
        self.accounts.join(instance)
        return instance.place

    def leave(self, place: int) -> None:
        """Nothing of the instance is under way any more."""
        self.accounts.forget(place)
        self.accounts.leave(place)
        self.expected.forget(place)

    def arrive(self, job: Job) -> None:
        longest_s = math.inf if self._admission is None else self._admission.objective.ttft_s
        if not self.fleet.can_serve():
            self._refuse(job, NO_INSTANCE)
            return
        refusal, out = self._gate.arrive(job, None, "", 0, longest_s, self._events.now_s)
        if refusal is not None:
            self._refuse(job, refusal.reason)
        if out is not None:
            self._refuse(out[0], out[1].reason)
        self._release_later()

    def again(self, job: Job) -> None:
        """An instance died before its first token: a proxy sends such a request anew, whatever it costs."""
        self.observe(job, Stage.ENDED, handed=Handed.NOT, outcome=Outcome.FAILED)
        job.restart()
        if not self.fleet.can_serve():
            self._refuse(job, NO_INSTANCE)
            return
        asked, choice = self._choose(job)
        self._send(job, asked, choice, None)

    def turned_away(self, job: Job) -> bool:
        """Whether admission ends it now that its prompt is computed."""
        if self._admission is None or job.choice is None:
            return False
        refusal = self._admission.after_prefill(job.name, *job.choice)
        if refusal is None:
            return False
        self.observe(job, Stage.ENDED, handed=Handed.NOT)
        job.why_not = refusal.reason
        return True

    def observe(self, job: Job, stage: Stage, *, handed: Handed, outcome: Outcome = Outcome.ANSWERED) -> None:
        """As the data plane of a proxy would have recorded it."""
        now_s = self._events.now_s
        apart = job.prefill_place != job.decode_place
        reused = job.own + job.fetched
        self.accounts.learn(
            Observation(  # in order, because that many names cost four times as much
                job.name,
                1,  # note
                job.prefill_place if apart else -1,
                job.decode_place,
                job.arrival.at_s,
                job.arrival.at_s if apart else 0.0,  # sent_prefill_s
                job.computed_s if apart else 0.0,  # prefill_done_s
                job.computed_s if apart else job.arrival.at_s,  # sent_decode_s
                now_s if stage is _BEGUN else job.first_s,
                now_s if stage is _ENDED else 0.0,  # last_byte_s
                job.arrival.tokens,
                reused,  # cached_tokens
                job.arrival.answer_tokens,
                reused,  # prefill_cached_tokens
                200,  # status
                outcome,
                1 + job.attempt,
                handed,
                1,  # stream
                stage,
                0,  # sampled
                b"",
                b"",
                b"",
            )
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of a part is broken."""
        if not len(self.shared):
            self.accounts.check_integrity()
        self.shared.check_integrity()
        self.expected.check_integrity()

    # What the gate asks

    def is_busy(self, ticket: Job, now_s: float) -> bool:
        return all(
            each.books.wait_s(now_s) >= HOLD_S for each in self.fleet.instances if each.role is not _DECODE
        )

    def share(self, ticket: Job) -> int:
        return sum(each.role is not _DECODE for each in self.fleet.instances)

    def is_gone(self, ticket: Job) -> bool:
        return False

    def gap_s(self, ticket: Job) -> float:
        return math.inf if self._admission is None else self._admission.objective.gap_s

    def how_dear(self, ticket: Job, now_s: float) -> Dear:
        if self._admission is None:
            return Dear.ALL
        asked = Request(ticket.arrival.tokens)
        return self._admission.how_dear(None, asked, self.fleet.instances, now_s)

    def ask(self, ticket: Job, waited_s: float, now_s: float, send: Send, *, dear: bool = False) -> Asked:
        if not self.fleet.can_serve():
            return Asked(0.0, Refusal(NO_INSTANCE, 0.0, "no instance is left"), final=True)
        asked, choice = self._choose(ticket)
        if send is Send.BESIDE and choice.computes.role is _DECODE:
            send, waited_s = Send.NOW, 0.0
        outlook = None
        if self._admission is not None:
            outlook = self._admission.outlook(asked, choice, now_s, waited_s=waited_s, dear=dear)
        refusal = None if outlook is None else outlook.refusal
        sent = refusal is None and send is Send.NOW
        if sent:
            self._send(ticket, asked, choice, outlook)
        final = self._admission is not None and self._admission.is_final(
            refusal, asked, self.fleet.instances, self._admission.objective
        )
        return Asked(choice.prefill_s, refusal, sent=sent, final=final)

    # What happens to a request

    def _choose(self, job: Job) -> tuple[Request, Choice]:
        held = self._engines.caches.find(job.blocks, expected=self.expected, unit=BLOCK_TOKENS)
        asked = Request(
            job.arrival.tokens,
            held.by_place,
            held.anywhere * BLOCK_TOKENS if self._pool else 0,
            holder=self.fleet.at[held.best].sender if self._pool and held.anywhere else None,
            gap_s=math.inf if self._admission is None else self._admission.gap_limit_s(),
        )
        return asked, self._policy.choose(asked, self.fleet.instances, self._events.now_s)

    def _send(self, job: Job, asked: Request, choice: Choice, outlook: Outlook | None) -> None:
        now_s = self._events.now_s
        job.choice = (asked, choice)
        job.prefill_place, job.decode_place = choice.computes.place, choice.decode.place
        job.fetches = self._pool and choice.fetch
        job.predicted_ttft_s = now_s - job.arrival.at_s + ttft_s(asked, choice, now_s)
        self.accounts.sent(job.name, choice, asked, streams=True, now_s=now_s, outlook=outlook)
        blocks = job.blocks
        self.expected.expect(job.prefill_place, blocks)
        job.expected = True
        if self.accounts.changed is not None:
            keys = b"".join([block.to_bytes(KEY_BYTES) for block in blocks])
            self.accounts.changed(BlocksExpected(choice.computes.name, BLOCK_TOKENS, keys))
        self._engines.submit(job)

    def _placed(self, instance: Instance, block_tokens: int, keys: bytes) -> None:
        """Another proxy has sent a prompt of these blocks there."""
        ends = range(KEY_BYTES, len(keys) + 1, KEY_BYTES)
        blocks = [int.from_bytes(keys[end - KEY_BYTES : end]) for end in ends]
        self.expected.expect(instance.place, blocks)

    def _refuse(self, job: Job, why: str) -> None:
        job.why_not = why
        self._engines.refused(job)

    def _release_later(self) -> None:
        if self._gate.line and not self._releases:
            self._releases = True
            self._events.at(self._events.now_s + RELEASE_EVERY_S, self._release)

    def _release(self) -> None:
        self._releases = False
        now_s = self._events.now_s
        for job, late in self._gate.expire(now_s):
            self._refuse(job, late.reason)
        while left := self._gate.release(now_s):
            for job, refusal in left:
                if refusal is not None:
                    self._refuse(job, refusal.reason)
        self._release_later()
