"""One simulated proxy: the scheduler of a real one, driven by the simulation's time.

    arrival -> scheduler.submit: refused, waits, or -> what the caches hold -> policy.choose -> sent

What the engines do with it comes back by ``observe``, as a data plane would have recorded it, or late and
with errors (``reports.py``). Several proxies have workers, loads and models of their own, and report their
requests in flight, with their blocks, to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from moonpool.disagg_proxy.conductor.admission import Admission, Refusal, ttft_s
from moonpool.disagg_proxy.conductor.admission_controller import RELEASE_EVERY_S
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policy import Policy
from moonpool.disagg_proxy.conductor.scheduler import (
    NO_OBJECTIVE,
    Dispatched,
    EligibleWorkers,
    PendingRequest,
    QueueLimits,
    Refused,
    Scheduler,
)
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.data_plane.observations import HandoverForm, Observation, Outcome, Stage
from moonpool.disagg_proxy.peers.inflight_feed import InflightFeed
from moonpool.disagg_proxy.peers.remote_inflight import RemoteInflight
from moonpool.disagg_proxy.peers.wire import BlocksExpected, Change
from moonpool.disagg_proxy.tools.simulator.cache import Caches
from moonpool.disagg_proxy.tools.simulator.events import Events
from moonpool.disagg_proxy.tools.simulator.expected import Expected
from moonpool.disagg_proxy.tools.simulator.fleet import Fleet
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.reports import PROMPT, Reporter, ReportSettings
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS

NO_INSTANCE = "no_instance"
KEY_BYTES = 16  # of a block, between proxies

_ENDED = Stage.ENDED  # an enum's members are slow to look up


class Engines(Protocol):
    """The engines of a proxy."""

    events: Events
    caches: Caches

    def submit(self, job: Job) -> None:
        """It is sent to the instances at its places."""

    def refused(self, job: Job) -> None:
        """It is not sent; ``why_not`` says why."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Pending(PendingRequest):
    job: Job


