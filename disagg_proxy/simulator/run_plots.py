"""Simulations drawn: what each policy did over time, and how its first tokens spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.disagg_proxy.simulator import plots, report
from moonpool.disagg_proxy.simulator.results import Results, Slo
from moonpool.disagg_proxy.simulator.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUCKETS = 120  # of the time axis


def draw(path: Path, runs: Sequence[Run], slo: Slo) -> None:
    """A page with a table for .html, the same curves alone for .png."""
    with plots.figure(3) as (figure, (spread, line, refused)):
        for run in runs:
            name = f"{report.label(run.plan)}, {report.instances(run.plan)}, {run.plan.speed:g}x"
            _spread(spread, run, name)
            last_s = max((*run.results.arrived_s[-1:], *run.results.refused_s[-1:]), default=1.0)
            times, means, _, gone = over_time(run.results, last_s)
            line.plot(times, means, label=name, linewidth=1)
            refused.plot(times, gone, label=name, linewidth=1)
        spread.axvline(slo.ttft_s, color="grey", linestyle=":", label="objective")
        spread.set(xscale="log", xlabel="TTFT, s", ylabel="share of all requests", ylim=(0, 1))
        line.axhline(slo.ttft_s, color="grey", linestyle=":")
        line.set(yscale="log", xlabel="time of arrival, s", ylabel="mean TTFT, s")
        refused.set(xlabel="time of arrival, s", ylabel="refused")
        spread.legend(fontsize="small")
        picture = plots.as_png(figure)
    title = f"{runs[0].plan.trace.name}: {len(runs[0].results)} requests" if runs else "nothing"
    plots.write(path, title, *_rows(runs, slo), picture)


def over_time(results: Results, seconds: float) -> tuple[list[float], list[float], list[int], list[int]]:
    """(times, mean TTFT, served, refused), in BUCKETS equal parts by the time of arrival; NaN where nobody
    was served.
    """
    width = max(seconds, 1e-9) / BUCKETS
    sums, served, refused = [0.0] * BUCKETS, [0] * BUCKETS, [0] * BUCKETS
    for at_s, ttft_s in zip(results.arrived_s, results.ttft_s, strict=True):
        place = min(int(at_s / width), BUCKETS - 1)
        sums[place] += ttft_s
        served[place] += 1
    for at_s in results.refused_s:
        refused[min(int(at_s / width), BUCKETS - 1)] += 1
    means = [total / count if count else math.nan for total, count in zip(sums, served, strict=True)]
    return [(place + 0.5) * width for place in range(BUCKETS)], means, served, refused


def _spread(axes: Axes, run: Run, name: str) -> None:
    """Refused ones never get a first token, so their curve ends below 1."""
    values = sorted(run.results.ttft_s)
    step = max(len(values) // 2_000, 1)
    kept = range(0, len(values), step)
    total = max(len(run.results), 1)
    axes.plot([values[at] for at in kept], [(at + 1) / total for at in kept], label=name, linewidth=1)


def _rows(runs: Sequence[Run], slo: Slo) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(head, rows) of the page's table."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        found = run.results.summary(slo)
        rows.append(
            (
                report.label(run.plan),
                report.instances(run.plan),
                f"{run.plan.speed:g}",
                f"{found.ttft_mean_s:.3f}",
                f"{found.ttft_p90_s:.3f}",
                f"{found.hits:.1%}",
                str(found.refused),
                f"{found.good:.1%}",
            )
        )
    return ("policy", "instances", "speed", "mean TTFT s", "p90", "reused", "refused", "good"), rows
