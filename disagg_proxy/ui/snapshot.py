"""The JSON of the page at /ui.

Engines are rows without column names, so that a thousand take some 100 KB. A snapshot is served again for
KEPT_S seconds, so ten browsers cost as much as one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from moonpool import __version__
from moonpool.core.service.cluster import MasterRow
from moonpool.disagg_proxy.conductor.inflight import InflightTracker
from moonpool.disagg_proxy.conductor.observer import Finished
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.data_plane.counters import Counters, EngineCounters
from moonpool.disagg_proxy.dispatch.dispatcher import Dispatcher
from moonpool.disagg_proxy.engines.engine import Engine
from moonpool.disagg_proxy.events.stream_watch import PoolStreamRow, StreamWatch
from moonpool.disagg_proxy.ui.explain import why_here, why_miss
from moonpool.disagg_proxy.ui.history import STEP_S, History, TimeStep, Totals

KEPT_S = 1.0
ROWS_MAX = 2_000
SHOWN_MAX = 60  # maximum of last requests
_OUTCOMES = ("answered", "client left", "failed", "broken off", "refused")


class EngineSnapshot(NamedTuple):
    """One engine.

    wait_s:            seconds of queued prefill.
    waiting, decoding: requests in the scheduler's accounts; -1: the policy keeps none.
    requests:          answers, and prefills for other engines.
    events:            as in GET /engines.
    """

    name: str
    role: str
    health: str
    why: str
    breaker_open: bool
    in_flight: int
    wait_s: float
    waiting: int
    decoding: int
    context_tokens: int
    requests: int
    failures: int
    events: str


class DecisionRow(msgspec.Struct):
    """One of the last requests.

    ago_s:  seconds since its end.
    tokens: of its prompt; the engine's count if the policy does not look at prompts.
    cached: tokens by the engine's report; -1: not reported.
    """

    number: int
    trace: str
    ago_s: float
    engine: str
    prefill: str | None
    outcome: str
    status: int
    tokens: int
    own: int
    pool: int
    cached: int
    made: int
    predicted_s: float | None
    ttft_s: float | None
    total_s: float
    why_here: str
    why_miss: str


class ProxyGroup(msgspec.Struct):
    """The position of this process among the proxies.

    number, processes: number from 0 of so many processes at one address.
    listen:            address of this process alone; "": none.
    others:            connected other proxies.
    their_requests:    requests of those in this process's accounts.
    """

    number: int = 0
    processes: int = 1
    listen: str = ""
    others: int = 0
    their_requests: int = 0


class Snapshot(msgspec.Struct):
    """GET /ui/data."""

    version: str
    process: int
    group: ProxyGroup
    policy: str
    explains: bool  # whether the policy looks at prompts, so that there is anything to explain
    clock_s: float
    engines: int
    healthy: int
    engine_columns: Sequence[str]
    engine_rows: Sequence[EngineSnapshot]
    step_s: float
    step_columns: Sequence[str]
    steps: Sequence[TimeStep]
    points: Sequence[tuple[float, float]]  # (predicted, observed) seconds to the first token
    rejected: dict[str, int]
    rejected_lately: dict[str, int]
    failures: dict[str, int]  # of engines, by reason
    blind: int
    last: Sequence[DecisionRow]
    total: Totals = msgspec.field(default_factory=Totals)  # since the start
    pool: Sequence[PoolStreamRow] = ()  # event streams of the pool's nodes
    masters: Sequence[MasterRow] = ()  # of the pool


class SnapshotBuilder:
    """Runs on the event loop. clock: the relay's. look: returns the relay's counters."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        look: Callable[[], Counters],
        clock: Callable[[], float],
        policy: str,
        group: Callable[[], ProxyGroup] = ProxyGroup,
        streams: StreamWatch | None = None,
        masters: Callable[[], Sequence[MasterRow]] = tuple,
    ) -> None:
        self._dispatcher = dispatcher
        self._look = look
        self._clock = clock
        self._policy = policy
        self._group = group
        self._streams = streams
        self._masters = masters
        self._made = b""
        self._made_s = -math.inf
        self.history = History(self.wait_s, lambda: look().rejected)
        if dispatcher.uses_tokens:
            dispatcher.scheduler.subscribe(self.history)
        else:
            dispatcher.subscribe(self.history)

    def gather(self) -> None:
        """Sums up what ended since the last call."""
        self.history.gather(self._clock(), self._dispatcher.candidates.worker_at)

    def total(self) -> Totals:
        """Sums since the start."""
        self._dispatcher.learn()
        self.gather()
        return self.history.total

    def loads(self) -> dict[str, LoadRow]:
        """The load of each engine, by name; empty if the policy keeps no accounts."""
        found, there = self._loads(), self._dispatcher.workers
        return {each.name: found[each.place] for each in there if each.place in found}

    def _loads(self) -> dict[int, LoadRow]:
        """The load by place, leaving engines included."""
        return self._dispatcher.with_tracker(_loads) if self._dispatcher.uses_tokens else {}

    def page(self) -> bytes:
        """The snapshot as JSON; made anew after KEPT_S seconds."""
        now_s = self._clock()
        if now_s - self._made_s >= KEPT_S or not self._made:
            self._dispatcher.learn()
            self.gather()
            self._made, self._made_s = msgspec.json.encode(self._page(now_s)), now_s
        return self._made

    def _page(self, now_s: float) -> Snapshot:
        dispatcher, history, counters = self._dispatcher, self.history, self._look()
        workers = tuple(dispatcher.workers)
        engines = {each.place: each for each in dispatcher.engines}
        loads = self._loads()
        events = {} if self._streams is None else self._streams.of_engines()
        rows = [
            _engine_row(
                engines.get(each.place), each, loads.get(each.place, _NO_LOAD), events.get(each.place, "")
            )
            for each in counters.engines
        ]
        if len(rows) > ROWS_MAX:
            rows.sort(key=lambda row: (row.health == "healthy" and not row.breaker_open, -row.wait_s))
        failures: dict[str, int] = {}
        for each in counters.engines:
            for (_, reason), count in each.failures.items():
                failures[reason] = failures.get(reason, 0) + count
        last = list(history.last)[-SHOWN_MAX:]
        return Snapshot(
            version=__version__,
            process=os.getpid(),
            group=self._group(),
            policy=self._policy,
            explains=dispatcher.uses_tokens,
            clock_s=now_s,
            engines=len(rows),
            healthy=dispatcher.healthy_count,
            engine_columns=EngineSnapshot._fields,
            engine_rows=rows[:ROWS_MAX],
            step_s=STEP_S,
            step_columns=TimeStep.__struct_fields__,
            steps=list(history.steps),
            points=list(history.points),
            rejected=counters.rejected,
            rejected_lately=history.rejected_lately(counters.rejected),
            failures=failures,
            blind=dispatcher.blind,
            last=[
                _decision_row(finished, workers, now_s, dispatcher.uses_tokens) for finished in reversed(last)
            ],
            total=history.total,
            pool=[] if self._streams is None else self._streams.of_pool()[:ROWS_MAX],
            masters=self._masters(),
        )

    def wait_s(self) -> float:
        """Seconds of queued prefill of the most loaded engine."""
        return max((each.wait_s for each in self.loads().values()), default=0.0)


