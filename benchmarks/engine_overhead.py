"""What the connector costs a vLLM scheduler step when it has nothing to do.

    python -m benchmarks.engine_overhead [--vllm-python PYTHON] [--quick] [--json FILE]

Three real engines in three processes decode batches of 8 in turn: one with our connector on a running node,
one without any, and one with a connector that does nothing, which is what vLLM itself spends on having one.
Timed is schedule(), update_from_output() and the connector's hooks around the forward, not the forward. A
run's figure is the median over its steps; the row's is the median over interleaved runs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.engine.fleet import Failed, Fleet, moonpool_config, ready, vllm_python
from benchmarks.options import make_parser
from benchmarks.processes import Talker, end_on_sigterm
from benchmarks.report import Row, print_table, write_json

REQUESTS = 8
CHUNK_STEPS = 50
TARGET_US = 20.0
PLAIN = "no connector"
EMPTY = {
    "kv_connector": "EmptyConnector",
    "kv_connector_module_path": "benchmarks.engine.empty_connector",
    "kv_role": "kv_both",
}
TIMED = ("schedule", "update_from_output", "hooks")  # as engine.driver gives them
PARTS = {
    "all": "schedule + update_from_output + hooks",
    "schedule": "  schedule",
    "update_from_output": "  update_from_output",
    "hooks": "  connector hooks around the forward",
}


def measure(fleet: Fleet, runs: int, chunks: int) -> list[Row]:
    """Raises Failed."""
    configs = {"plain": None, "empty": EMPTY, "ours": moonpool_config(fleet.node("256MiB"))}
    engines = {name: fleet.engine(name, config) for name, config in configs.items()}
    ready(*engines.values())
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for number in range(runs + 1):
        for name, figure in run(engines, chunks, number).items():
            if number > 0:  # the first warms
                figures[name].append(figure)

    def median(name: str, part: str) -> float:
        return statistics.median(figure[part] for figure in figures[name])

    def more_us(name: str) -> float:
        pairs = zip(figures[name], figures["plain"], strict=True)
        return statistics.median(figure["all"] - plain["all"] for figure, plain in pairs)

    steps = chunks * CHUNK_STEPS
    work = f"more per step with the connector [{REQUESTS} requests decoding, {steps} steps x {runs} runs]"
    more, target = more_us("ours"), f"<= {TARGET_US:g} us"
    rows = [Row(work, more, "us", {PLAIN: 0.0}, more_us("empty"), target, more <= TARGET_US)]
    for part, work in PARTS.items():
        rows.append(
            Row(
                work,
                median("ours", part),
                "us",
                {PLAIN: median("plain", part)},
                median("empty", part),
                "",
                None,
            )
        )
    return rows


def run(engines: dict[str, Talker], chunks: int, turn: int) -> dict[str, dict[str, float]]:
    """One run of each engine, in turn a few steps each, so that all meet the same moments of the machine.
    For each engine: part -> median us of its steps.
    """
    names = list(engines)
    names = names[turn % len(names) :] + names[: turn % len(names)]
    steps: dict[str, list[list[float]]] = {name: [] for name in names}
    for engine in engines.values():
        engine.ask({"do": "begin_decoding", "requests": REQUESTS, "steps": chunks * (CHUNK_STEPS + 2)})
    for _ in range(chunks):
        for name in names:
            steps[name] += engines[name].ask({"do": "decode", "steps": CHUNK_STEPS})
    for engine in engines.values():
        engine.ask({"do": "end_decoding"})
    return {name: medians(rows) for name, rows in steps.items()}


def medians(rows: list[list[float]]) -> dict[str, float]:
    parts = {
        part: statistics.median(values) for part, values in zip(TIMED, zip(*rows, strict=True), strict=True)
    }
    return {**parts, "all": statistics.median(sum(row) for row in rows)}


def main() -> None:
    parser = make_parser(__doc__, "fewer steps; under 240 s")
    parser.add_argument(
        "--vllm-python", default=vllm_python(), metavar="PYTHON", help="(MOONPOOL_VLLM_PYTHON)"
    )
    options = parser.parse_args()
    end_on_sigterm()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
        try:
            rows = measure(Fleet(folder, options.vllm_python, stack), 5, 5 if options.quick else 16)
        except Failed as error:
            sys.exit(f"engine_overhead: {error}")
    print_table("One scheduler step of a real vLLM, medians of 5 interleaved runs", rows, "empty connector")
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
