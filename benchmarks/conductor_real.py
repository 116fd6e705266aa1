"""Real vLLM engines on a CPU behind our proxy: the conductor beside the proxy's other policies, and how true
its predictions are.

    python -m benchmarks.conductor_real [--vllm-python PYTHON] [--quick] [--parts NAME,...] [--json FILE]

Two engines over one node's memory, with a small model of random weights. Each policy has a proxy of its own;
policies take turns with the same arrivals and lengths, and other tokens, so that no cache knows a prompt from
the turn of another policy. In a first round, which is not counted, proxies learn.

whole: both engines serve requests whole; pair: one computes prompts, the other decodes. Short and long
prompts, some with one of four prefixes, at 70 % of the requests a second that round robin can do. agents:
sessions with growing conversations and one system prompt, on both engines whole.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.conductor import real_load
from benchmarks.conductor.real_load import Answer, Turn
from benchmarks.engine.fleet import vllm_python
from benchmarks.engine.serving import Failed, Serving
from benchmarks.options import make_parser
from benchmarks.processes import end_on_sigterm
from benchmarks.report import Row, print_table, write_json

POLICIES = ("conductor", "round_robin", "least_load", "prefix_affinity")
OURS = POLICIES[0]
ENGINES = ("e0", "e1")
ENGINE = [
    *("--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"),
    *("--kv-cache-memory-bytes", str(192 << 20)),  # 24,000 tokens
]
NODE = "1GiB"
LOAD = 0.7
CALIBRATION, CLIENTS = 32, 6
WITHIN, WITHIN_SHARE = 0.25, 90.0
SHARES = (35.0, 65.0)
TRUE_SHARE = 95.0
SEED = 20261127


class Size(NamedTuple):
    """rounds: those that count. seconds: of a policy's turn. sessions, turns: of agents."""

    rounds: int
    seconds: float
    sessions: int
    turns: int


FULL, QUICK = Size(6, 10.0, 12, 12), Size(1, 6.0, 6, 5)


def compare(serving: Serving, size: Size, pair: bool, judged: bool) -> list[Row]:
    """Raises Failed."""
    roles = ENGINES if pair else None
    urls = {policy: serving.start_proxy(policy, pair=roles) for policy in POLICIES}
    what = "a prefill and a decode engine" if pair else "two whole engines"
    calibration = real_load.mixed(CALIBRATION, 1.0, random.Random(SEED), f"{pair}/calibration")
    most = asyncio.run(real_load.throughput(urls["round_robin"], calibration, CLIENTS))
    per_s = LOAD * most
    found: dict[str, list[list[Answer]]] = {policy: [] for policy in POLICIES}
    for number in range(size.rounds + 1):
        turn = number % len(POLICIES)
        for policy in (*POLICIES[turn:], *POLICIES[:turn]):
            chance = random.Random(f"{SEED}/{number}")
            count = max(int(per_s * size.seconds), 4)
            requests = real_load.mixed(count, per_s, chance, f"{pair}/{policy}/{number}")
            answers = asyncio.run(real_load.send(urls[policy], requests))
            mean_s = statistics.fmean(answer.ttft_s for answer in answers)
            print(
                f"{what}, round {number}, {policy}: mean first token {mean_s * 1e3:.0f} ms", file=sys.stderr
            )
            if number > 0:
                found[policy].append(answers)
    each = f"{what} [{size.rounds} x {count} requests, {per_s:.2f} a second]"
    return [*_times(found, each, judged), *_predictions(found[OURS], each, judged)]


def _times(found: dict[str, list[list[Answer]]], each: str, judged: bool) -> list[Row]:
    """Medians over rounds; the verdict is of the rounds' ratios."""
    rows = []
    figures: dict[str, Callable[[list[float]], float]] = {
        "mean": statistics.fmean,
        "median": statistics.median,
    }
    for name, of in figures.items():
        ms = {
            policy: [of([answer.ttft_s * 1e3 for answer in answers]) for answers in rounds]
            for policy, rounds in found.items()
        }
        ours = ms.pop(OURS)
        ratios = [
            statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
            for theirs in ms.values()
        ]
        peers: dict[str, float | str] = {policy: statistics.median(theirs) for policy, theirs in ms.items()}
        what = f"{name} first token, {each}: {', '.join(f'{ratio:.2f}' for ratio in ratios)}x in one round"
        judge = judged and name == "mean"
        target = "below each" if name == "mean" else ""
        met = max(ratios) < 1 if judge else None
        rows.append(Row(what, statistics.median(ours), "ms", peers, None, target, met))
    return rows


