"""Engines that serve requests whole: their first tokens beside other routers' rules, and how well they are
predicted, by the size of a chunk.

The machine is derived, not measured (docs/simulator.md). All have our pool, load accounting and models.
"""

from __future__ import annotations

from statistics import fmean

from benchmarks.conductor.bed import Bed
from benchmarks.report import Row
from moonpool.disagg_proxy.tools.simulator.cluster import ClusterSettings
from moonpool.disagg_proxy.tools.simulator.machine import MACHINES
from moonpool.disagg_proxy.tools.simulator.results import Slo

RIVALS = ("dynamo_cost", "min_ttft")
AT_MOST = 0.95  # of each rival's mean
WORKS = (("conversation", 4.0), ("conversation", 2.0), ("synthetic", 2.0))
CHUNKS = (512, 2048, 8192)
ENGINES = 8
SEEDS = 3


def rows(bed: Bed) -> list[Row]:
    first = [_first_token(bed, trace, speed) for trace, speed in WORKS]
    return [*first, *(_predicted(bed, chunk) for chunk in CHUNKS)]


def _fleet(chunk_tokens: int = CHUNKS[-1]) -> ClusterSettings:
    return ClusterSettings(whole=ENGINES, machine=MACHINES["h100_fp8"], chunk_tokens=chunk_tokens)


def _first_token(bed: Bed, trace: str, speed: float) -> Row:
    seeds = bed.seeds(SEEDS)
    policies = ("conductor", *RIVALS)
    plans = [
        bed.plan(trace, _fleet(), policy, speed=speed, seed=seed) for policy in policies for seed in seeds
    ]
    runs = iter(bed.simulate(f"whole engines, {trace}, {speed:g}x", plans))
    ours, *rivals = [fmean(next(runs).results.ttft_mean_s for _ in seeds) for _ in policies]
    return Row(
        f"mean TTFT, whole engines, {trace}, {speed:g}x [{bed.requests(trace):,} requests, "
        f"{ENGINES} of h100_fp8, {len(seeds)} seed{'s' * (len(seeds) > 1)}]",
        ours,
        "s",
        dict(zip(RIVALS, rivals, strict=True)),
        bed.ideal_prefill_s(trace, MACHINES["h100_fp8"]),
        f"<= {AT_MOST:g}x both",
        bed.judged(all(ours <= AT_MOST * rival for rival in rivals)),
    )


def _predicted(bed: Bed, chunk_tokens: int) -> Row:
    plan = bed.plan("synthetic", _fleet(chunk_tokens), "conductor", speed=2.0)
    (run,) = bed.simulate(f"whole engines, chunks of {chunk_tokens:,}", [plan])
    found = run.results.summary(Slo())
    return Row(
        f"first tokens are predicted within, half of them, synthetic, 2x [whole engines, chunks of "
        f"{chunk_tokens:,} tokens; mean {found.ttft_mean_s:.3f} s, 90 % within {found.error_p90_s:.3f} s]",
        found.error_p50_s,
        "s",
        {},
        None,
        "<= 0.02x mean TTFT",
        found.error_p50_s <= 0.02 * found.ttft_mean_s,
    )
