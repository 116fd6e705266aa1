"""The outcomes of the last requests, and sums of the last quarter of an hour.

The deciding thread puts finished requests into a ring; the event loop takes them out and sums them up. If the
loop is late, the ring drops the oldest requests, and the page shows a sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.observer import Finished, Observer
from moonpool.disagg_proxy.conductor.savings import ANSWERED, saved_by
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.data_plane.observations import COLUMNS, Stage, read_last
from moonpool.disagg_proxy.dispatch.observer import DispatchObserver
from moonpool.disagg_proxy.ui.tenant_tokens import TenantTokens

STEP_S = 5.0
STEPS_MAX = 180
REJECTED_S = 60.0
REJECTED_MAX = 16
FRESH_MAX = 4_096  # finished requests between two calls of gather()
RECORDS_MAX = 64  # batches of records between two calls of gather()
LAST_MAX = 200
POINTS_MAX = 600


class TimeStep(msgspec.Struct, array_like=True):
    """Sums of STEP_S seconds.

    own, pool, tokens: of prompts of known length.
    told, cached:      of answers that report cached tokens.
    ttft_s:            sum over all streams.
    wait_s:            seconds of queued prefill at the end of the step, of the most loaded worker.
    saved:             tokens that were not computed (conductor/savings.py).
    priced, whole_s, left_s: requests whose prefill can be predicted, and its seconds without and with reuse.
    compared, compared_ttft_s, compared_whole_s: streams among them, their TTFT, their prefill without reuse.
    """

    at_s: float
    requests: int = 0
    tokens: int = 0
    own: int = 0
    pool: int = 0
    told: int = 0
    cached: int = 0
    streams: int = 0
    ttft_s: float = 0.0
    wait_s: float = 0.0
    saved: int = 0
    priced: int = 0
    whole_s: float = 0.0
    left_s: float = 0.0
    compared: int = 0
    compared_ttft_s: float = 0.0
    compared_whole_s: float = 0.0


class Totals(msgspec.Struct):
    """Sums since the start; fields as in TimeStep."""

    tokens: int = 0
    own: int = 0
    pool: int = 0
    told: int = 0
    cached: int = 0
    saved: int = 0
    priced: int = 0
    whole_s: float = 0.0
    left_s: float = 0.0
    compared: int = 0
    compared_ttft_s: float = 0.0
    compared_whole_s: float = 0.0


class History(Observer, DispatchObserver):
    """What it observes may come on any thread, all else on the event loop. wait_s: the longest line now.
    rejected: how many requests were refused since the start, by reason; it costs more, so it is asked once a
    minute."""

    def __init__(self, wait_s: Callable[[], float], rejected: Callable[[], Mapping[str, int]]) -> None:
        self._records: deque[bytes] = deque(maxlen=RECORDS_MAX)
        self._fresh: deque[Finished] = deque(maxlen=FRESH_MAX)
        self.last: deque[Finished] = deque(maxlen=LAST_MAX)
        # Seconds from arrival: (predicted, observed).
        self.points: deque[tuple[float, float]] = deque(maxlen=POINTS_MAX)
        self.steps: deque[TimeStep] = deque(maxlen=STEPS_MAX)
        self.total = Totals()
        self.tenants = TenantTokens()
        self._wait_s = wait_s
        self._rejected_now = rejected
        self._rejected: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=REJECTED_MAX)

    def on_finish(self, finished: Finished) -> None:
        """Stores the request for the next ``gather``."""
        self._fresh.append(finished)

    def on_records(self, records: bytes) -> None:
        """Stores raw records, of policies that do not look at prompts."""
        self._records.append(records)

    def gather(self, now_s: float, workers: Sequence[Worker | None] = ()) -> None:
        """Sums up what arrived since the last call. now_s: the relay's clock. workers: by place; their
        records become requests that can be shown."""
        if not self.steps or now_s >= self.steps[-1].at_s + STEP_S:
            self._turn(now_s)
        if not self._rejected or now_s >= self._rejected[-1][0] + REJECTED_S:
            self._rejected.append((now_s, self._rejected_now()))
        fresh, records = self._fresh, self._records
        if not fresh and not records:
            return
        step, before = self.steps[-1], msgspec.structs.replace(self.steps[-1])
        while records:
            self._count(step, records.popleft(), workers)
        while fresh:
            finished = fresh.popleft()
            self.last.append(finished)
            self._take(step, finished)
        for name in Totals.__struct_fields__:
            more = getattr(step, name) - getattr(before, name)
            setattr(self.total, name, getattr(self.total, name) + more)

    def rejected_lately(self, rejected: Mapping[str, int]) -> dict[str, int]:
        """Rejected requests by reason in the last 15 to 16 minutes. rejected: the counts since the start."""
        first = self._rejected[0][1] if self._rejected else rejected
        found = {reason: count - first.get(reason, 0) for reason, count in rejected.items()}
        return {reason: count for reason, count in found.items() if count > 0}

    def _turn(self, now_s: float) -> None:
        """Ends the time step; steps without a call of gather() are left out."""
        begin_s = now_s
        if self.steps:
            self.steps[-1].wait_s = self._wait_s()
            if now_s < self.steps[-1].at_s + 2 * STEP_S:
                begin_s = self.steps[-1].at_s + STEP_S
        self.steps.append(TimeStep(begin_s))

    def _count(self, step: TimeStep, records: bytes, workers: Sequence[Worker | None]) -> None:
        """Sums up requests that only have records, with numpy."""
        rows = np.frombuffer(records, COLUMNS)
        rows = rows[(rows["stage"] == Stage.ENDED) & (rows["decode"] >= 0)]
        step.requests += len(rows)
        apart = rows["prefill"] >= 0
        cached = np.where(apart, rows["prefill_cached_tokens"], rows["cached_tokens"])
        said = (cached >= 0) & (rows["prompt_tokens"] > 0)
        step.told += int(rows["prompt_tokens"][said].sum())
        step.cached += int(cached[said].sum())
        step.saved += int(cached[said & (rows["status"] == ANSWERED)].sum())
        streams = rows[(rows["stream"] > 0) & (rows["first_byte_s"] > 0) & (rows["status"] == 200)]
        step.streams += len(streams)
        step.ttft_s += float((streams["first_byte_s"] - streams["arrived_s"]).sum())
        for each in read_last(rows.tobytes(), LAST_MAX):
            decode = workers[each.decode] if each.decode < len(workers) else None
            if decode is not None:
                prefill = workers[each.prefill] if 0 <= each.prefill < len(workers) else None
                sent_s = each.sent_prefill_s or each.sent_decode_s
                self.last.append(Finished(each, Choice(decode, prefill), Request(), sent_s))

    def _take(self, step: TimeStep, finished: Finished) -> None:
        step.requests += 1
        observation, tokens = finished.observation, finished.asked.tokens
        if tokens:
            own, pool = finished.reused
            own = min(own, tokens)
            pool = min(pool, tokens - own)
            step.tokens += tokens
            step.own += own
            step.pool += pool
            self.tenants.add(finished.asked.tenant, own=own, pool=pool, computed=tokens - own - pool)
        cached = finished.cached
        if cached >= 0 and observation.prompt_tokens > 0:
            step.told += observation.prompt_tokens
            step.cached += cached
        ttft_s = finished.ttft_s
        saved = saved_by(finished)
        step.saved += saved.tokens
        if is_priced := saved.whole_s == saved.whole_s:
            step.priced += 1
            step.whole_s += saved.whole_s
            step.left_s += saved.left_s
        if ttft_s == ttft_s:
            step.streams += 1
            step.ttft_s += ttft_s
            if is_priced:
                step.compared += 1
                step.compared_ttft_s += ttft_s
                step.compared_whole_s += saved.whole_s
            predicted_s = finished.predicted_s
            if predicted_s == predicted_s:
                self.points.append((predicted_s, ttft_s))
