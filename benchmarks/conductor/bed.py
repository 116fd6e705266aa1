"""What the rows of conductor_vs_rivals share: the public traces, the set-ups, and how simulations are run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from moonpool.disagg_proxy.tools.simulator.capacity import capacity
from moonpool.disagg_proxy.tools.simulator.cluster import ClusterSettings
from moonpool.disagg_proxy.tools.simulator.machine import MACHINES, Machine
from moonpool.disagg_proxy.tools.simulator.results import Slo
from moonpool.disagg_proxy.tools.simulator.runs import Plan, Run, simulate_all
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Trace, read_trace

PUBLISHED = "github.com/kvcache-ai/Mooncake, folder FAST25-release/traces"
SHA256 = {
    "conversation": "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    "synthetic": "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
}
QUICK_REQUESTS = 3_000


@dataclass(frozen=True)
class Search:
    """The greatest speed at which 90 % are within ``slo``; near: its relative accuracy."""

    plan: Plan
    slo: Slo
    near: float
    step: float


class Bed:
    """quick: fewer requests of each trace, and less of everything. seeds: so many at most."""

    def __init__(self, folder: Path, *, quick: bool, processes: int, seeds: int = 5) -> None:
        self.quick = quick
        self._seeds_max = 1 if quick else seeds
        self.processes = processes
        self.paths = {
            name: _checked(folder / f"{name}_trace.jsonl", wanted) for name, wanted in SHA256.items()
        }
        self._traces: dict[str, Trace] = {}

    def trace(self, name: str) -> Trace:
        if name not in self._traces:
            self._traces[name] = read_trace(self.paths[name])
        return self._traces[name]

    def judged(self, met: bool) -> bool | None:
        """A part of a trace has not the hits of the whole: what it shows is not the target's figure."""
        return None if self.quick else met

    def requests(self, name: str) -> int:
        return min(QUICK_REQUESTS, len(self.trace(name))) if self.quick else len(self.trace(name))

    def seeds(self, count: int) -> range:
        return range(min(count, self._seeds_max))

    def plan(
        self, trace: str, cluster: ClusterSettings, policy: str, *, speed: float = 1.0, seed: int = 0
    ) -> Plan:
        """policy: NAME, or NAME/local where instances do not fetch from each other."""
        name, _, local = policy.partition("/")
        cluster = replace(cluster, pool=cluster.pool and not local)
        requests = self.requests(trace) if self.quick else 0
        return Plan(self.paths[trace], cluster, name, speed=speed, seed=seed, requests=requests)

    def simulate(self, what: str, plans: Sequence[Plan]) -> list[Run]:
        done = 0

        def tell(run: Run) -> None:
            nonlocal done
            done += 1
            print(f"{what}: {done} of {len(plans)}", file=sys.stderr)

        return simulate_all(plans, processes=self.processes, done=tell)

    def search(self, what: str, searches: Sequence[Search]) -> list[float]:
        found: list[float] = []

        def tell(speed: float) -> None:
            plan = searches[len(found)].plan
            gate = " with the gate" if plan.admission is not None else ""
            name = plan.policy + ("" if plan.cluster.pool else "/local")
            print(f"{what}: seed {plan.seed}, {name}{gate}: {speed:.4g}x", file=sys.stderr)
            found.append(speed)

        if self.processes < 2:
            for search in searches:
                tell(_search(search))
            return found
        with ProcessPoolExecutor(self.processes) as pool:
            for speed in pool.map(_search, searches):
                tell(speed)
        return found

    def ideal_prefill_s(self, name: str, machine: Machine) -> float:
        """The mean over the requests, had each found all that any before it left: nothing can be faster."""
        seen: set[int] = set()
        total_s = 0.0
        count = self.requests(name)
        for row, _ in zip(self.trace(name).rows, range(count), strict=False):
            blocks = row.full_blocks
            reused = next((at for at, block in enumerate(blocks) if block not in seen), len(blocks))
            seen.update(blocks)
            total_s += machine.compute_s(row.tokens, reused * BLOCK_TOKENS)
        return total_s / count


def set_up(prefill: int, decode: int, machine: str = "paper") -> ClusterSettings:
    return ClusterSettings(prefill=prefill, decode=decode, machine=MACHINES[machine])


def _search(search: Search) -> float:
    return capacity(search.plan, search.slo, near=search.near, step=search.step)


def _checked(path: Path, wanted: str) -> Path:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise SystemExit(
            f"{path} cannot be read ({error.strerror}); it is published at {PUBLISHED}"
        ) from error
    if found != wanted:
        raise SystemExit(f"{path} is not the published trace: its SHA-256 is {found}, not {wanted}")
    return path