class SimulatedProxy:
    """queue: the most requests that wait before they are sent, up to queue_deadline_s. reports: how it hears
    of what engines do; seed: of the errors in them."""

    def __init__(
        self,
        policy: Policy,
        admission: Admission | None = None,
        queue: int = 0,
        queue_deadline_s: float = 30.0,
        reports: ReportSettings = PROMPT,
        seed: int = 0,
    ) -> None:
        self._reporter = Reporter(reports, seed)
        self._objective = NO_OBJECTIVE if admission is None else admission.objective
        limits = QueueLimits(queue, queue_deadline_s)
        self.scheduler: Scheduler[_Pending] = Scheduler(policy, self, admission, limits)
        self.expected = Expected()
        self._releases = False  # a release is planned

    def open(
        self, engines: Engines, fleet: Fleet, *, pool: bool, tell: Callable[[Change], None] | None = None
    ) -> None:
        """Before the first request. pool: workers fetch what others hold. tell: called with each change
        for the other proxies."""
        self._tell = tell
        if tell is not None:
            self.scheduler.subscribe(InflightFeed(tell))
        self.fleet = fleet
        self._engines = engines
        self._events = engines.events
        self._pool = pool
        self.shared = RemoteInflight(
            lambda name, _: next((each for each in fleet.workers if each.name == name), None), self._placed
        )
        for worker in fleet.workers:
            self.scheduler.join(worker)

    def join(self, name: str) -> int:
        """Adds a worker of this name or kind, and returns its place."""
        worker = self.fleet.join(name)
        self.scheduler.join(worker)
        return worker.place

    def leave(self, place: int) -> None:
        """Removes the worker; no request may be in flight there."""
        self.scheduler.forget(place)
        self.scheduler.leave(place)
        self.expected.forget(place)

    def arrive(self, job: Job) -> None:
        """Submits a new request now, and plans the queue's next release if one waits."""
        self._carry_out(self.scheduler.submit(self._pending(job), self._events.now_s))
        self._release_later()

    def again(self, job: Job) -> None:
        """A worker died before its first token: a proxy sends such a request anew, whatever it costs."""
        self.observe(job, Stage.ENDED, handed=HandoverForm.NOT, outcome=Outcome.FAILED)
        job.restart()
        self._carry_out([self.scheduler.dispatch(self._pending(job), self._events.now_s)])

    def rejected_after_prefill(self, job: Job) -> bool:
        """Whether admission ends it now that its prompt is computed."""
        if job.choice is None:
            return False
        refusal = self.scheduler.after_prefill(job.name, *job.choice, self._events.now_s)
        if refusal is None:
            return False
        self.observe(job, Stage.ENDED, handed=HandoverForm.NOT)
        job.why_not = refusal.reason
        return True

    def observe(
        self, job: Job, stage: Stage, *, handed: HandoverForm, outcome: Outcome = Outcome.ANSWERED
    ) -> None:
        """As the data plane of a proxy would have recorded it. What the proxy does itself, or sees by itself
        (a failure, a refusal after the prefill), it knows at once."""
        observation = self._observation(job, stage, handed=handed, outcome=outcome)
        reports, now_s = self._reporter.settings, self._events.now_s
        at_s = reports.delivery_s(now_s)
        if stage is _ENDED:
            self._reporter.forget(job)
        if at_s <= now_s or outcome is not Outcome.ANSWERED or (job.done_s == math.inf and stage is _ENDED):
            self.scheduler.observe(observation)
        else:
            self._events.at(at_s, partial(self._hear, job, observation))

    def _hear(self, job: Job, observation: Observation) -> None:
        if observation.attempts == 1 + job.attempt:  # else it is of an attempt that is over
            self.scheduler.observe(observation, self._events.now_s)

    def _observation(self, job: Job, stage: Stage, *, handed: HandoverForm, outcome: Outcome) -> Observation:
        apart = job.prefill_place != job.decode_place
        reused = job.own + job.fetched
        told = self._reporter.times(job)
        ended_s = told.done_s if told.done_s < math.inf else self._events.now_s
        return Observation(  # in order, because that many names cost four times as much
            job.name,
            1,  # tracked
            job.prefill_place if apart else -1,
            job.decode_place,
            job.arrival.at_s,
            job.arrival.at_s if apart else 0.0,  # sent_prefill_s
            told.computed_s if apart else 0.0,  # prefill_done_s
            told.computed_s if apart else job.arrival.at_s,  # sent_decode_s
            told.first_s,
            ended_s if stage is _ENDED else 0.0,  # last_byte_s
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

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of a part is broken."""
        self.scheduler.check_integrity(len(self.shared))
        self.shared.check_integrity()
        self.expected.check_integrity()

    # What the scheduler asks

    def is_gone(self, pending: _Pending) -> bool:
        """False: no client of a simulation gives up."""
        return False

    def eligible(self, pending: _Pending) -> EligibleWorkers:
        """The fleet's, the same for every request: a simulation has one model."""
        return self.fleet.eligible

    def refresh(self, pending: _Pending) -> Request:
        """What the caches hold of the prompt now, which may have changed while the request waited."""
        job, admission = pending.job, self.scheduler.admission
        held = self._engines.caches.find(job.blocks, expected=self.expected, unit=BLOCK_TOKENS)
        return Request(
            job.arrival.tokens,
            held.by_place,
            held.anywhere * BLOCK_TOKENS if self._pool else 0,
            holder=self.fleet.at[held.best].transfer_backlog if self._pool and held.anywhere else None,
            gap_s=math.inf if admission is None else admission.gap_limit_s(),
        )

    def none_eligible(self, pending: _Pending) -> Refusal:
        """The same for every request; it counts under the reason NO_INSTANCE."""
        return Refusal(NO_INSTANCE, 0.0, "no worker is left")

    def objection(self, pending: _Pending, choice: Choice) -> Refusal | None:
        """None, always. Notes the job's predicted TTFT, for it is called at the moment of the choice."""
        job, now_s = pending.job, self._events.now_s
        # Before its own prompt counts in the queue.
        job.predicted_ttft_s = now_s - job.arrival.at_s + ttft_s(pending.asked, choice, now_s)
        return None

    # What happens to a request

    def _pending(self, job: Job) -> _Pending:
        return _Pending(name=job.name, asked=Request(job.arrival.tokens), objective=self._objective, job=job)

    def _carry_out(self, effects: Iterable[Dispatched[_Pending] | Refused[_Pending]]) -> None:
        for effect in effects:
            if isinstance(effect, Refused):
                effect.pending.job.why_not = effect.refusal.reason
                self._engines.refused(effect.pending.job)
            else:
                self._send(effect.pending, effect.choice)

    def _send(self, pending: _Pending, choice: Choice) -> None:
        job = pending.job
        job.choice = (pending.asked, choice)
        job.prefill_place, job.decode_place = choice.computes.place, choice.decode.place
        job.fetches = self._pool and choice.fetch
        blocks = job.blocks
        self.expected.expect(job.prefill_place, blocks)
        job.expected = True
        if self._tell is not None:
            keys = b"".join([block.to_bytes(KEY_BYTES) for block in blocks])
            self._tell(BlocksExpected(choice.computes.name, BLOCK_TOKENS, keys))
        self._engines.submit(job)

    def _placed(self, worker: Worker, block_tokens: int, keys: bytes) -> None:
        """Another proxy has sent a prompt with these blocks there."""
        ends = range(KEY_BYTES, len(keys) + 1, KEY_BYTES)
        blocks = [int.from_bytes(keys[end - KEY_BYTES : end]) for end in ends]
        self.expected.expect(worker.place, blocks)

    def _release_later(self) -> None:
        if self.scheduler.waiting and not self._releases:
            self._releases = True
            self._events.at(self._events.now_s + RELEASE_EVERY_S, self._release)

    def _release(self) -> None:
        self._releases = False
        while effects := self.scheduler.tick(self._events.now_s):
            self._carry_out(effects)
        self._release_later()
