"""Load accounting of requests in flight: what was sent where, and what the data plane then observed.

A tracked request is reported three times at most: when it is sent, when its prefill has ended, when it has
ended. Pure. Reports may be late or missing (the data plane drops records when no thread fetches them): a
request whose first token is not reported for FORGOTTEN_S seconds is dropped. A stream may last far longer; it
is dropped when its engine has no request in work, or after STREAMS_S.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

from moonpool._native import LastReport
from moonpool.disagg_proxy.conductor.admission import Admission, Objective, Prediction
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.hidden_pool import HiddenPool
from moonpool.disagg_proxy.conductor.observer import Finished, InFlight, Observer
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.data_plane.observations import HandoverForm, Observation, Outcome, Stage
from moonpool.disagg_proxy.tokens.prediction_watch import PredictionWatch

FORGOTTEN_S = 900.0
STREAMS_S = 6 * 3600.0
LEARN_EVERY_S = 0.005  # of one model: more samples teach nothing new, and would cost a tenth of each decision
WHOLE_TOKENS_MIN = 32  # tokens of an answer that is no stream: with fewer most of its time is the hand-over
TOLERANCE_TOKENS = 160  # a block of vLLM on a CPU, and a few tokens

_PREFILLED, _BEGUN, _ANSWERED = int(Stage.PREFILLED), int(Stage.BEGUN), int(Outcome.ANSWERED)
_AT_ONCE = (int(HandoverForm.CONCURRENT), int(HandoverForm.ONE_SHOT), int(HandoverForm.GENERATION_FIRST))

_log = logging.getLogger("moonpool.proxy")


class InflightTracker:
    """Not thread safe: the driver's lock guards it. hears: whether the proxy follows the KV events of the
    engine at a place. hidden_pool: detects a pool that it does not hear of."""

    def __init__(
        self,
        workers: Sequence[Worker] = (),
        admission: Admission | None = None,
        *,
        hears: Callable[[int], bool] = lambda place: False,
        hidden_pool: HiddenPool | None = None,
    ) -> None:
        self.admission = admission
        self.workers: tuple[Worker, ...] = ()  # ordered by place
        self.watches: dict[int, PredictionWatch] = {}  # by place
        self.hidden_pool = hidden_pool or HiddenPool()
        self.nonsense = 0  # observations whose times are implausible
        self._observers: tuple[Observer, ...] = ()  # replaced whole: observers unsubscribe on any thread
        self._hears = hears
        self._sent: dict[int, InFlight] = {}
        self._learnt_s: dict[object, float] = {}  # by model
        self._last_report = LastReport()
        for worker in workers:
            self.join(worker)

    def subscribe(self, observer: Observer) -> None:
        """The observer hears of all dispatches and observations from now on, on the driver's thread and under
        its lock. May be called on any thread."""
        self._observers += (observer,)

    def unsubscribe(self, observer: Observer) -> None:
        """Idempotent. May be called on any thread."""
        self._observers = tuple(each for each in self._observers if each is not observer)

    def join(self, worker: Worker) -> None:
        """Adds a worker, at a place where none is."""
        self.workers = tuple(sorted((*self.workers, worker), key=lambda each: each.place))
        self.watches[worker.place] = PredictionWatch(TOLERANCE_TOKENS)
        worker.load.follow_reports(self._last_report)

    def leave(self, place: int) -> None:
        """Removes the worker at this place; no request may be in flight there."""
        left = next((each for each in self.workers if each.place == place), None)
        if left is None:
            return
        self.workers = tuple(each for each in self.workers if each is not left)
        del self.watches[place]
        for model in (left.prefill_model, left.decode_model):
            self._learnt_s.pop(model, None)
        if self.admission is not None:
            self.admission.forget(left)

    def __len__(self) -> int:
        return len(self._sent)

    def on_dispatch(
        self,
        request: int,
        choice: Choice,
        asked: Request,
        *,
        streams: bool,
        now_s: float,
        prediction: Prediction | None = None,
        objective: Objective | None = None,
    ) -> None:
        """A request is dispatched; an earlier attempt of it has ended."""
        self._leave(request, now_s)
        computes = choice.computes
        own = asked.own_at(computes)
        pool = asked.from_pool(computes) if choice.fetch else 0
        holder = asked.holder if pool else None
        ahead_s = holder.ahead_s(now_s) if holder is not None else 0.0
        apart = choice.prefill is not None
        silent = not apart and not streams
        wait_s, prefill_s, fetch_s = computes.dispatched(
            request,
            asked.tokens,
            own,
            pool,
            ahead_s=ahead_s,
            predicted_s=choice.prefill_s,
            now_s=now_s,
            silent=silent,
        )
        ttft_s = wait_s + prefill_s
        if apart:
            ttft_s += choice.decode.handover_model.predict(asked.tokens)
        computes.arrival_rate.add(prefill_s, now_s)
        if holder is not None:
            holder.asked(fetch_s, now_s)
        sent = InFlight(
            choice,
            asked,
            now_s,
            prefill_s,
            ttft_s,
            pool,
            ahead_s,
            wait_s > 0.0,
            silent,
            pending_handover=apart,
            decoding=silent,
        )
        self._sent[request] = sent
        if sent.pending_handover:
            choice.decode.pending_handover += 1
            choice.decode.pending_handover_tokens += asked.tokens
        if self.admission is not None and prediction is not None:
            self.admission.taken(
                request, asked, choice, prediction, now_s, objective=objective, silent=not streams
            )
        for each in self._observers:
            each.on_dispatch(request, sent, now_s)

    def in_flight(self) -> Mapping[int, InFlight]:
        """All requests that were sent and have not ended, by name."""
        return self._sent

    def observe(self, observation: Observation, now_s: float | None = None) -> None:
        """Takes in one record of the data plane. A record of a request that is not in flight, or no longer,
        is ignored. now_s: when it came, where records may come late; None: before each decision the driver
        fetches all records there are, so that a decision knows what happened until then."""
        sent = self._sent.get(observation.request)
        if sent is None:
            return
        if now_s is not None:
            _reported(observation, sent, now_s)
        if observation.stage in (_PREFILLED, _BEGUN):  # an end may be a client's doing
            sent.choice.computes.load.heard(_event_s(observation) if now_s is None else now_s)
        if observation.stage == _PREFILLED:
            self._prefilled(observation, sent, observation.prefill_done_s)
        elif observation.stage == _BEGUN:
            self._begun(observation, sent)
        else:
            self._ended(observation, sent)

    def has_neighbour(self, request: int) -> None:
        """The worker was told of another one whose own cache has more of the prompt than was predicted with.
        How much comes from there is not known, so the request is compared with no prediction."""
        sent = self._sent.get(request)
        if sent is not None:
            sent.has_neighbour = True

    def expire(self, now_s: float) -> None:
        """Drops requests that the data plane does not report any more."""
        for request in [each for each, sent in self._sent.items() if _is_forgotten(sent, now_s)]:
            self._leave(request, now_s)

    def forget(self, place: int) -> None:
        """Drops all requests that were sent to the engine: it is gone."""
        for worker in self.workers:
            if worker.place == place:
                worker.load.forget_all()
                if self.admission is not None:
                    self.admission.forget(worker)

    def check_integrity(self, remote_requests: int = 0) -> None:
        """Raises AssertionError when an invariant is broken. remote_requests: of other proxies, which the
        loads contain as well."""
        for worker in self.workers:
            worker.check_integrity()
        held = sum(worker.load.requests for worker in self.workers)
        if not self._sent and not remote_requests and held:
            raise AssertionError(f"{held} requests are in the loads and none was sent")

    def _prefilled(self, observation: Observation, sent: InFlight, at_s: float) -> None:
        computes = sent.choice.computes
        sent.computed = True
        if observation.stage == _PREFILLED:
            for each in self._observers:
                each.on_prefilled(observation.request)
        if not self._is_sound(at_s, sent):
            computes.load.prefill_ended(observation.request, _no_sooner(at_s, sent), done=False)
            return
        done = computes.load.prefill_ended(observation.request, at_s)
        if sent.pending_handover and not observation.stream:
            sent.decodes_s = at_s  # its first byte is its end, but it decodes from now on
            self._decodes(observation.request, sent, at_s, heard=False)
        if self.admission is not None and done is not None and sent.choice.prefill is None:
            self.admission.stalled(computes, done.seconds, at_s)
        if done is None or not done.tokens or observation.status not in (0, 200) or sent.has_neighbour:
            return  # a prompt of unknown length teaches nothing
        if self._is_wanted(computes.prefill_model, at_s):
            step_s = computes.decode_model.step_s(done.batch, done.context_tokens) if done.batch else 0.0
            computes.prefill_model.observe(
                done.tokens,
                done.own,
                done.pool,
                done.seconds,
                sent.ahead_s,
                queued=sent.queued,
                step_s=step_s,
            )
            sent.choice.decode.guess_from(computes)

    def _decodes(self, request: int, sent: InFlight, at_s: float, *, heard: bool) -> None:
        """Its answer is being decoded from now on. heard: the client has its first token."""
        _arrived(sent)
        sent.choice.decode.load.decode_began(request, sent.asked.tokens, at_s)
        sent.decoding = True
        for each in self._observers:
            each.on_decode(request, computed=sent.computed)
        if self.admission is not None:
            self.admission.began(request, at_s, heard=heard)

    def _begun(self, observation: Observation, sent: InFlight) -> None:
        if sent.decodes_s:
            return
        choice, first_s = sent.choice, observation.first_byte_s
        sent.sound = not observation.stream or self._is_sound(first_s, sent)
        if not sent.sound:
            first_s = _no_sooner(first_s, sent)
            choice.computes.load.prefill_ended(observation.request, first_s, done=False)
        elif choice.prefill is None:
            if not observation.stream:
                return  # the first byte of an answer that is no stream is its end
            self._prefilled(observation, sent, first_s)
        elif observation.handed_over in _AT_ONCE and not observation.prefill_done_s:
            pass  # decode did not wait for prefill's answer: the prompt is still being computed
        elif observation.handed_over and observation.prefill_done_s and observation.stream:
            choice.decode.handover_model.observe(sent.asked.tokens, first_s - observation.prefill_done_s)
        else:
            choice.computes.load.prefill_ended(observation.request, first_s, done=False)
            sent.computed = True
        known = sent.asked.tokens and not sent.has_neighbour
        if sent.sound and observation.stream and known and observation.status in (0, 200):
            choice.computes.ttft_ratios.observe(sent.ttft_s, first_s - sent.at_s)
        self._decodes(observation.request, sent, first_s, heard=True)

    def _ended(self, observation: Observation, sent: InFlight) -> None:
        choice, now_s = sent.choice, observation.last_byte_s
        if now_s and not self._is_sound(now_s, sent, _longest_s(sent)):
            self._leave(observation.request, _no_sooner(now_s, sent))
            return
        answered = observation.outcome == _ANSWERED
        # With several answers in one it is not known which tokens came when.
        tokens = observation.completion_tokens if answered and sent.sound and sent.asked.one else 0
        decoded = choice.decode.load.decode_ended(observation.request, tokens, now_s)
        decode_model = choice.decode.decode_model
        answer_s = _answer_s(observation, sent, tokens) if answered else math.nan
        gap_s = math.nan if decoded is None else answer_s / (tokens - 1)
        if decoded is not None and answer_s > 0 and self._is_wanted(decode_model, now_s):
            decode_model.observe(decoded.batch, decoded.context_tokens, gap_s, decoded.stall_s)
        if self.admission is not None:
            self.admission.over(
                observation.request,
                now_s,
                gap_s=gap_s,
                answer_s=answer_s,
                tokens=tokens,
            )
        finished = Finished(observation, choice, sent.asked, sent.at_s)
        if answered and observation.status == 200 and not sent.has_neighbour:
            self._compare(finished)
        for each in self._observers:
            each.on_finish(finished)
        self._leave(observation.request, now_s)

    def _is_sound(self, at_s: float, sent: InFlight, longest_s: float = FORGOTTEN_S) -> bool:
        """Whether this time is plausible for a request that was sent at that time."""
        if 0.0 <= at_s - sent.at_s <= longest_s:  # NaN is in no range
            return True
        self.nonsense += 1
        return False

    def _is_wanted(self, model: object, at_s: float) -> bool:
        """Whether the model is due for a sample; if so, notes the time."""
        if at_s - self._learnt_s.get(model, -math.inf) < LEARN_EVERY_S:
            return False
        self._learnt_s[model] = at_s
        return True

    def _compare(self, finished: Finished) -> None:
        """Compares the engine's own count of cached tokens with the accounting's."""
        observation, asked, cached = finished.observation, finished.asked, finished.cached
        if not asked.tokens or observation.prompt_tokens < 0 or cached < 0:
            return
        computes = finished.choice.computes
        own = asked.own_at(computes)
        same = observation.prompt_tokens == asked.tokens
        if same and self._hears(computes.place):
            explained = max(own, asked.pool - asked.presumed)
            found = self.hidden_pool.report(asked.tokens, explained, cached)
            if found is not None:
                _log.warning("%s", found)
        predicted = max(own, asked.pool)
        watch = self.watches.get(computes.place)
        if watch is None:
            return
        sentence = watch.report(asked.tokens, observation.prompt_tokens, predicted, cached)
        if sentence is not None:
            _log.warning("engine %s: %s", computes.name, sentence)

    def _leave(self, request: int, now_s: float) -> None:
        sent = self._sent.pop(request, None)
        if sent is None:
            return
        for each in self._observers:
            each.on_leave(request)
        if self.admission is not None:
            self.admission.over(request, now_s)
        _arrived(sent)
        computes, decode = sent.choice.computes.load, sent.choice.decode.load
        computes.prefill_ended(request, now_s, done=False)
        decode.decode_ended(request, 0, now_s)


def _event_s(observation: Observation) -> float:
    """When the prefill ended, or the answer began."""
    return observation.prefill_done_s if observation.stage == _PREFILLED else observation.first_byte_s


def _reported(observation: Observation, sent: InFlight, now_s: float) -> None:
    """The worker whose work is reported is known to be so late with it."""
    if observation.stage == _PREFILLED:
        sent.choice.computes.load.reported(now_s - observation.prefill_done_s)
    elif observation.stage == _BEGUN:
        sent.choice.decode.load.reported(now_s - observation.first_byte_s)
    else:
        sent.choice.decode.load.reported(now_s - observation.last_byte_s)


def _answer_s(observation: Observation, sent: InFlight, tokens: int) -> float:
    """Seconds from the first token to the last; NaN: not known. For an answer that is no stream: since its
    prompt was computed, less the predicted hand-over."""
    if observation.stream:
        return observation.last_byte_s - observation.first_byte_s
    if not sent.decodes_s or not observation.handed_over or tokens < WHOLE_TOKENS_MIN:
        return math.nan  # not handed over: this worker computed the prompt itself
    handover_s = sent.choice.decode.handover_model.predict(sent.asked.tokens)
    answer_s = observation.last_byte_s - sent.decodes_s - handover_s
    return answer_s if answer_s > 0 else math.nan


def _longest_s(sent: InFlight) -> float:
    """Seconds after which a request without a report is dropped; an answer that is no stream reports no first
    token."""
    return STREAMS_S if sent.decoding and not sent.silent and not sent.decodes_s else FORGOTTEN_S


def _is_forgotten(sent: InFlight, now_s: float) -> bool:
    age_s = now_s - sent.at_s
    if age_s <= FORGOTTEN_S:
        return False
    load = sent.choice.decode.relay_requests
    return age_s > _longest_s(sent) or (load is not None and not load())


def _no_sooner(at_s: float, sent: InFlight) -> float:
    """A time from which the load can continue."""
    return at_s if sent.at_s < at_s < math.inf else sent.at_s


def _arrived(sent: InFlight) -> None:
    """The prompt that the decode worker expected has arrived, or will not."""
    if sent.pending_handover:
        sent.pending_handover = False
        sent.choice.decode.pending_handover -= 1
        sent.choice.decode.pending_handover_tokens -= sent.asked.tokens
