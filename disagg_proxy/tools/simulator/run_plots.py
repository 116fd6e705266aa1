"""The drawings of simulations: distribution of TTFT and gaps, reuse, predictions, the load over time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.disagg_proxy.tools.simulator import plots, report, split_plots
from moonpool.disagg_proxy.tools.simulator.results import Results, Slo
from moonpool.disagg_proxy.tools.simulator.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Panel = Callable[[Axes], None]

BUCKETS = 120  # of the time axis
POINTS = 2_000  # of a curve or a cloud
LOADS_MAX = 8  # runs whose load has a picture of its own; the picture says when there are more


def draw(path: Path, runs: Sequence[Run], slo: Slo, *, sweep: bool = False) -> None:
    """A page with a table for .html, the same curves alone for .png. sweep: the runs are the splits of as
    many instances; figures are drawn over the split, and all else of the best ones alone."""
    shown = report.best_splits(runs, slo) if sweep else runs
    panels: list[Panel] = split_plots.panels(runs, slo) if sweep else []
    panels += [lambda axes: _first_tokens(axes, shown, slo), lambda axes: _over_time(axes, shown, slo)]
    if any(run.results.gap_mean_s > 0 for run in shown):
        panels.append(lambda axes: _gaps(axes, shown, slo))
    panels += [lambda axes: _reused(axes, shown), lambda axes: _predictions(axes, shown, slo)]
    if any(run.results.refused for run in shown):
        panels.append(lambda axes: _refused(axes, shown))
    panels += [lambda axes, run=run: _load(axes, run, slo) for run in shown[:LOADS_MAX]]  # type: ignore[misc]
    with plots.figure(len(panels), columns=2) as (figure, all_axes):
        for panel, axes in zip(panels, all_axes, strict=True):
            panel(axes)
        notes = ["below the splits: the best one of each speed and policy"] if sweep else []
        if len(shown) > LOADS_MAX:
            notes.append(f"loads of the first {LOADS_MAX} of {len(shown)} runs")
        figure.suptitle("; ".join(notes))
        picture = plots.as_png(figure)
    title = f"{runs[0].plan.trace.name}: {len(runs[0].results)} requests" if runs else "nothing"
    plots.write(path, title, *_rows(runs, slo), picture)


def over_time(results: Results) -> tuple[list[float], list[float], list[float], list[float]]:
    """(times, mean TTFT, served, refused), in BUCKETS equal parts by the time of arrival; NaN where none
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


def _first_tokens(axes: Axes, runs: Sequence[Run], slo: Slo) -> None:
    """Refused ones never get a first token, so their curve ends below 1."""
    for run in runs:
        share = run.results.served / max(len(run.results), 1)
        _spread(axes, run.results.ttft_s, share, report.name(run.plan))
    if slo.ttft_s < math.inf:
        axes.axvline(slo.ttft_s, color="grey", linestyle=":", label="objective")
    axes.set(xscale="log", xlabel="TTFT, s", ylabel="share of all requests", ylim=(0, 1))
    axes.legend(fontsize="small")


def _gaps(axes: Axes, runs: Sequence[Run], slo: Slo) -> None:
    """Of the requests that have a gap; an answer of one token has none."""
    for run in runs:
        _spread(axes, [gap_s * 1000 for gap_s in run.results.gap_s if gap_s > 0], 1.0, report.name(run.plan))
    if slo.gap_s < math.inf:
        axes.axvline(slo.gap_s * 1000, color="grey", linestyle=":", label="objective")
    axes.set(xlabel="TBT, mean of the longest tenth of the gaps, ms", ylim=(0, 1))
    axes.set_ylabel("share of the answers")
    axes.legend(fontsize="small")


def _spread(axes: Axes, values: Sequence[float], share: float, name: str) -> None:
    """The share of ``values`` up to each, ``share`` being that of all of them."""
    ordered = sorted(values)
    step = max(len(ordered) // POINTS, 1)
    kept = [*range(0, len(ordered), step)]
    heights = [(at + 1) * share / len(ordered) for at in kept]
    axes.plot([ordered[at] for at in kept], heights, label=name, linewidth=1)


def _over_time(axes: Axes, runs: Sequence[Run], slo: Slo) -> None:
    for run in runs:
        times, means, _, _ = over_time(run.results)
        axes.plot(times, means, label=report.name(run.plan), linewidth=1)
    if slo.ttft_s < math.inf:
        axes.axhline(slo.ttft_s, color="grey", linestyle=":")
    axes.set(yscale="log", xlabel="time of arrival, s", ylabel="mean TTFT, s")


def _refused(axes: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        times, _, _, gone = over_time(run.results)
        axes.plot(times, gone, label=report.name(run.plan), linewidth=1)
    axes.set(xlabel="time of arrival, s", ylabel="refused")
    axes.legend(fontsize="small")


def _reused(axes: Axes, runs: Sequence[Run]) -> None:
    """Where the prompts' tokens came from, one bar for each run."""
    found = [run.results.summary(Slo()) for run in runs]
    places = range(len(runs))
    left = [0.0] * len(runs)
    for tier, color in (("own", "tab:green"), ("fetched", "tab:blue"), ("computed", "lightgrey")):
        shares = [getattr(each, tier) for each in found]
        axes.barh(places, shares, left=left, color=color, label=tier)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.set(xlim=(0, 1), xlabel="share of the prompts' tokens")
    axes.set_yticks(list(places), [report.name(run.plan) for run in runs], fontsize="small")
    axes.invert_yaxis()
    axes.legend(fontsize="small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _predictions(axes: Axes, runs: Sequence[Run], slo: Slo) -> None:
    for run in runs:
        _predicted(axes, run, slo, report.name(run.plan))
    axes.axline((1, 1), slope=1, color="grey", linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="predicted TTFT, s", ylabel="observed TTFT, s")
    if axes.collections:
        axes.legend(fontsize="small")


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
    """Both as shares of the objective; without one, of the longest wait or gap seen."""
    loads = run.loads
    for what, seen_s, objective_s, unit, unit_s in (
        ("prefill: wait", loads.wait_s, slo.ttft_s, "s", 1.0),
        ("decode: gap", loads.gap_s, slo.gap_s, "ms", 0.001),
    ):
        wanted = objective_s < math.inf
        most_s = objective_s if wanted else max(seen_s, default=0.0)
        of = "the objective" if wanted else "the longest"
        shares = [each_s / (most_s or 1.0) for each_s in seen_s]
        axes.plot(loads.at_s, shares, label=f"{what} / {of}, {most_s / unit_s:.3g} {unit}", linewidth=1)
    title = f"{report.name(run.plan)}: correlation of prefill and decode load {loads.correlation():.2f}"
    axes.set(xlabel="time, s", ylabel="load")
    axes.set_title(title, fontsize="medium")
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
