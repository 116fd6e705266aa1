"""Time to first token of a hit that is loaded, computed, or both: front computed while back is loaded.

    python -m benchmarks.load_or_compute [--vllm-python PYTHON] [--quick] [--json FILE]

A real vLLM on the CPU with our scheduler class stores prompts in a node, then gets each of them again with
an empty cache of its own: with the pool switched off for the request, and with the choice made by measured
rates. A second engine loads every hit. Loads go through a link (benchmarks/engine/shaped.py) by whose speed
a load takes 0.5 to 2 times as long as computing does. All first tokens are compared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from benchmarks.engine.fleet import Failed, Fleet, moonpool_config, prompt, ready, vllm_python
from benchmarks.engine.serving import larger_model
from benchmarks.options import make_parser
from benchmarks.processes import Talker, end_on_sigterm
from benchmarks.report import Row, print_table, write_json

DRIVER = "benchmarks.engine.hits_driver"
SCHEDULER = "moonpool.connectors.vllm.meeting_scheduler.Scheduler"
LENGTHS = (2000, 4000)
TIMES = (0.5, 0.7, 1.0, 1.4, 2.0)  # that a load takes, in times of computing the same
BYTES_PER_TOKEN = 4 * 2 * 4 * 64 * 4  # layers x (K and V) x KV heads x head size x float32
BLOCK_TOKENS = 32
SHARE_MAX = 0.75  # of the better of the two
WARM_HITS = 6  # whose loads measure a link: 5 make a rate
LOAD, COMPUTE, BOTH = "load", "compute", "both"


def first_s(
    engine: Talker, tokens: list[int], expected: int | None, *, loads: bool = True
) -> tuple[float, str, int]:
    """(seconds to the first token, why it was loaded or not, the token). Raises Failed when the token is not
    the expected one."""
    answer = engine.ask({"do": "hit", "prompt": tokens, "loads": loads})
    if expected is not None and answer["token"] != expected:
        raise Failed(f"another first token, by {answer}: {expected} is what computing gave")
    return answer["first_s"], answer["reason"], answer["token"]


def measure(fleet: Fleet, rounds: int, lengths: tuple[int, ...], times: tuple[float, ...]) -> list[Row]:
    """Raises Failed."""
    node = fleet.node("2GiB")
    sizes = {"max_model_len": 8192, "max_num_batched_tokens": 4096}
    both = fleet.engine(BOTH, moonpool_config(node), module=DRIVER, scheduler_cls=SCHEDULER, **sizes)
    always = moonpool_config(node, compute_if_faster=False)
    load = fleet.engine(LOAD, always, module=DRIVER, **sizes)
    ready(both, load)
    table = []
    for length in lengths:
        prompts = [prompt(length, f"{length}/{number}") for number in range(3)]
        both.ask({"do": "save", "prompts": prompts})
        tokens_of = [first_s(both, tokens, None, loads=False)[2] for tokens in prompts]
        for factor in times:
            computed = [
                first_s(both, tokens, None, loads=False)[0] for tokens in prompts
            ]  # beside what runs now
            compute_s = statistics.median(computed)
            hit_bytes = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS * BYTES_PER_TOKEN
            link = hit_bytes / (compute_s * factor)
            both.ask({"do": "set_link", "bytes_per_s": link})
            load.ask({"do": "set_link", "bytes_per_s": link})
            for number in range(WARM_HITS):
                first_s(both, prompts[number % 3], tokens_of[number % 3])
            taken: dict[str, list[float]] = {LOAD: [], COMPUTE: [], BOTH: []}
            reasons: Counter[str] = Counter()
            for number in range(rounds):
                tokens, expected = prompts[number % 3], tokens_of[number % 3]
                taken[COMPUTE].append(first_s(both, tokens, expected, loads=False)[0])
                taken[LOAD].append(first_s(load, tokens, expected)[0])
                seconds, reason, _ = first_s(both, tokens, expected)
                taken[BOTH].append(seconds)
                reasons[reason] += 1
            table.append(row(length, factor, taken, reasons))
            print(table[-1], dict(reasons), flush=True)
    return table


def row(length: int, factor: float, taken: dict[str, list[float]], reasons: Counter[str]) -> Row:
    ms = {name: statistics.median(values) * 1e3 for name, values in taken.items()}
    better = min(ms[LOAD], ms[COMPUTE])
    within = max(ms[LOAD], ms[COMPUTE]) <= 2.1 * better
    met = ms[BOTH] <= SHARE_MAX * better if within else None
    chosen = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    work = f"first token of a hit [{length:,} tokens; a load takes {factor:g}x as long; {chosen}]"
    return Row(
        work,
        ms[BOTH],
        "ms",
        {LOAD: ms[LOAD], COMPUTE: ms[COMPUTE]},
        None,
        f"<= {SHARE_MAX:g}x the better",
        met,
    )


def main() -> None:
    parser = make_parser(__doc__, "one length, three links")
    parser.add_argument(
        "--vllm-python", default=vllm_python(), metavar="PYTHON", help="(MOONPOOL_VLLM_PYTHON)"
    )
    options = parser.parse_args()
    end_on_sigterm()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
        try:
            fleet = Fleet(folder, options.vllm_python, stack, model=larger_model(folder))
            if options.quick:
                table = measure(fleet, 5, LENGTHS[:1], TIMES[::2])
            else:
                table = measure(fleet, 9, LENGTHS, TIMES)
        except Failed as error:
            sys.exit(f"load_or_compute: {error}")
    print_table("Hits that are loaded, computed, or both; medians over prompts", table)
    write_json(options.json, table)


if __name__ == "__main__":
    main()
