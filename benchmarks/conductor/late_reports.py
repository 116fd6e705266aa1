"""What the conductor loses where it hears of engines late or wrongly: beside itself with true reports, and
beside another router's rule with the same reports.

The machine is derived, not measured (docs/simulator.md). All have our pool, load accounting and models.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from benchmarks.conductor.bed import Bed, set_up
from benchmarks.report import Row
from moonpool.disagg_proxy.tools.simulator.reports import PROMPT, ReportSettings

RIVAL = "dynamo_cost"
WORKS = ("conversation", "synthetic")
SPEED = 4.0
SEEDS = 3
# What is wrong with the reports, and how many times the mean of a run with true ones is allowed.
REPORTS = {
    "0.5 s late": (ReportSettings(lag_s=0.5), 1.05),
    "2 s late": (ReportSettings(lag_s=2.0), 1.15),
    "polled each second": (ReportSettings(period_s=1.0), 1.15),
    "15 % noise": (ReportSettings(noise=0.15), 1.05),
    "40 % noise": (ReportSettings(noise=0.4), 1.15),
    "each engine's times off by up to 2x": (ReportSettings(skew=2.0), 1.15),
    "none for 30 s": (ReportSettings(silent_from_s=100.0, silent_s=30.0), 1.15),
}


def rows(bed: Bed) -> list[Row]:
    return [row for trace in WORKS for row in _rows(bed, trace)]


def _rows(bed: Bed, trace: str) -> list[Row]:
    seeds, cluster = bed.seeds(SEEDS), set_up(4, 4, "h100_fp8")
    both = [(name, each) for each, _ in REPORTS.values() for name in ("conductor", RIVAL)]
    cells = [("conductor", PROMPT), *both]
    plans = [
        replace(bed.plan(trace, cluster, policy, speed=SPEED, seed=seed), reports=reports)
        for policy, reports in cells
        for seed in seeds
    ]
    times_s = [run.results.ttft_mean_s for run in bed.simulate(f"late reports, {trace}", plans)]
    true_s, *others = (fmean(times_s[at : at + len(seeds)]) for at in range(0, len(times_s), len(seeds)))
    return [
        Row(
            f"mean TTFT, reports {what}, {trace}, {SPEED:g}x [{bed.requests(trace):,} requests, 4P+4D of "
            f"h100_fp8, {len(seeds)} seed{'s' * (len(seeds) > 1)}; true reports: {true_s:.3f} s]",
            ours,
            "s",
            {RIVAL: rival},
            bed.ideal_prefill_s(trace, cluster.machine),
            f"<= {most:g}x with true reports, < {RIVAL}",
            bed.judged(ours <= most * true_s and ours < rival),
        )
        for (what, (_, most)), ours, rival in zip(REPORTS.items(), others[::2], others[1::2], strict=True)
    ]
