"""How much faster requests may come until fewer than 90 % get their first token in time."""

from __future__ import annotations

from benchmarks.conductor.bed import Bed, Search, set_up
from benchmarks.report import Row
from moonpool.disagg_proxy.simulator.results import Slo

RIVALS = {"dynamo_cost/local": 1.25, "sglang_cache_aware/local": 1.25, "round_robin/local": 2.6}
SLOS_S = (10.0, 30.0)
SEEDS = 5
BEGIN = 1.5


def rows(bed: Bed) -> list[Row]:
    """Of each policy the worst of the seeds; of the ratios, too."""
    cluster = set_up(8, 8)
    slos_s = SLOS_S[:1] if bed.quick else SLOS_S
    seeds = range(1 if bed.quick else SEEDS)
    policies = ("conductor", *RIVALS)
    near = 0.03 if bed.quick else 0.01
    cells = [(slo_s, policy) for slo_s in slos_s for policy in policies]
    searches = [
        Search(bed.plan("conversation", cluster, policy, speed=BEGIN), Slo(slo_s), near, 1.5)
        for slo_s, policy in cells
    ]
    first = bed.search("capacity, first seed", searches)
    # The other seeds are near it.
    others = [
        Search(bed.plan("conversation", cluster, policy, speed=speed, seed=seed), Slo(slo_s), near, 1.04)
        for (slo_s, policy), speed in zip(cells, first, strict=True)
        for seed in seeds[1:]
    ]
    rest = iter(bed.search("capacity, other seeds", others))
    found = {
        cell: [speed, *(next(rest) for _ in seeds[1:])] for cell, speed in zip(cells, first, strict=True)
    }
    made = []
    for slo_s in slos_s:
        ours = found[slo_s, "conductor"]
        theirs = {policy: found[slo_s, policy] for policy in RIVALS}
        ratios = {
            policy: min(own / other for own, other in zip(ours, speeds, strict=True))
            for policy, speeds in theirs.items()
        }
        said = ", ".join(f"{ratio:.2f}x {policy.partition('/')[0]}" for policy, ratio in ratios.items())
        made.append(
            Row(
                f"speed with 90 % of TTFT <= {slo_s:g} s, worst of {len(seeds)} seeds "
                f"[conversation, {bed.requests('conversation'):,} requests, 8P+8D, 3 M tokens each]",
                min(ours),
                "x",
                {policy.partition("/")[0]: min(speeds) for policy, speeds in theirs.items()},
                _limit(bed),
                f">= 1.25x, 1.25x, 2.6x (worst seed: {said})",
                bed.judged(all(ratios[policy] >= least for policy, least in RIVALS.items())),
            )
        )
    return made


def _limit(bed: Bed) -> float:
    """The speed at which eight instances that find all there is to find are busy all the time."""
    trace = bed.trace("conversation")
    every_s = trace.seconds / len(trace)
    return 8 * every_s / bed.ideal_prefill_s("conversation", set_up(8, 8).machine)
