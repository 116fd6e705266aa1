"""A simulated cluster whose whole engines are real: the simulation asks an engine for its next step and takes
its CPU time for the step's time. So the engines of one machine do not slow each other down."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.engine.fleet import prompt
from benchmarks.processes import Talker
from moonpool.disagg_proxy.tools.simulator.cluster import Cluster, ClusterSettings
from moonpool.disagg_proxy.tools.simulator.engine import Surroundings, WholeEngine
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.simulated_proxy import SimulatedProxy
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS


class SteppedEngine(WholeEngine):
    """engine: with benchmarks.engine.steps_driver. name: of the tokens of its prompts."""

    def __init__(self, place: int, surroundings: Surroundings, engine: Talker, name: str) -> None:
        super().__init__(place, surroundings, chunk_tokens=0)
        self._engine = engine
        self._name = name
        self._live: dict[int, Job] = {}
        self._steps = False

    def submit(self, job: Job) -> None:
        self._outcomes.next(job)
        ids: list[int] = []
        for block in job.arrival.blocks:
            ids += prompt(BLOCK_TOKENS, f"{self._name}/{block}")
        ids = ids[: job.arrival.tokens]
        self._live[job.name] = job
        self._engine.ask(
            {"do": "submit", "number": job.name, "ids": ids, "answer_tokens": job.arrival.answer_tokens}
        )
        if not self._steps:
            self._step()

    def _step(self) -> None:
        self._steps = bool(self._live)
        if self._steps:
            done = self._engine.ask({"do": "step"})
            self.busy_s += done["seconds"]
            for number in done["begun"]:
                self._live[number].begun_s = self._events.now_s
            self._events.at(self._events.now_s + done["seconds"], partial(self._stepped, done))

    def _stepped(self, done: dict[str, Any]) -> None:
        now_s = self._events.now_s
        for number, cached in done["first"]:
            job = self._live[number]
            job.own = cached
            job.first_s = now_s
            self._end_prompt(job)
            self._outcomes.began(job)
        for number in done["ended"]:
            job = self._live.pop(number)
            job.done_s = now_s
            self._outcomes.ended(job)
        self._step()


class SteppedCluster(Cluster):
    """One whole engine for each of ``engines``, without a pool. done: as Cluster's."""

    def __init__(
        self,
        engines: Sequence[Talker],
        name: str,
        settings: ClusterSettings,
        proxy: SimulatedProxy,
        done: Any,
    ) -> None:
        self._talkers, self._tokens_name = engines, name
        super().__init__(settings, [proxy], done)

    def _engine(self, place: int) -> SteppedEngine:
        here = Surroundings(self.settings.machine, self.events, self.caches, self)
        return SteppedEngine(place, here, self._talkers[place], self._tokens_name)
