"""Simulations drawn: how first tokens spread, what they were predicted to be, and the load over time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.disagg_proxy.simulator import plots, report
from moonpool.disagg_proxy.simulator.results import Results, Slo
from moonpool.disagg_proxy.simulator.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUCKETS = 120  # of the time axis
POINTS = 2_000  # of a curve or a cloud
LOADS_MAX = 6  # runs whose load has a picture of its own


def draw(path: Path, runs: Sequence[Run], slo: Slo) -> None:
    """A page with a table for .html, the same curves alone for .png."""
    with plots.figure(4 + min(len(runs), LOADS_MAX)) as (figure, (spread, line, refused, predicted, *loads)):
        for run in runs:
            name = f"{report.label(run.plan)}, {report.instances(run.plan)}, {run.plan.speed:g}x"
            _spread(spread, run, name)
            times, means, _, gone = over_time(run.results)
            line.plot(times, means, label=name, linewidth=1)
            refused.plot(times, gone, label=name, linewidth=1)
            _predicted(predicted, run, slo, name)
        for axes, run in zip(loads, runs, strict=False):
            _load(axes, run, slo)
        spread.axvline(slo.ttft_s, color="grey", linestyle=":", label="objective")
        spread.set(xscale="log", xlabel="TTFT, s", ylabel="share of all requests", ylim=(0, 1))
        line.axhline(slo.ttft_s, color="grey", linestyle=":")
        line.set(yscale="log", xlabel="time of arrival, s", ylabel="mean TTFT, s")
        refused.set(xlabel="time of arrival, s", ylabel="refused")
        predicted.axline((1, 1), slope=1, color="grey", linestyle=":")
        predicted.set(xscale="log", yscale="log", xlabel="predicted TTFT, s", ylabel="observed TTFT, s")
        for axes in (spread, predicted):
            axes.legend(fontsize="small")
        picture = plots.as_png(figure)
    title = f"{runs[0].plan.trace.name}: {len(runs[0].results)} requests" if runs else "nothing"
    plots.write(path, title, *_rows(runs, slo), picture)


def over_time(results: Results) -> tuple[list[float], list[float], list[float], list[float]]:
    """(times, mean TTFT, served, refused), in BUCKETS equal parts by the time of arrival; NaN where nobody
    was served.
    """
    width = max(results.last_s, 1e-9) / BUCKETS
    sums, served, refused = [0.0] * BUCKETS, [0] * BUCKETS, [0] * BUCKETS
    for at_s, ttft_s in zip(results.arrived_s, results.ttft_s, strict=True):
        place = min(int(at_s / width), BUCKETS - 1)
        sums[place] += ttft_s
        served[place] += 1
    for at_s in results.refused_s:
        refused[min(int(at_s / width), BUCKETS - 1)] += 1
    means = [total / count if count else math.nan for total, count in zip(sums, served, strict=True)]
    return (
        [(place + 0.5) * width for place in range(BUCKETS)],
        means,
        [count * results.served / max(len(results.ttft_s), 1) for count in served],
        [count * results.refused / max(len(results.refused_s), 1) for count in refused],
    )


def _spread(axes: Axes, run: Run, name: str) -> None:
    """Refused ones never get a first token, so their curve ends below 1."""
    values = sorted(run.results.ttft_s)
    kept = range(0, len(values), max(len(values) // POINTS, 1))
    share = run.results.served / max(len(run.results), 1) / max(len(values), 1)
    axes.plot([values[at] for at in kept], [(at + 1) * share for at in kept], label=name, linewidth=1)


def _predicted(axes: Axes, run: Run, slo: Slo, name: str) -> None:
    results = run.results
    pairs = [
        (predicted, ttft)
        for predicted, ttft in zip(results.predicted_s, results.ttft_s, strict=True)
        if predicted > 0 and ttft > 0
    ]
    if not pairs:
        return
    if len(pairs) > POINTS:
        pairs = random.Random(0).sample(pairs, POINTS)
    found = results.summary(slo)
    said = f"{name}: off by {found.error_p50_s:.2g} s (half), {found.error_p90_s:.2g} s (90 %)"
    x, y = zip(*pairs, strict=True)
    axes.scatter(x, y, s=3, alpha=0.4, label=said)


def _load(axes: Axes, run: Run, slo: Slo) -> None:
    """Both as shares of the objective; without one for the gaps, of the longest gap seen."""
    loads = run.loads
    gap_most_s = slo.gap_s if slo.gap_s < math.inf else max(loads.gap_s, default=0.0)
    axes.plot(
        loads.at_s, [wait_s / (slo.ttft_s or 1.0) for wait_s in loads.wait_s], label="prefill", linewidth=1
    )
    axes.plot(loads.at_s, [gap_s / (gap_most_s or 1.0) for gap_s in loads.gap_s], label="decode", linewidth=1)
    name = f"{report.label(run.plan)}, {report.instances(run.plan)}, {run.plan.speed:g}x"
    axes.set(xlabel="time, s", ylabel="load", title=f"{name}: correlation {loads.correlation():.2f}")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


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
                f"{found.gap_mean_s * 1000:.1f}",
                f"{found.own:.1%}",
                f"{found.fetched:.1%}",
                f"{found.computed:.1%}",
                f"{found.error_p50_s:.3f} / {found.error_p90_s:.3f} / {found.error_p99_s:.3f}",
                report.refused(run.results),
                f"{found.good:.1%}",
            )
        )
    head = ("policy", "instances", "speed", "mean TTFT s", "p90", "gap ms", "own cache", "others' caches")
    return (*head, "computed", "prediction off by s: p50 / p90 / p99", "refused", "good"), rows
