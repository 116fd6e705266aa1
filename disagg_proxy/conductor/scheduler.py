"""The scheduler of one proxy: which worker computes and answers a request, which requests wait, which are
refused. Its drivers are the proxy (``dispatch/dispatcher.py``) and the simulator
(``tools/simulator/simulated_proxy.py``).

    submit    a new request: Dispatched, Refused, or neither while it waits in the queue
    dispatch  a request that admission does not judge: an attempt after the first, or no admission is set
    observe   what the data plane recorded of a request
    tick      the requests of the queue whose turn has come, or whose deadline has passed

Pure: no clock, no lock, no socket. Time is an argument, in seconds of a monotonic clock; what the driver has
to do is returned. A call costs the policy's choice, and a prediction where admission judges.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from moonpool.disagg_proxy.conductor.admission import Admission, Objective, Prediction, Refusal
from moonpool.disagg_proxy.conductor.admission_controller import (
    HOLD_S,
    RELEASED_MAX,
    AdmissionController,
    AdmissionResult,
    Send,
)
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.demand import Capacity
from moonpool.disagg_proxy.conductor.hidden_pool import HiddenPool
from moonpool.disagg_proxy.conductor.inflight import InflightTracker
from moonpool.disagg_proxy.conductor.policies.roles import Groups
from moonpool.disagg_proxy.conductor.policy import Policy, hook_of
from moonpool.disagg_proxy.conductor.worker import Role, Worker

NO_OBJECTIVE = Objective()


class EligibleWorkers(NamedTuple):
    """Workers that may be chosen now. computing: those of them that compute prompts."""

    workers: tuple[Worker, ...]
    computing: tuple[Worker, ...]

    @classmethod
    def of(cls, workers: tuple[Worker, ...]) -> EligibleWorkers:
        """Prefill workers and whole ones compute prompts; those of the role DECODE do not, even where they
        could.
        """
        return cls(workers, tuple(each for each in workers if each.role is not Role.DECODE))


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRequest:
    """One request from its submission to its dispatch. A driver adds its own fields in a subclass.

    name:      of the request, the same as in its observations.
    asked:     what the policy is given, as of the last ``refresh``.
    objective: by which admission judges it.
    group:     requests of one group may go to the same workers.
    streams:   the answer comes token by token.
    waits:     it is or was in the queue.
    choice:    by which it was dispatched; None: it was not.
    sent_s:    when it was dispatched.
    """

    name: int
    asked: Request
    objective: Objective = NO_OBJECTIVE
    group: Hashable = None
    streams: bool = True
    waits: bool = False
    choice: Choice | None = None
    sent_s: float = 0.0


P = TypeVar("P", bound=PendingRequest)
P_contra = TypeVar("P_contra", bound=PendingRequest, contravariant=True)


class Driver(Protocol[P_contra]):
    """What the scheduler asks of its driver. Each call is a look-up, and may be made any number of times."""

    def is_gone(self, pending: P_contra) -> bool:
        """Whether the client has left."""

    def eligible(self, pending: P_contra) -> EligibleWorkers:
        """The workers that the request may go to now."""

    def refresh(self, pending: P_contra) -> Request:
        """What is known of the request now; ``pending.asked`` where nothing new is."""

    def none_eligible(self, pending: P_contra) -> Refusal:
        """Why a request is refused when no worker is left for it."""

    def objection(self, pending: P_contra, choice: Choice) -> Refusal | None:
        """Why the choice cannot be carried out, now or later; None: it can."""


class Dispatched(NamedTuple, Generic[P]):
    """Send the request to the engines of ``choice``. The load accounting has it already."""

    pending: P
    choice: Choice


class Refused(NamedTuple, Generic[P]):
    """Answer the request's client that it is refused."""

    pending: P
    refusal: Refusal


class QueueLimits(NamedTuple):
    """waiting_max: requests that may wait; 0: none does. deadline_s: the longest wait."""

    waiting_max: int = 0
    deadline_s: float = 30.0


NO_QUEUE = QueueLimits()