class LoadRow(NamedTuple):
    """The load of one engine, as in EngineSnapshot."""

    wait_s: float
    waiting: int
    decoding: int
    context_tokens: int


_NO_LOAD = LoadRow(0.0, -1, -1, 0)


def _loads(inflight: InflightTracker, now_s: float) -> dict[int, LoadRow]:
    """By place. The dispatcher's lock is held: nothing but reading."""
    found = {}
    for worker in inflight.workers:
        load = worker.load
        found[worker.place] = LoadRow(load.wait_s(now_s), load.prefills, load.decodes, load.context_tokens)
    return found


def _engine_row(engine: Engine | None, counts: EngineCounters, load: LoadRow, events: str) -> EngineSnapshot:
    """One row. engine: None: it is leaving."""
    return EngineSnapshot(
        counts.name,
        "" if engine is None else engine.role,
        "leaving" if engine is None else engine.liveness.state.value,
        "" if engine is None else engine.liveness.why,
        not counts.breaker_closed,
        counts.in_flight,
        round(load.wait_s, 4),
        *load[1:],
        counts.requests,
        sum(counts.failures.values()),
        events,
    )


def _decision_row(finished: Finished, workers: Sequence[Worker], now_s: float, explains: bool) -> DecisionRow:
    observation, choice = finished.observation, finished.choice
    own, pool = finished.reused
    return DecisionRow(
        number=observation.request,
        trace=observation.trace_id.hex(),
        ago_s=round(max(now_s - observation.last_byte_s, 0.0), 1),
        engine=choice.decode.name,
        prefill=None if choice.prefill is None else choice.prefill.name,
        outcome=_OUTCOMES[observation.outcome] if observation.outcome < len(_OUTCOMES) else "?",
        status=observation.status,
        tokens=finished.asked.tokens or max(observation.prompt_tokens, 0),
        own=own,
        pool=pool,
        cached=finished.cached,
        made=observation.completion_tokens,
        predicted_s=_number(finished.predicted_s),
        ttft_s=_number(finished.ttft_s),
        total_s=round(max(observation.last_byte_s - observation.arrived_s, 0.0), 4),
        why_here=why_here(finished) if explains else "",
        why_miss=why_miss(finished, workers) if explains else "",
    )


def _number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