def _predictions(rounds: list[list[Answer]], each: str, judged: bool) -> list[Row]:
    """The limit is of requests that met no other one."""
    ratios = [answer.ttft_s / answer.decision["predicted_ttft_s"] for answers in rounds for answer in answers]
    quiet = [
        answer.ttft_s / answer.decision["predicted_ttft_s"]
        for answers in rounds
        for answer in real_load.alone(answers)
    ]
    share, tenths = within(ratios), statistics.quantiles(ratios, n=10)
    met = share >= WITHIN_SHARE if judged else None
    target = f">= {WITHIN_SHARE:g} %"
    spread = f"median (tenths {tenths[0]:.2f} to {tenths[-1]:.2f})"
    limit = within(quiet) if quiet else None
    middle, best = statistics.median(ratios), statistics.median(quiet) if quiet else None
    return [
        Row(f"first tokens predicted within {WITHIN:.0%}, {each}", share, "%", {}, limit, target, met),
        Row(f"first token over predicted, {spread}, {each}", middle, "times", {}, best, "", None),
    ]


def within(ratios: list[float]) -> float:
    """Percent."""
    return 100 * statistics.fmean(abs(1 / ratio - 1) <= WITHIN for ratio in ratios)


def agents(serving: Serving, size: Size, judged: bool) -> list[Row]:
    """Raises Failed."""
    urls = {
        OURS: serving.start_proxy(OURS),
        "no pool events": serving.start_proxy(OURS, pool=False),
        "round_robin": serving.start_proxy("round_robin"),
    }
    found: dict[str, list[Turn]] = {}
    for name, url in urls.items():
        found[name] = asyncio.run(real_load.talk(url, size.sessions, size.turns, SEED, f"agents/{name}"))
        print(f"agents, {name}: {_first_share(found[name]):.0f} % at {ENGINES[0]}", file=sys.stderr)
    peers = [name for name in urls if name != OURS]

    def row(what: str, unit: str, of: Callable[[list[Turn]], float], target: str, met: bool | None) -> Row:
        others: dict[str, float | str] = {name: of(found[name]) for name in peers}
        return Row(f"{what}, {each}", of(found[OURS]), unit, others, None, target, met if judged else None)

    each = f"agents [{size.sessions} sessions of {size.turns} turns]"
    share = _first_share(found[OURS])
    again = {name: _again(turns) for name, turns in found.items()}
    checked, wrong = (_metric(urls[OURS], f"cache_predictions{kind}_total") for kind in ("", "_wrong"))
    true = 100 * (1 - wrong / max(checked, 1))
    return [
        row(
            f"requests at {ENGINES[0]}",
            "% of all",
            _first_share,
            "{:g} to {:g} %".format(*SHARES),
            SHARES[0] <= share <= SHARES[1],
        ),
        row("tokens computed again", "tokens", _again, "<= each", again[OURS] <= min(again.values())),
        row("median first token", "ms", _median_ms, "", None),
        Row(
            f"predictions of hits that came true, of {checked:.0f}, {each}",
            true,
            "%",
            {},
            None,
            f">= {TRUE_SHARE:g} %",
            true >= TRUE_SHARE if judged else None,
        ),
    ]


def _first_share(turns: list[Turn]) -> float:
    return 100 * statistics.fmean(turn.answer.engine == ENGINES[0] for turn in turns)


def _again(turns: list[Turn]) -> float:
    return float(sum(max(turn.known - turn.answer.cached, 0) for turn in turns))


def _median_ms(turns: list[Turn]) -> float:
    return statistics.median(turn.answer.ttft_s for turn in turns) * 1e3


def _metric(url: str, name: str) -> float:
    """Of all engines together."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^moonpool_proxy_{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


PARTS: dict[str, Callable[[Serving, Size, bool], list[Row]]] = {
    "whole": lambda serving, size, judged: compare(serving, size, False, judged),
    "pair": lambda serving, size, judged: compare(serving, size, True, judged),
    "agents": agents,
}


def main() -> None:
    parser = make_parser(__doc__, "a short round; under 240 s; judges nothing")
    parser.add_argument(
        "--vllm-python", default=vllm_python(), metavar="PYTHON", help="(MOONPOOL_VLLM_PYTHON)"
    )
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME,...", help=", ".join(PARTS))
    options = parser.parse_args()
    parts = options.parts.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"--parts knows {', '.join(PARTS)}")
    end_on_sigterm()
    size = QUICK if options.quick else FULL
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-", dir="/tmp")))
        try:
            serving = Serving(folder, options.vllm_python, stack)
            serving.start_node(NODE)
            for name in ENGINES:
                serving.start_engine(name, *ENGINE, connector=serving.our_connector())
            serving.wait()
            for part in parts:
                found = PARTS[part](serving, size, not options.quick)
                print_table(f"Real engines: {part}", found, "alone" if part != "agents" else "")
                rows += found
        except Failed as error:
            sys.exit(f"conductor_real: {error}")
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
