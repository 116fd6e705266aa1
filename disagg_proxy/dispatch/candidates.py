"""Which engines a request may go to: those that the data plane names, and, for one that waits in the queue,
those that it would name now.

Engines join and leave on the event loop, while other threads ask about requests: attributes are replaced
whole. The dispatcher's lock guards what concerns waiting requests. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.conductor.scheduler import EligibleWorkers
from moonpool.disagg_proxy.conductor.worker import Role, Worker, answering
from moonpool.disagg_proxy.engines.engine import Engine

GENERATES = frozenset(("chat", "completions", "generate"))
_SETS_MAX = 4096  # of engines that were seen together


class Candidates:
    """places: for engines."""

    def __init__(self, places: int) -> None:
        # By place; one that is leaving has its place until all that was sent there is over.
        self.at: list[Engine | None] = [None] * places
        self.worker_at: list[Worker | None] = [None] * places
        self.engines: tuple[Engine, ...] = ()  # that requests may go to, ordered by place
        self.workers: tuple[Worker, ...] = ()  # theirs
        self._seen: dict[tuple[int, ...], tuple[EligibleWorkers, EligibleWorkers]] = {}
        self._waiting: dict[str, EligibleWorkers] = {}  # by model

    def join(self, engine: Engine, worker: Worker) -> None:
        """Requests may go there from now on. The engine's place must be free. On the event loop."""
        self.at[engine.place] = engine
        self.worker_at[engine.place] = worker
        self._set_engines((*self.engines, engine))

    def part(self, engine: Engine) -> None:
        """No request goes there any more. Then ``look_anew``."""
        self._set_engines(each for each in self.engines if each is not engine)

    def leave(self, engine: Engine) -> None:
        """Its place is free."""
        self.at[engine.place] = self.worker_at[engine.place] = None
        self._seen = {}

    def became(self, engine: Engine) -> None:
        """It has another role, perhaps. Then ``look_anew``."""
        worker = self.worker_at[engine.place]
        if worker is not None:
            worker.role, worker.self_sufficient = Role(engine.role), engine.self_sufficient
        self._seen = {}  # a new one: another thread may be adding to the old

    def same_kind(self, engine: Engine) -> Iterator[Worker]:
        """Of the same role and model. An engine whose models are not known yet may be of any kind, but no
        known one is of its: else engines that become known one after the other would stay together."""
        models = engine.models or engine.named
        for other in self.engines:
            if other is engine or other.role != engine.role:
                continue
            theirs, worker = other.models or other.named, self.worker_at[other.place]
            if worker is not None and (not models or (theirs and models.keys() & theirs.keys())):
                yield worker

    def _set_engines(self, engines: Iterable[Engine]) -> None:
        self.engines = tuple(sorted(engines, key=lambda each: each.place))
        at = self.worker_at
        self.workers = tuple(each for engine in self.engines if (each := at[engine.place]) is not None)

    def of(self, request: ProxyRequest) -> EligibleWorkers:
        """The workers that may be chosen; for what is no generation those that answer by themselves. None
        are left when the client has left and so have the engines."""
        places, known = request.candidates, self._seen
        found = known.get(places)
        if found is None:
            if len(known) >= _SETS_MAX:
                known.clear()
            at = self.worker_at
            workers = tuple(each for place in places if (each := at[place]) is not None)
            whole = tuple(answering(workers))
            found = known[places] = (EligibleWorkers.of(workers), EligibleWorkers.of(whole))
        return found[0] if request.kind in GENERATES else found[1]

    # For those that wait

    def of_waiting(self, model: str, now_s: float) -> EligibleWorkers:
        """The workers that requests which wait for this model may go to now."""
        found = self._waiting.get(model)
        if found is None:
            found = self._waiting[model] = EligibleWorkers.of(self._now_there(self._serve(model), now_s))
        return found

    def look_anew(self) -> None:
        """Engines have changed."""
        self._waiting.clear()

    def look_again(self, waiting: Iterable[str], now_s: float) -> None:
        """While requests wait; waiting: for which models. Where nothing has changed, and for all models that
        the same engines serve, it is the same tuple, of which policies know already what each worker
        does."""
        known = {fit.workers: fit for fit in self._waiting.values()}
        served: dict[tuple[Engine, ...], EligibleWorkers] = {}
        self._waiting = {}
        for model in waiting:
            serve = self._serve(model)
            found = served.get(serve)
            if found is None:
                there = self._now_there(serve, now_s)
                found = served[serve] = known.get(there) or known.setdefault(there, EligibleWorkers.of(there))
            self._waiting[model] = found

    def _serve(self, model: str) -> tuple[Engine, ...]:
        """The engines that have this model, as far as is known."""
        return tuple(
            [each for each in self.engines if not model or each.models is None or model in each.models]
        )

    def _now_there(self, serve: Sequence[Engine], now_s: float) -> tuple[Worker, ...]:
        """What the relay would say now of those that wait for the model that these engines serve: an
        engine that is well and does not rest, unless all of its role do; when none is well, any of them."""
        well = [each for each in serve if each.liveness.healthy]
        resting = {each.place for each in well if each.rests(now_s)}
        work = {each.role for each in well if each.place not in resting}
        able = [each for each in well if each.place not in resting or each.role not in work]
        at = self.worker_at
        return tuple(each for engine in able or serve if (each := at[engine.place]) is not None)
