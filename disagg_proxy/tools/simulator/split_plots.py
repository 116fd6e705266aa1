"""A sweep drawn: what is good, first tokens and gaps over the split into prefill and decode instances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from moonpool.disagg_proxy.tools.simulator import report
from moonpool.disagg_proxy.tools.simulator.results import Slo, Summary
from moonpool.disagg_proxy.tools.simulator.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def panels(runs: Sequence[Run], slo: Slo) -> list[Callable[[Axes], None]]:
    """One each; a curve for each speed and policy, its best split marked."""

    def ttft_s(found: Summary) -> float:
        return found.ttft_p90_s

    def gap_ms(found: Summary) -> float:
        return found.gap_p90_s * 1000

    return [
        lambda axes: _over_split(axes, runs, slo, "good, %", lambda found: found.good * 100),
        lambda axes: _over_split(axes, runs, slo, "TTFT p90, s", ttft_s, slo.ttft_s, scale="log"),
        lambda axes: _over_split(axes, runs, slo, "TBT p90, ms", gap_ms, slo.gap_s * 1000),
    ]


def _over_split(
    axes: Axes,
    runs: Sequence[Run],
    slo: Slo,
    what: str,
    value: Callable[[Summary], float],
    objective: float = math.inf,
    scale: Literal["linear", "log"] = "linear",
) -> None:
    best = report.best_splits(runs, slo)
    for chosen in best:
        plan = chosen.plan
        group = [run for run in runs if report.group(run.plan) == report.group(plan)]
        places = [run.plan.cluster.prefill for run in group]
        values = [value(run.results.summary(slo)) for run in group]
        (line,) = axes.plot(places, values, marker=".", label=f"{report.label(plan)}, {plan.speed:g}x")
        at = places.index(plan.cluster.prefill)
        axes.plot(places[at], values[at], marker="*", markersize=14, color=line.get_color())
    total = runs[0].plan.cluster.prefill + runs[0].plan.cluster.decode
    axes.set(xlabel=f"prefill instances of {total}; star: the best split", ylabel=what, yscale=scale)
    axes.set_xticks(sorted({run.plan.cluster.prefill for run in runs}))
    if objective < math.inf:
        axes.axhline(objective, color="grey", linestyle=":", label="objective")
    axes.legend(fontsize="small")
