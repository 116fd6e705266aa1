"""One simulation from its plan, and many of them on several processors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.admission import Admission, Lookahead, Objective
from moonpool.disagg_proxy.conductor.policy import make_policy
from moonpool.disagg_proxy.tools.simulator.cluster import Cluster, ClusterSettings
from moonpool.disagg_proxy.tools.simulator.faults import ClusterEvent
from moonpool.disagg_proxy.tools.simulator.loads import Loads
from moonpool.disagg_proxy.tools.simulator.reports import PROMPT, ReportSettings
from moonpool.disagg_proxy.tools.simulator.results import Results
from moonpool.disagg_proxy.tools.simulator.simulated_proxy import SimulatedProxy
from moonpool.disagg_proxy.tools.simulator.trace import Arrival, Trace, read_trace
from moonpool.disagg_proxy.tools.simulator.workers import get_shared, workers

TELL_EVERY = 2_000  # requests
SPEED_MIN, SPEED_MAX = 1e-6, 1e6  # nearer or further times would be indistinguishable
ANY = Objective()

_bad = partial(ConfigError, operation="simulate")


@dataclass(frozen=True, slots=True)
class Plan:
    """policy: a name of POLICIES or a class of the user's own. copies, speed, seed: see ``Trace.arrivals``.
    requests: so many at most; 0: all. queue: so many may wait in a proxy, up to queue_deadline_s.
    faults: to instances, in mid simulation. proxies: so many, which take turns. reports: how they hear of
    what engines do."""

    trace: Path
    cluster: ClusterSettings
    policy: str = "conductor"
    objective: Objective = ANY
    admission: Lookahead | None = None
    speed: float = 1.0
    seed: int = 0
    copies: int = 1
    requests: int = 0
    queue: int = 0
    queue_deadline_s: float = 30.0
    faults: tuple[ClusterEvent, ...] = ()
    proxies: int = 1
    reports: ReportSettings = PROMPT

    def __post_init__(self) -> None:
        make_policy(self.policy)
        if not SPEED_MIN <= self.speed <= SPEED_MAX:
            raise _bad(f"the speed must be positive, {SPEED_MIN:g} to {SPEED_MAX:g}, not {self.speed}")
        if self.copies < 1 or self.requests < 0:
            raise _bad("copies are 1 or more, and requests cannot be negative")
        if not 1 <= self.proxies <= 64:
            raise _bad(f"there are 1 to 64 proxies, not {self.proxies}")


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a plan. cpu_s: of the simulation; busy_s: of prefill, all instances together;
    sent_bytes: between instances. loads: of prefill and decode over time."""

    plan: Plan
    results: Results
    loads: Loads
    seconds: float
    cpu_s: float
    busy_s: float
    sent_bytes: int


def simulate(plan: Plan, trace: Trace | None = None, tell: Callable[[int], None] | None = None) -> Run:
    """trace: the plan's, if it was read before; tell: called now and then with the number of arrivals."""
    trace = trace or read_trace(plan.trace)
    began_s = time.process_time()
    results = Results()
    proxies = [
        SimulatedProxy(
            make_policy(plan.policy),
            None if plan.admission is None else Admission(plan.objective, plan.admission),
            plan.queue,
            plan.queue_deadline_s,
            plan.reports,
            plan.seed * plan.proxies + number,
        )
        for number in range(plan.proxies)
    ]
    cluster = Cluster(plan.cluster, proxies, results.add, plan.faults)
    arrivals = trace.arrivals(speed=plan.speed, seed=plan.seed, copies=plan.copies)
    if plan.requests:
        arrivals = islice(arrivals, plan.requests)
    quiet = logging.getLogger("moonpool.proxy")
    before = quiet.disabled
    quiet.disabled = True  # it warns of engines that reuse more than was predicted
    try:
        cluster.run(_told(arrivals, tell) if tell is not None else arrivals)
    finally:
        quiet.disabled = before
    return Run(
        plan,
        results,
        cluster.loads,
        seconds=cluster.events.now_s,
        cpu_s=time.process_time() - began_s,
        busy_s=cluster.busy_before_s + sum(engine.busy_s for engine in cluster.engines),
        sent_bytes=cluster.links.sent_bytes,
    )


def simulate_all(
    plans: Sequence[Plan], *, processes: int = 1, done: Callable[[Run], None] = lambda run: None
) -> list[Run]:
    """In the order of the plans; ``done`` is called with each in that order."""
    runs = []
    files = {path: read_trace(path) for path in {plan.trace for plan in plans}}  # a pipe is read but once
    if processes < 2 or len(plans) < 2:
        for plan in plans:
            runs.append(simulate(plan, files[plan.trace]))
            done(runs[-1])
        return runs
    with workers(min(processes, len(plans)), files) as pool:
        for run in pool.map(_simulate, plans):
            runs.append(run)
            done(run)
    return runs


def _simulate(plan: Plan) -> Run:
    return simulate(plan, get_shared()[plan.trace])


def _told(arrivals: Iterator[Arrival], tell: Callable[[int], None]) -> Iterator[Arrival]:
    for number, arrival in enumerate(arrivals):
        if number % TELL_EVERY == 0:
            tell(number)
        yield arrival
