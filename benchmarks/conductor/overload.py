"""More requests than the cluster can take: what is refused, and how many of the others are served in time.

Two decode instances for eight that compute prompts, so that decode is what runs full, as on the paper's
testbed; with eight, and our model of its machine, decode never needs 100 ms and all gates are one. The naive
gate looks at decode when a prompt is computed, and what it refuses then was computed for nothing (Mooncake,
arXiv 2407.00079, section 7: the baseline of its table of rejections).
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.conductor.bed import Bed, set_up
from benchmarks.report import Row
from moonpool.disagg_proxy.conductor.admission import Look, Objective
from moonpool.disagg_proxy.simulator.results import Slo

SLO = Slo(30.0, 0.1)
SPEEDS = (2.0, 3.0)
QUEUE = 10_000
GATES: dict[str, tuple[Look | None, int]] = {  # at what it looks, and how many may wait
    "no rejection": (None, 0),
    "naive gate": (Look.AFTER, 0),
    "as it is now": (Look.NOW, 0),
    "ahead": (Look.AHEAD, 0),
    "ahead, with a queue": (Look.AHEAD, QUEUE),
}
OURS = "ahead, with a queue"


def rows(bed: Bed) -> list[Row]:
    cells = [(speed, gate) for speed in (SPEEDS[:1] if bed.quick else SPEEDS) for gate in GATES]
    plans = [
        replace(
            bed.plan("conversation", set_up(8, 2), "conductor", speed=speed),
            objective=Objective(*SLO),
            admission=GATES[gate][0],
            queue=GATES[gate][1],
        )
        for speed, gate in cells
    ]
    runs = dict(zip(cells, bed.simulate("overload", plans), strict=True))
    made = []
    for speed in sorted({speed for speed, _ in cells}):
        what = f"{speed:g}x [conversation, {bed.requests('conversation'):,} requests, 8P+2D]"
        found = {gate: runs[speed, gate].results.summary(SLO) for gate in GATES}
        loads = {gate: runs[speed, gate].loads.correlation() for gate in GATES}
        others = [gate for gate in GATES if gate != OURS]
        ours = found[OURS]
        made += [
            Row(
                f"within TTFT 30 s and gaps of 100 ms, {what}",
                ours.good * 100,
                "%",
                {gate: found[gate].good * 100 for gate in others},
                100.0,
                ">= 1.5x of no rejection",
                ours.good >= 1.5 * found["no rejection"].good,
            ),
            Row(
                f"refused, {what}",
                ours.refused,
                "",
                {gate: float(found[gate].refused) for gate in others},
                None,
                "<= 0.86x of the naive gate",
                bed.judged(ours.refused <= 0.86 * found["naive gate"].refused),
            ),
            Row(
                f"correlation of prefill's and decode's load over time, {what}",
                loads[OURS],
                "",
                {gate: loads[gate] for gate in others},
                None,
                "",
                None,
            ),
        ]
    return made
