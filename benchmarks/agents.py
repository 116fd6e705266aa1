"""Sessions of agents on real vLLM engines: one pool and the conductor, beside what people run without them.

    python -m benchmarks.agents [--vllm-python PYTHON] [--sessions N] [--turns N] [--fleets NAME,...]
                                [--quick] [--json FILE]

All sessions begin with one system prompt of 600 tokens. Each turn sends all that was said before, the answers
too, and 60 to 220 tokens more; every fourth turn sends a second request beside it, with the same history and
another end, as a tool call does. The sessions together are larger than the KV cache of an engine. Fleets run
one after the other, with the same sessions and engines of their own:

    moonpool      two engines, their connector over one node, answers saved; the proxy's conductor
    round_robin   two engines without a pool; the proxy takes turns
    offloading    the same, with vLLM's own OffloadingConnector, as much memory as the node in each
    one engine    one engine without a pool, with the KV cache of two

Computed again: of the prompt tokens that were in an earlier prompt or answer of the session, or in the system
prompt, in whole blocks, those that an engine computed. Times are from sending to the first token.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.conductor import sessions
from benchmarks.conductor.sessions import Turn
from benchmarks.engine.fleet import vllm_python
from benchmarks.engine.serving import Failed, Serving
from benchmarks.options import make_parser
from benchmarks.processes import end_on_sigterm
from benchmarks.report import NOT_RUN, Row, print_table, write_json

OURS, BESIDE = "moonpool", "round_robin"
MIB = 1 << 20
KV_BYTES, NODE_BYTES = 96 * MIB, 1024 * MIB  # 12,000 tokens of an engine; of all
ENGINE = ["--max-model-len", "8192", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"]
SEED = 20261129
COMPUTED_AGAIN, MEDIAN, EACH_TURN = 0.15, 0.35, 0.6  # of round_robin's


class Size(NamedTuple):
    sessions: int
    turns: int


FULL, QUICK = Size(12, 8), Size(6, 4)


def offloading() -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": NODE_BYTES},
    }


class Fleet(NamedTuple):
    """connector: of each engine, as Serving.start_engine has it."""

    engines: int
    policy: str
    connector: Callable[[Serving], dict[str, Any] | None]


FLEETS = {
    OURS: Fleet(2, "conductor", lambda serving: serving.our_connector(save_decode=True)),
    BESIDE: Fleet(2, "round_robin", lambda _: None),
    "offloading": Fleet(2, "round_robin", lambda _: offloading()),
    "one engine": Fleet(1, "round_robin", lambda _: None),
}


def run(name: str, size: Size, python: str) -> list[Turn]:
    """Raises Failed."""
    fleet = FLEETS[name]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-", dir="/tmp")))
        serving = Serving(folder, python, stack)
        pool = name == OURS
        if pool:
            serving.start_node(f"{NODE_BYTES // MIB}MiB")
        kv_bytes = KV_BYTES * (2 // fleet.engines)
        for number in range(fleet.engines):
            own = ["--kv-cache-memory-bytes", str(kv_bytes)]
            serving.start_engine(f"e{number}", *ENGINE, *own, connector=fleet.connector(serving))
        serving.wait()
        url = serving.start_proxy(fleet.policy, pool=pool)
        asyncio.run(sessions.warm_up(url))
        return asyncio.run(sessions.talk(url, size.sessions, size.turns, SEED))


def again(turns: list[Turn]) -> float:
    return float(sum(max(turn.known - turn.cached, 0) for turn in turns))


def median_ms(turns: list[Turn]) -> float:
    return statistics.median(turn.ttft_s for turn in turns) * 1e3


def rows_of(found: dict[str, list[Turn]], size: Size, judged: bool) -> list[Row]:
    """found: what each fleet gave; without those that did not run."""
    each = f"[{size.sessions} sessions of {size.turns} turns]"
    judged = judged and BESIDE in found

    def row(what: str, unit: str, of: Callable[[list[Turn]], float], most: float) -> Row:
        peers: dict[str, float | str] = {
            name: of(found[name]) if name in found else NOT_RUN for name in FLEETS if name != OURS
        }
        ours = of(found[OURS])
        met = ours <= most * float(peers[BESIDE]) if judged else None
        target = f"<= {most:g}x {BESIDE}"
        return Row(f"{what} {each}", ours, unit, peers, None, target, met)

    def of_turn(number: int) -> Callable[[list[Turn]], float]:
        return lambda turns: median_ms([turn for turn in turns if turn.number == number])

    known = sum(turn.known for turn in found[OURS])
    return [
        row(f"tokens computed again, of {known:,}", "tokens", again, COMPUTED_AGAIN),
        row("median first token", "ms", median_ms, MEDIAN),
        *(
            row(f"median first token of turn {number + 1}", "ms", of_turn(number), EACH_TURN)
            for number in range(size.turns)
        ),
    ]


def main() -> None:
    parser = make_parser(__doc__, "few and short sessions, two fleets; under 240 s; judges nothing")
    parser.add_argument(
        "--vllm-python", default=vllm_python(), metavar="PYTHON", help="(MOONPOOL_VLLM_PYTHON)"
    )
    parser.add_argument("--sessions", type=int, metavar="N", help=f"default: {FULL.sessions}")
    parser.add_argument("--turns", type=int, metavar="N", help=f"of each; default: {FULL.turns}")
    parser.add_argument(
        "--fleets", metavar="NAME,...", help=f"of {', '.join(FLEETS)}; {OURS} runs in any case"
    )
    options = parser.parse_args()
    default = QUICK if options.quick else FULL
    size = Size(options.sessions or default.sessions, options.turns or default.turns)
    wanted = (
        options.fleets.split(",") if options.fleets else [OURS, BESIDE] if options.quick else list(FLEETS)
    )
    if unknown := set(wanted) - set(FLEETS):
        parser.error(f"--fleets knows {', '.join(FLEETS)}, not {', '.join(sorted(unknown))}")
    end_on_sigterm()
    found: dict[str, list[Turn]] = {}
    for name in dict.fromkeys([OURS, *wanted]):
        try:
            found[name] = run(name, size, options.vllm_python)
        except (Failed, RuntimeError, OSError, TimeoutError) as error:
            if name == OURS:
                sys.exit(f"agents: {error}")
            first, *_, last = f"{error}\n{error}".strip().splitlines()
            print(f"{name} did not run: {first} ({last})", file=sys.stderr)
            continue
        print(
            f"{name}: {again(found[name]):,.0f} tokens again, {median_ms(found[name]):.0f} ms",
            file=sys.stderr,
        )
    rows = rows_of(found, size, not options.quick)
    print_table("Agents on real engines", rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
