"""How far decode's load swings under a gate: the paper's case for prediction (Mooncake, arXiv 2407.00079,
section 7.3), where prefill takes long beside what decode can take.

A steady stream of long prompts, about three times what two decode instances can answer. A gate that looks at
decode as it is lets in whatever comes until the first of them decode, a whole prefill later; then all arrive.
On the public traces hardly any prompt takes that long to compute.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.conductor.bed import set_up
from benchmarks.report import Row
from moonpool.disagg_proxy.conductor.admission import Lookahead, Objective
from moonpool.disagg_proxy.tools.simulator.results import Slo, quantile
from moonpool.disagg_proxy.tools.simulator.runs import Plan, Run, simulate
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival, Trace

PREFILL, DECODE = 16, 2
RATE = 4.0  # requests a second
TOKENS, ANSWER = 60_000, 300
SECONDS, SETTLED_S = 900.0, 200.0
SLO = Slo(60.0, 0.05)
AT_MOST = 0.5  # of the swing of the gate that looks at decode as it is
GATES = {"naive": Lookahead.AFTER, "now": Lookahead.NOW, "ahead": Lookahead.AHEAD}


def rows() -> list[Row]:
    runs = {name: simulate(plan(look), steady()) for name, look in GATES.items()}
    swings = {name: 100 * swing(run) for name, run in runs.items()}
    good = {name: 100 * run.results.summary(SLO).good for name, run in runs.items()}
    where = f"[steady, {PREFILL}P+{DECODE}D, {RATE:g} requests/s of {TOKENS:,} tokens, TTFT 60 s, gaps 50 ms]"
    return [
        _row(
            f"decode's load over time, of what is allowed: 95th less 5th percentile {where}",
            swings,
            f"<= {AT_MOST}x now",
            swings["ahead"] <= AT_MOST * swings["now"],
        ),
        _row(f"within both objectives {where}", good, "> now", good["ahead"] > good["now"]),
    ]


def steady() -> Trace:
    blocks = -(-TOKENS // BLOCK_TOKENS)
    return Trace(
        "steady",
        [
            Arrival(number / RATE, TOKENS, ANSWER, range(number * blocks, (number + 1) * blocks))
            for number in range(int(SECONDS * RATE))
        ],
    )


def plan(look: Lookahead) -> Plan:
    return Plan(Path("steady"), set_up(PREFILL, DECODE), objective=Objective(*SLO), admission=look)


def swing(run: Run) -> float:
    loads = run.loads
    seen = sorted(
        gap_s / SLO.gap_s
        for at_s, gap_s in zip(loads.at_s, loads.gap_s, strict=True)
        if SETTLED_S <= at_s <= SECONDS
    )
    return quantile(seen, 0.95) - quantile(seen, 0.05)


def _row(work: str, figures: dict[str, float], target: str, met: bool) -> Row:
    peers: dict[str, float | str] = {name: each for name, each in figures.items() if name != "ahead"}
    return Row(work, figures["ahead"], "%", peers, None, target, met)
