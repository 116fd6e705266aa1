"""More requests than the cluster can take: what is refused, and how many of the others are served in time.

Two decode instances for eight that compute prompts: chosen so that decode is what runs full. With eight, the
paper's set-up, and our model of its machine, decode hardly ever needs 100 ms and the gates are one; a row
shows that, too. Gate and set-up were chosen on the conversation trace; the synthetic one is the check.

The naive gate looks at decode when a prompt is computed, and what it refuses then was computed for nothing
(Mooncake, arXiv 2407.00079, section 7: the baseline of its table of rejections). A queue does more than any
gate, so every gate is shown with one and without: prediction is compared with others under the same queue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.conductor import swing
from benchmarks.conductor.bed import Bed, set_up
from benchmarks.report import Row
from moonpool.disagg_proxy.conductor.admission import Lookahead, Objective
from moonpool.disagg_proxy.tools.simulator.results import Slo
from moonpool.disagg_proxy.tools.simulator.runs import Plan

SLO = Slo(30.0, 0.1)
SEEDS = 3
QUEUE = 10_000
GATES: dict[str, tuple[Lookahead | None, int]] = {  # at what it looks, and how many may wait
    "no rejection": (None, 0),
    "naive": (Lookahead.AFTER, 0),
    "now": (Lookahead.NOW, 0),
    "ahead": (Lookahead.AHEAD, 0),
    "naive, queue": (Lookahead.AFTER, QUEUE),
    "now, queue": (Lookahead.NOW, QUEUE),
    "ahead, queue": (Lookahead.AHEAD, QUEUE),
}
OURS = {"ahead": "prediction alone", "ahead, queue": "prediction and a queue"}
NAIVE_MOST = 0.86  # of the naive gate's rejections: the paper's table
NONE_LEAST = 1.5


@dataclass(frozen=True)
class Cell:
    trace: str
    prefill: int
    decode: int
    speed: float


CELLS = (
    Cell("conversation", 8, 2, 2.0),
    Cell("conversation", 8, 2, 3.0),
    Cell("conversation", 8, 8, 2.5),
    Cell("synthetic", 8, 2, 2.0),
)


def rows(bed: Bed) -> list[Row]:
    cells = CELLS[:1] if bed.quick else CELLS
    return [row for cell in cells for row in _rows(bed, cell)] + ([] if bed.quick else swing.rows())


def _rows(bed: Bed, cell: Cell) -> list[Row]:
    """Figures are means of the seeds; a target is met where every seed meets it."""
    seeds = bed.seeds(SEEDS)
    what = f"{cell.trace}, {cell.prefill}P+{cell.decode}D, {cell.speed:g}x"
    plans = [_plan(bed, cell, gate, seed) for gate in GATES for seed in seeds]
    runs = iter(bed.simulate(f"overload, {what}", plans))
    found = {gate: [next(runs) for _ in seeds] for gate in GATES}
    good = {gate: [run.results.summary(SLO).good * 100 for run in each] for gate, each in found.items()}
    refused = {
        gate: [float(run.results.summary(SLO).refused) for run in each] for gate, each in found.items()
    }
    loads = {gate: [run.loads.correlation() for run in each] for gate, each in found.items()}
    end = f"[{what}, {bed.requests(cell.trace):,} requests, {len(seeds)} seed{'s' * (len(seeds) > 1)}]"
    made = []
    for ours, called in OURS.items():
        within = all(
            mine >= NONE_LEAST * none for mine, none in zip(good[ours], good["no rejection"], strict=True)
        )
        made.append(
            _row(
                f"within TTFT 30 s and gaps of 100 ms, {called} {end}",
                "%",
                good,
                ours,
                f">= {NONE_LEAST}x no rejection",
                within,
                100.0,
            )
        )
    for ours, naive, said in (
        ("ahead", "naive", "naive"),
        ("ahead, queue", "naive", "naive, which has no queue"),
        ("ahead, queue", "naive, queue", "naive with the same queue"),
    ):
        fewer = all(
            mine <= NAIVE_MOST * other for mine, other in zip(refused[ours], refused[naive], strict=True)
        )
        made.append(
            _row(
                f"refused, {OURS[ours]} {end}",
                "",
                refused,
                ours,
                f"<= {NAIVE_MOST}x {said}",
                bed.judged(fewer),
            )
        )
    made.append(
        _row(f"correlation of prefill's and decode's load, prediction alone {end}", "", loads, "ahead")
    )
    return made


def _plan(bed: Bed, cell: Cell, gate: str, seed: int) -> Plan:
    plan = bed.plan(cell.trace, set_up(cell.prefill, cell.decode), "conductor", speed=cell.speed, seed=seed)
    look, queue = GATES[gate]
    return replace(plan, objective=Objective(*SLO), admission=look, queue=queue)


def _row(
    work: str,
    unit: str,
    figures: dict[str, list[float]],
    ours: str,
    target: str = "",
    met: bool | None = None,
    limit: float | None = None,
) -> Row:
    others = {gate: fmean(each) for gate, each in figures.items() if gate not in OURS}
    return Row(work, fmean(figures[ours]), unit, others, limit, target, met)