class Scheduler(Generic[P]):
    """Not thread safe.

    admission:     predicts which requests would miss an objective; None: all are accepted.
    is_heard:      whether the proxy follows the KV events of the worker at a place.
    hidden_pool:   detects a pool whose nodes' events it does not receive.
    policy_failed: called with a sentence that says what becomes of a request although the policy raised,
                   while that exception is handled. None: the exception goes to the caller.
    unfinished:    ``tick`` has more to return at once; it stops at RELEASED_MAX, so that a driver can let
                   go of its lock.

    What concerns the workers, and the requests that were sent, is the tracker's (``inflight.py``): join,
    leave, forget, observe, expire, subscribe, unsubscribe. limit_wait is the controller's.
    """

    def __init__(
        self,
        policy: Policy,
        driver: Driver[P],
        admission: Admission | None = None,
        limits: QueueLimits = NO_QUEUE,
        *,
        is_heard: Callable[[int], bool] = lambda place: False,
        hidden_pool: HiddenPool | None = None,
        policy_failed: Callable[[str], None] | None = None,
    ) -> None:
        self.policy = policy
        self.admission = admission
        self.controller: AdmissionController[P] = AdmissionController(self, *limits)
        self.limit_wait = self.controller.limit_wait
        self.inflight = tracker = InflightTracker(
            admission=admission, hears=is_heard, hidden_pool=hidden_pool
        )
        self.join, self.leave, self.forget = tracker.join, tracker.leave, tracker.forget
        self.observe, self.expire = tracker.observe, tracker.expire
        self.subscribe, self.unsubscribe = tracker.subscribe, tracker.unsubscribe
        self.unfinished = False
        self._driver = driver
        self._sent_hook = hook_of(policy)
        self._policy_failed = policy_failed

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self.controller.queue)

    def submit(self, pending: P, now_s: float) -> list[Dispatched[P] | Refused[P]]:
        """The request is dispatched, refused, or waits. It may take the place of another in the queue, which
        is then refused."""
        asked = pending.asked
        refusal, out = self.controller.arrive(
            pending, pending.group, asked.tenant, asked.priority, pending.objective.ttft_s, now_s
        )
        effects = [] if out is None else [_effect(*out)]
        if refusal is not None or pending.choice is not None:
            effects.append(_effect(pending, refusal))
        else:
            pending.waits = True
        return effects

    def dispatch(self, pending: P, now_s: float) -> Dispatched[P] | Refused[P]:
        """At once, whatever its predictions. Raises what the policy raises; then nothing has changed."""
        driver = self._driver
        workers = driver.eligible(pending).workers
        if not workers:
            return Refused(pending, driver.none_eligible(pending))
        pending.asked = driver.refresh(pending)
        choice = self.policy.choose(pending.asked, workers, now_s)
        refusal = driver.objection(pending, choice)
        if refusal is None:
            self._send(pending, choice, now_s, None)
        return _effect(pending, refusal)

    def tick(self, now_s: float) -> list[Dispatched[P] | Refused[P]]:
        """Call it every RELEASE_EVERY_S while requests wait, and again while ``unfinished``."""
        late = [] if self.unfinished else self.controller.expire(now_s)
        left = self.controller.release(now_s)
        self.unfinished = len(left) == RELEASED_MAX
        return [_effect(*each) for each in (*late, *left)]

    def after_prefill(self, name: int, asked: Request, choice: Choice, now_s: float) -> Refusal | None:
        """With ``Lookahead.AFTER``: why a request is refused once its prompt is computed; None: it is not."""
        return None if self.admission is None else self.admission.after_prefill(name, asked, choice, now_s)

    def tell_policy(self, asked: Request, choice: Choice, now_s: float) -> None:
        """The choice was carried out: tells the policy. ``submit``, ``dispatch`` and ``tick`` call it
        themselves."""
        try:
            self._sent_hook(asked, choice, now_s)
        except Exception:  # a policy of the user's own; the request is on its way
            if self._policy_failed is None:
                raise
            self._policy_failed("the policy failed when it was told what was sent; the request goes on")

    def check_integrity(self, remote_requests: int = 0) -> None:
        """Raises AssertionError when an invariant is broken. remote_requests: of other proxies, which the
        workers' loads contain."""
        self.inflight.check_integrity(remote_requests)
        self.controller.queue.check_integrity()

    # What the admission controller asks

    def is_gone(self, pending: P) -> bool:
        """As the driver says."""
        return self._driver.is_gone(pending)

    def is_busy(self, pending: P, now_s: float) -> bool:
        """As DispatchBackend says; False where no worker is left, so that ``ask`` refuses the request."""
        computing = self._driver.eligible(pending).computing
        return bool(computing) and all(each.load.wait_s(now_s) >= HOLD_S for each in computing)

    def share(self, pending: P) -> int:
        """Of workers that the request may go to now, without decode workers; 0 where none is left."""
        return len(self._driver.eligible(pending).computing)

    def gap_s(self, pending: P) -> float:
        """Of the request's own objective; infinity where it has none."""
        return pending.objective.gap_s

    def capacity_class(self, pending: P, now_s: float) -> Capacity:
        """FITS where no admission is set or no worker is left."""
        workers = self._driver.eligible(pending).workers
        if self.admission is None or not workers:
            return Capacity.FITS
        return self.admission.capacity_class(pending.group, pending.asked, workers, now_s)

    def ask(
        self, pending: P, waited_s: float, now_s: float, send: Send, *, only_if_spare: bool = False
    ) -> AdmissionResult:
        """Lets the policy choose, then admission predict, and accounts for the request if it is to be sent.
        Updates ``pending.asked``. Exceptions of the policy: see ``policy_failed``.
        """
        driver, admission = self._driver, self.admission
        able = driver.eligible(pending)
        if not able.workers:
            return AdmissionResult(0.0, driver.none_eligible(pending), final=True)
        asked = pending.asked = driver.refresh(pending)
        choice = self._choose(asked, able.workers, now_s)
        refusal = driver.objection(pending, choice)
        if refusal is not None:
            return AdmissionResult(0.0, refusal, final=True)
        if send is Send.BYPASS and choice.computes not in able.computing:
            send, waited_s = Send.NOW, 0.0
        prediction, final, answer = None, False, 0
        if admission is not None:
            objective, answer = pending.objective, round(admission.answers.tokens)
            predict = partial(
                admission.predict,
                now_s=now_s,
                objective=objective,
                waited_s=waited_s,
                only_if_spare=only_if_spare,
            )
            prediction = predict(asked, choice)
            if prediction.refusal is not None and choice.why.get("reason") == "drawn":
                # It was one of several: the request is judged by the worker that would serve it best.
                choice = self._choose(asked._replace(draws=False), able.workers, now_s)
                refusal = driver.objection(pending, choice)
                if refusal is not None:
                    return AdmissionResult(0.0, refusal, final=True)
                prediction = predict(asked, choice)
            refusal = prediction.refusal
            final = admission.is_final(refusal, asked, able.workers, objective)
        sent = refusal is None and send is Send.NOW
        if sent:
            self._send(pending, choice, now_s, prediction)
        prompt = asked.tokens - asked.own_at(choice.computes)
        return AdmissionResult(
            choice.prefill_s, refusal, sent=sent, final=final, prompt=prompt, answer=answer
        )

    def _choose(self, asked: Request, workers: Sequence[Worker], now_s: float) -> Choice:
        if self._policy_failed is None:
            return self.policy.choose(asked, workers, now_s)
        try:
            choice = self.policy.choose(asked, workers, now_s)
            if choice.decode not in workers:
                raise LookupError(f"the policy chose {choice.decode.name}, which is not among the candidates")
            return choice
        except Exception:  # admission weighs the request, whatever made the choice
            self._policy_failed("the policy failed; the request goes to the engine with the least work")
            return _least_work(asked, workers, now_s)

    def _send(self, pending: P, choice: Choice, now_s: float, prediction: Prediction | None) -> None:
        pending.choice, pending.sent_s = choice, now_s
        asked = pending.asked
        self.inflight.on_dispatch(
            pending.name,
            choice,
            asked,
            streams=pending.streams,
            now_s=now_s,
            prediction=prediction,
            objective=pending.objective,
        )
        self.tell_policy(asked, choice, now_s)


def _effect(pending: P, refusal: Refusal | None) -> Dispatched[P] | Refused[P]:
    if refusal is not None:
        return Refused(pending, refusal)
    assert pending.choice is not None
    return Dispatched(pending, pending.choice)


def _least_work(asked: Request, workers: Sequence[Worker], now_s: float) -> Choice:
    """The worker with the least work; with a prefill worker where it does not answer alone."""

    def wait_s(worker: Worker) -> float:
        return worker.load.wait_s(now_s)

    groups = Groups.of(workers)
    decode = min((*groups.self_sufficient, *groups.decode_workers), key=wait_s)
    computing = () if decode.self_sufficient else groups.prefill_workers[False]
    computes = min(computing, key=wait_s, default=decode)
    took_s = computes.prefill_s(asked.tokens, asked.own_at(computes), asked.from_pool(computes))
    return Choice(decode, computes if computing else None, took_s)
