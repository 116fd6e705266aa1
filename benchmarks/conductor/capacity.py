"""How much faster requests may come until fewer than 90 % get their first token in time.

Ours refuses at once what it predicts to come too late, and those count as not in time. As they are shipped
the others refuse nothing: the first row of each objective says what that is worth, the second what is left
without a gate. In the last two all have our gate, and then our pool as well: what the choice of the instance
alone is worth.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.conductor.bed import Bed, Search, set_up
from benchmarks.report import Row
from moonpool.disagg_proxy.conductor.admission import Lookahead, Objective
from moonpool.disagg_proxy.tools.simulator.results import Slo

OURS = "conductor"
RIVALS = {"dynamo_cost": 1.25, "sglang_cache_aware": 1.25, "round_robin": 2.6}  # and how much more ours takes
# What is compared: whether ours has the gate, whether the rivals have it, and what stands behind their names.
ROWS = {
    "ours refuses, rivals as shipped have no gate": (True, False, "/local"),
    "nobody has a gate": (False, False, "/local"),
    "all have our gate": (True, True, "/local"),
    "all have our gate and pool": (True, True, ""),
}
QUICK_ROWS = tuple(ROWS)[:2]
SLOS_S = (10.0, 30.0)
SEEDS = 5
BEGIN = 1.5


def rows(bed: Bed) -> list[Row]:
    return [row for slo_s in (SLOS_S[:1] if bed.quick else SLOS_S) for row in _rows(bed, slo_s)]


def _rows(bed: Bed, slo_s: float) -> list[Row]:
    """Of each policy the worst of the seeds; of the ratios, too."""
    shown = {name: ROWS[name] for name in (QUICK_ROWS if bed.quick else ROWS)}
    cells = {(OURS, ours) for ours, _, _ in shown.values()}
    cells |= {(rival + behind, theirs) for _, theirs, behind in shown.values() for rival in RIVALS}
    found = _speeds(bed, slo_s, sorted(cells))
    made = []
    for name, (ours_gated, theirs_gated, behind) in shown.items():
        ours = found[OURS, ours_gated]
        theirs = {rival: found[rival + behind, theirs_gated] for rival in RIVALS}
        ratios = {
            rival: min(
                own / other if other else float("inf") for own, other in zip(ours, speeds, strict=True)
            )
            for rival, speeds in theirs.items()
        }
        said = ", ".join(f"{ratio:.2f}x" for ratio in ratios.values())
        made.append(
            Row(
                f"speed with 90 % of TTFT <= {slo_s:g} s: {name} "
                f"[conversation, {bed.requests('conversation'):,} requests, 8P+8D, "
                f"worst of {len(ours)} seed{'s' * (len(ours) > 1)}]",
                min(ours),
                "x",
                {rival: min(speeds) for rival, speeds in theirs.items()},
                _limit(bed),
                f">= 1.25x, 1.25x, 2.6x (found: {said})",
                bed.judged(all(ratios[rival] >= least for rival, least in RIVALS.items())),
            )
        )
    return made


def _speeds(bed: Bed, slo_s: float, cells: list[tuple[str, bool]]) -> dict[tuple[str, bool], list[float]]:
    """By policy and whether it has the gate; one speed for each seed."""
    seeds = bed.seeds(SEEDS)
    near = 0.08 if bed.quick else 0.01

    def search(cell: tuple[str, bool], speed: float, seed: int, step: float) -> Search:
        policy, gated = cell
        plan = bed.plan("conversation", set_up(8, 8), policy, speed=speed, seed=seed)
        if gated:
            plan = replace(plan, objective=Objective(ttft_s=slo_s), admission=Lookahead.NEVER)
        return Search(plan, Slo(slo_s), near, step)

    what = f"capacity, {slo_s:g} s"
    first = bed.search(f"{what}, first seed", [search(cell, BEGIN, seeds[0], 1.5) for cell in cells])
    # The other seeds are near it.
    others = [
        search(cell, speed or BEGIN, seed, 1.04)
        for cell, speed in zip(cells, first, strict=True)
        for seed in seeds[1:]
    ]
    rest = iter(bed.search(f"{what}, other seeds", others) if others else [])
    return {cell: [speed, *(next(rest) for _ in seeds[1:])] for cell, speed in zip(cells, first, strict=True)}


def _limit(bed: Bed) -> float:
    """The speed at which eight instances that find all that can be found are always busy."""
    trace = bed.trace("conversation")
    every_s = trace.seconds / len(trace)
    return 8 * every_s / bed.ideal_prefill_s("conversation", set_up(8, 8).machine)
