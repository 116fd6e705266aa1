"""What it brings, and costs those that decode, that decode instances compute short prompts while prefill
instances are busy; against the conductor without that rule."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.conductor.bed import Bed, set_up
from benchmarks.report import Row
from moonpool.disagg_proxy.conductor.choice import Request
from moonpool.disagg_proxy.conductor.policies.conductor import Conductor, _Found
from moonpool.disagg_proxy.conductor.policies.roles import Group, Groups
from moonpool.disagg_proxy.tools.simulator.results import quantile
from moonpool.disagg_proxy.tools.simulator.runs import Run

CELLS = (("conversation", 1.166), ("conversation", 2.0), ("synthetic", 1.0))
FIGURES: tuple[tuple[str, str, Callable[[Run], float]], ...] = (
    ("mean TTFT", "s", lambda run: run.results.ttft_mean_s),
    ("gap, mean", "ms", lambda run: run.results.gap_mean_s * 1_000),
    ("gap, 99th percentile", "ms", lambda run: quantile(sorted(run.results.gap_s), 0.99) * 1_000),
)


class AtPrefill(Conductor):
    """Decode instances compute less than 256 tokens, or nothing."""

    def _beside(self, request: Request, groups: Groups, apart: _Found, now_s: float) -> _Found | None:
        return super()._beside(request, groups._replace(decoding=Group()), apart, now_s)


def rows(bed: Bed) -> list[Row]:
    cluster = set_up(8, 8)
    policies = ("conductor", f"{__name__}:{AtPrefill.__name__}")
    plans = [
        bed.plan(trace, cluster, policy, speed=speed)
        for trace, speed in CELLS[: 1 if bed.quick else None]
        for policy in policies
    ]
    runs = bed.simulate("short prompts at decode", plans)
    return [
        Row(
            f"{what}, short prompts at decode, {plan.trace.stem.partition('_')[0]}, {plan.speed:g}x "
            f"[{ours.results.served:,} requests, 8P+8D, 1 seed]",
            of(ours),
            unit,
            {"at prefill": of(other)},
            None,
            "",
            None,
        )
        for plan, ours, other in zip(plans[::2], runs[::2], runs[1::2], strict=True)
        for what, unit, of in FIGURES
    ]
