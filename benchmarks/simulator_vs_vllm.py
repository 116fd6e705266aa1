"""Steps of a real vLLM with chunked prefill, beside what the simulator's whole engine takes for them.

    python -m benchmarks.simulator_vs_vllm [--vllm-python PYTHON] [--quick] [--json FILE]

One engine on a CPU, with a model of dummy weights and a budget of tokens that divides most prompts, serves
prompts and answers of mixed lengths. Of each run the first half of the steps makes a machine
(docs/simulator.md) and the second half is compared with what the simulator's code says of such a step on it;
then the simulator replays the whole run. Seconds are CPU time of the engine's process, which has one thread,
so that what else runs on this machine counts less; errors by the wall clock stand beside.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conductor.machine_fit import Step, fit, step_s
from benchmarks.engine.dummy_model import Shape, write_model
from benchmarks.engine.fleet import Failed, Fleet, ready, vllm_python
from benchmarks.options import make_parser
from benchmarks.processes import Talker, end_on_sigterm
from benchmarks.report import Row, print_table, write_json
from moonpool.disagg_proxy.conductor.policy import make_policy
from moonpool.disagg_proxy.tools.simulator.cluster import Cluster, ClusterSettings
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.machine import Machine
from moonpool.disagg_proxy.tools.simulator.simulated_proxy import SimulatedProxy
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival

SHAPE = Shape(
    layers=4,
    hidden=512,
    intermediate=1024,
    heads=8,
    kv_heads=4,
    head_size=64,
    vocabulary=256,
    dtype="float32",
)
CONTEXT = 4096
BUDGET = 128  # tokens of a step
ENGINE = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": CONTEXT,
    "max_num_seqs": 32,
    "max_num_batched_tokens": BUDGET,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,  # no two prompts begin alike
    "async_scheduling": False,  # a step ends with its own tokens
    "kv_cache_memory_bytes": 1 << 30,
}
PROMPT = (20, 3000)  # tokens
ANSWER = (2, 120)
ONE_TOKEN = 0.3  # share of the answers: while they are computed alone, a step is a chunk alone
LOAD = 0.6
WITHIN = 0.15
REQUESTS, RUNS = 80, 3
QUICK_REQUESTS, QUICK_RUNS = 60, 1
CALIBRATION = 12
RUN_TIMEOUT_S = 400.0
GROUPS = {
    "decode alone": lambda step: not step.chunks,
    "chunks alone": lambda step: not step.decoding,
    "chunks beside decode": lambda step: step.chunks and step.decoding,
}
WALL = "by the wall clock"


@dataclass(frozen=True)
class Compared:
    """One run: by group and clock the error of each step; first tokens of vLLM and of the simulation."""

    machine: Machine
    errors: dict[str, dict[str, list[float]]]
    first_s: list[float]
    simulated_s: list[float]


def arrivals(requests: int, request_s: float, chance: random.Random) -> list[list[float]]:
    """[at_s, tokens of the prompt, of the answer]. request_s: mean seconds of work."""
    rows, at_s = [], 0.0
    for _ in range(requests):
        shortest, longest = PROMPT
        tokens = round(shortest * (longest / shortest) ** chance.random())
        answer = 1 if chance.random() < ONE_TOKEN else chance.randint(*ANSWER)
        rows.append([at_s, tokens, answer])
        at_s += chance.expovariate(LOAD / request_s)
    return rows


def measure(engine: Talker, requests: int, runs: int, seed: int) -> list[Compared]:
    """Raises Failed."""
    chance = random.Random(seed)
    found = []
    calibration = arrivals(CALIBRATION, 1.0, chance)
    run(engine, calibration, "warm")
    steps = run(engine, calibration, "calibration")["steps"]
    request_s = sum(step["seconds"] for step in steps) / CALIBRATION
    for number in range(runs):
        rows = arrivals(requests, request_s, chance)
        found.append(compare(rows, run(engine, rows, f"run {number}")))
    return found


def run(engine: Talker, rows: list[list[float]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = engine.ask({"do": "run", "requests": rows, "name": name}, RUN_TIMEOUT_S)
    return found


def compare(rows: list[list[float]], recorded: dict[str, Any]) -> Compared:
    clocks = {"": "seconds", WALL: "wall_s"}
    errors: dict[str, dict[str, list[float]]] = {group: {clock: [] for clock in clocks} for group in GROUPS}
    machines = {}
    for clock, field in clocks.items():
        steps = [
            Step(
                step[field],
                tuple((begin, end) for _, begin, end in step["chunks"]),
                tuple(step["decoding"]),
            )
            for step in recorded["steps"]
        ]
        half = len(steps) // 2
        machine = machines[clock] = fit(steps[:half])
        for step in steps[half:]:
            (group,) = (name for name, holds in GROUPS.items() if holds(step))
            errors[group][clock].append(step_s(machine, step) / step.seconds - 1)
    return Compared(machines[""], errors, recorded["first_s"], simulate(rows, machines[""]))


def simulate(rows: list[list[float]], machine: Machine) -> list[float]:
    """Seconds to the first token of each request."""
    jobs: list[Job] = []
    settings = ClusterSettings(whole=1, machine=machine, pool=False, chunk_tokens=BUDGET)
    cluster = Cluster(settings, [SimulatedProxy(make_policy("round_robin"), None)], jobs.append)
    made = []
    for number, (at_s, tokens, answer) in enumerate(rows):
        first = number * CONTEXT
        made.append(
            Arrival(at_s, int(tokens), int(answer), range(first, first - int(-tokens // BLOCK_TOKENS)))
        )
    cluster.run(made)
    return [job.ttft_s for job in sorted(jobs, key=lambda job: job.name)]


def rows_of(found: list[Compared], requests: int) -> list[Row]:
    rows = []
    for group in GROUPS:
        count = sum(len(each.errors[group][""]) for each in found)
        what = f"{group} [{count:,} steps of {len(found)} run{'s' * (len(found) > 1)}]"

        def median(clock: str, group: str = group) -> float:
            return statistics.median(
                statistics.median(map(abs, each.errors[group][clock])) * 100 for each in found
            )

        def share(clock: str, group: str = group) -> float:
            return statistics.median(
                statistics.fmean(abs(error) <= WITHIN for error in each.errors[group][clock]) * 100
                for each in found
            )

        off, wall = median(""), {WALL: median(WALL)}
        rows.append(Row(f"median error of a step, {what}", off, "% off", wall, None, "<= 15 %", off <= 15))
        rows.append(
            Row(f"steps within 15 %, {what}", share(""), "%", {WALL: share(WALL)}, None, "", None),
        )
    errors = [
        simulated / real - 1
        for each in found
        for simulated, real in zip(each.simulated_s, each.first_s, strict=True)
    ]
    ratios = [statistics.median(each.simulated_s) / statistics.median(each.first_s) for each in found]
    off = statistics.median(abs(ratio - 1) * 100 for ratio in ratios)
    what = f"[{requests} requests, {len(found)} run{'s' * (len(found) > 1)}]"
    rows.append(
        Row(f"median first token of the replay, error {what}", off, "% off", {}, None, "<= 15 %", off <= 15)
    )
    each = statistics.median(map(abs, errors)) * 100
    rows.append(
        Row(f"first token of a request of the replay, median error {what}", each, "% off", {}, None, "", None)
    )
    return rows


def main() -> None:
    parser = make_parser(__doc__, "one run; under 240 s")
    parser.add_argument(
        "--vllm-python", default=vllm_python(), metavar="PYTHON", help="(MOONPOOL_VLLM_PYTHON)"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    end_on_sigterm()
    requests, runs = (QUICK_REQUESTS, QUICK_RUNS) if options.quick else (REQUESTS, RUNS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
        fleet = Fleet(folder, options.vllm_python, stack, model=write_model(folder, SHAPE, CONTEXT))
        engine = fleet.engine("engine", None, module="benchmarks.engine.steps_driver", **ENGINE)
        try:
            ready(engine)
            found = measure(engine, requests, runs, options.seed)
        except Failed as error:
            sys.exit(f"simulator_vs_vllm: {error}")
    for each in found:
        print(each.machine)
    table = rows_of(found, requests)
    print_table("Steps of a real vLLM in the simulator", table)
    write_json(options.json, table)


if __name__ == "__main__":
    main()
