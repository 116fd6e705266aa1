"""Time to first token from a warm pool, beside recomputing and beside vLLM's own ExampleConnector.

    python -m benchmarks.engine_ttft [--vllm-python PYTHON] [--quick] [--json FILE]

Five real engines, each in its own process: two compute the prompts and save them (ours into a node's memory,
the ExampleConnector into files), three then get every prompt for the first time: one loads it from the pool,
one from the files, one computes it. All prompts differ, so no engine's own prefix cache has an answer. Each
first token is compared with the recomputed one, and a load that covered less than the whole blocks of its
prompt is an error.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engine.fleet import Failed, Fleet, moonpool_config, prompt, ready, vllm_python
from benchmarks.options import make_parser
from benchmarks.processes import Talker, end_on_sigterm
from benchmarks.report import Row, print_table, write_json

LENGTHS = {1024: 0.60, 3500: 0.25}  # prompt tokens -> at most so many times recompute
BLOCK_TOKENS = 32
RECOMPUTE, EXAMPLE = "recompute", "ExampleConnector"


def measure(fleet: Fleet, rounds: int) -> list[Row]:
    """Raises Failed."""
    prompts = {
        length: [prompt(length, f"{length}/{number}") for number in range(rounds + 1)] for length in LENGTHS
    }
    ours = moonpool_config(fleet.node("1GiB"))
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(fleet.folder / "example")},
    }
    savers = [fleet.engine("ours-saver", ours), fleet.engine("example-saver", example)]
    loaders = {
        RECOMPUTE: fleet.engine("recompute", None),
        "ours": fleet.engine("ours", ours),
        EXAMPLE: fleet.engine("example", example),
    }
    ready(*savers, *loaders.values())
    for saver in savers:
        saver.ask({"do": "save", "prompts": [p for group in prompts.values() for p in group]})
        saver.close()

    first_s: dict[int, dict[str, list[float]]] = {
        length: {name: [] for name in loaders} for length in LENGTHS
    }
    for number in range(rounds + 1):
        for length in LENGTHS:
            results = {
                name: first_token(engine, prompts[length][number], warm=name != RECOMPUTE)
                for name, engine in turned(loaders, number)
            }
            if len({result["token"] for result in results.values()}) != 1:
                raise Failed(f"first tokens differ after {length} tokens: {results}")
            if number > 0:  # the first of each length warms
                for name, result in results.items():
                    first_s[length][name].append(result["first_s"])
    return [row for length in LENGTHS for row in rows(length, first_s[length])]


def turned(engines: dict[str, Talker], number: int) -> list[tuple[str, Talker]]:
    """Another one first in each round."""
    items = list(engines.items())
    turn = number % len(items)
    return items[turn:] + items[:turn]


def first_token(engine: Talker, tokens: list[int], warm: bool) -> dict[str, Any]:
    """Raises Failed when a warm engine computed what it should have loaded, or a cold one did not compute."""
    result: dict[str, Any] = engine.ask({"do": "first_token", "prompt": tokens})
    expected = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS if warm else 0
    if (warm and result["cached"] < expected) or (not warm and result["cached"]):
        raise Failed(f"{result['cached']} of {len(tokens)} tokens came from a cache, expected {expected}")
    return result


def rows(length: int, first_s: dict[str, list[float]]) -> list[Row]:
    ms = {name: statistics.median(values) * 1e3 for name, values in first_s.items()}
    share = LENGTHS[length]
    samples = len(first_s["ours"])
    work = f"first token, warm pool [{length:,} tokens, {samples} prompts]"
    peers: dict[str, float | str] = {RECOMPUTE: ms[RECOMPUTE], EXAMPLE: ms[EXAMPLE]}
    ours = ms["ours"]
    return [
        Row(work, ours, "ms", peers, None, f"<= {share:g}x recompute", ours <= share * ms[RECOMPUTE]),
        Row(work, ours, "ms", peers, None, "<= 1x ExampleConnector", ours <= ms[EXAMPLE]),
    ]


def main() -> None:
    parser = make_parser(__doc__, "fewer prompts; under 240 s")
    parser.add_argument(
        "--vllm-python", default=vllm_python(), metavar="PYTHON", help="(MOONPOOL_VLLM_PYTHON)"
    )
    options = parser.parse_args()
    end_on_sigterm()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
        try:
            table = measure(Fleet(folder, options.vllm_python, stack), 5 if options.quick else 15)
        except Failed as error:
            sys.exit(f"engine_ttft: {error}")
    print_table("Time to first token of a real vLLM, medians over prompts", table)
    write_json(options.json, table)


if __name__ == "__main__":
    main()
