"""The conductor before two real, whole vLLM engines, in simulated time: an engine's step lasts as long as its
CPU time, so neither the other engine nor what else runs on this machine makes it longer.

    python -m benchmarks.conductor_stepped [--vllm-python PYTHON] [--quick] [--json FILE]

The requests of benchmarks.conductor_real go through the proxy's scheduler and policies, as the simulator
drives them, to two engines that are stepped when simulated time comes to it. Policies take turns with the
same arrivals and lengths, and other tokens; the first turns are not counted: proxies learn. At 70 % of the
requests a second that the two can do.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.conductor import real_load
from benchmarks.conductor.machine_fit import BASE
from benchmarks.conductor.real_load import Planned
from benchmarks.conductor.stepped_fleet import SteppedCluster
from benchmarks.conductor_real import LOAD, OURS, POLICIES, WITHIN, WITHIN_SHARE, within
from benchmarks.engine.dummy_model import write_model
from benchmarks.engine.fleet import Failed, Fleet, ready, vllm_python
from benchmarks.options import make_parser
from benchmarks.processes import Talker, end_on_sigterm
from benchmarks.report import Row, print_table, write_json
from benchmarks.simulator_vs_vllm import CONTEXT, ENGINE, SHAPE
from moonpool.disagg_proxy.conductor.policy import make_policy
from moonpool.disagg_proxy.tools.simulator.cluster import ClusterSettings
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.simulated_proxy import SimulatedProxy
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival

ENGINES = 2
BUDGET = 512  # tokens of a step
MORE = {"max_num_batched_tokens": BUDGET, "enable_prefix_caching": True}
TURN = 30  # requests
LEARN = 3  # turns that are not counted
FULL, QUICK = 8, 2  # turns that are
CALIBRATION = 40
SEED = 20261127


class Contender:
    """A policy with its proxy, its view of the engines, and the requests that it has served."""

    def __init__(self, engines: list[Talker], policy: str, name: str) -> None:
        """name: of the tokens of its prompts."""
        self.turns: list[list[Job]] = []
        self._jobs: list[Job] = []
        self._cluster = SteppedCluster(
            engines,
            name,
            ClusterSettings(whole=len(engines), machine=BASE, pool=False),
            SimulatedProxy(make_policy(policy)),
            self._jobs.append,
        )
        self._own_block = real_load.PREFIXES

    def run(self, planned: list[Planned]) -> float:
        """From now on, until the last token; simulated seconds."""
        self._jobs.clear()
        begun_s = self._cluster.events.now_s
        self._cluster.run([self._arrival(begun_s, each) for each in planned])
        self.turns.append(list(self._jobs))
        return self._cluster.events.now_s - begun_s

    def _arrival(self, begun_s: float, each: Planned) -> Arrival:
        """A prefix is one of the trace's blocks."""
        blocks = [] if each.prefix is None else [each.prefix]
        tokens = len(blocks) * BLOCK_TOKENS + each.own_tokens
        for _ in range(-(-each.own_tokens // BLOCK_TOKENS)):
            blocks.append(self._own_block)
            self._own_block += 1
        return Arrival(begun_s + each.at_s, tokens, each.answer_tokens, blocks)


def measure(engines: list[Talker], turns: int) -> list[Row]:
    """Raises Failed."""
    burst = [each._replace(at_s=0.0) for each in real_load.plan(CALIBRATION, 1.0, random.Random(SEED))]
    Contender(engines, "round_robin", "warm").run(burst[: CALIBRATION // 4])
    per_s = LOAD * CALIBRATION / Contender(engines, "round_robin", "calibration").run(burst)
    contenders = {policy: Contender(engines, policy, policy) for policy in POLICIES}
    for number in range(LEARN + turns):
        first = number % len(POLICIES)
        for policy in (*POLICIES[first:], *POLICIES[:first]):
            planned = real_load.plan(TURN, per_s, random.Random(f"{SEED}/{number}"))
            contenders[policy].run(planned)
    counted = {policy: each.turns[LEARN:] for policy, each in contenders.items()}
    return rows_of(counted, per_s)


def rows_of(counted: dict[str, list[list[Job]]], per_s: float) -> list[Row]:
    """counted: for each policy the requests of its turns."""
    each = f"two whole engines, stepped [{len(counted[OURS])} x {TURN} requests, {per_s:.2f} a second]"
    ms = {
        policy: [statistics.fmean(job.ttft_s for job in turn) * 1e3 for turn in turns]
        for policy, turns in counted.items()
    }
    ours = statistics.fmean(ms.pop(OURS))
    peers: dict[str, float | str] = {policy: statistics.fmean(values) for policy, values in ms.items()}
    met = all(ours < statistics.fmean(values) for values in ms.values())
    ratios = [job.ttft_s / job.predicted_ttft_s for turn in counted[OURS] for job in turn]
    share, tenths = within(ratios), statistics.quantiles(ratios, n=10)
    spread = f"(tenths {tenths[0]:.2f} to {tenths[-1]:.2f})"
    return [
        Row(f"mean first token, {each}", ours, "ms", peers, None, "below each", met),
        Row(
            f"first tokens predicted within {WITHIN:.0%} {spread}, {each}",
            share,
            "%",
            {},
            None,
            f">= {WITHIN_SHARE:g} %",
            share >= WITHIN_SHARE,
        ),
        Row(f"first token over predicted, {each}", statistics.median(ratios), "times", {}, None, "", None),
    ]


def main() -> None:
    parser = make_parser(__doc__, "fewer turns; under 240 s")
    parser.add_argument(
        "--vllm-python", default=vllm_python(), metavar="PYTHON", help="(MOONPOOL_VLLM_PYTHON)"
    )
    options = parser.parse_args()
    end_on_sigterm()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
        fleet = Fleet(folder, options.vllm_python, stack, model=write_model(folder, SHAPE, CONTEXT))
        module = "benchmarks.engine.steps_driver"
        engines = [
            fleet.engine(f"e{number}", None, module=module, **{**ENGINE, **MORE}) for number in range(ENGINES)
        ]
        try:
            ready(*engines)
            rows = measure(engines, QUICK if options.quick else FULL)
        except Failed as error:
            sys.exit(f"conductor_stepped: {error}")
    print_table("Two real engines in simulated time", rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
