"""Engines that serve requests whole: their times beside other routers' rules, also while one of them is
slower, and how well first tokens are predicted, by the size of a chunk.

The machine is derived, not measured (docs/simulator.md). All have our pool, load accounting and models.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from statistics import fmean

from benchmarks.conductor.bed import Bed
from benchmarks.report import Row
from moonpool.disagg_proxy.tools.simulator.cluster import ClusterSettings
from moonpool.disagg_proxy.tools.simulator.faults import Act, ClusterEvent
from moonpool.disagg_proxy.tools.simulator.machine import MACHINES
from moonpool.disagg_proxy.tools.simulator.results import Slo, quantile
from moonpool.disagg_proxy.tools.simulator.runs import Run

RIVALS = ("dynamo_cost", "min_ttft")
POLICIES = ("conductor", *RIVALS)
AT_MOST = 0.95  # of each rival's mean
WORKS = (("conversation", 4.0), ("conversation", 2.0), ("synthetic", 2.0))
CHUNKS = (512, 2048, 8192)
ENGINES = 8
SEEDS = 3
SLOWER = 4.0
SETTLED_S, WATCHED_S = 20.0, 60.0
SLOWED_AT_MOST = 1.2


def rows(bed: Bed) -> list[Row]:
    found = [row for trace, speed in WORKS for row in _times(bed, trace, speed)]
    return [*found, _slowed(bed), *(_predicted(bed, chunk) for chunk in CHUNKS)]


def _fleet(chunk_tokens: int = CHUNKS[-1]) -> ClusterSettings:
    return ClusterSettings(whole=ENGINES, machine=MACHINES["h100_fp8"], chunk_tokens=chunk_tokens)


def _times(bed: Bed, trace: str, speed: float) -> list[Row]:
    """Of first tokens, and of those after them."""
    seeds = bed.seeds(SEEDS)
    plans = [
        bed.plan(trace, _fleet(), policy, speed=speed, seed=seed) for policy in POLICIES for seed in seeds
    ]
    runs = bed.simulate(f"whole engines, {trace}, {speed:g}x", plans)
    what = (
        f"whole engines, {trace}, {speed:g}x [{bed.requests(trace):,} requests, {ENGINES} of h100_fp8, "
        f"{len(seeds)} seed{'s' * (len(seeds) > 1)}]"
    )
    ttft_s = _means([run.results.ttft_mean_s for run in runs], len(seeds))
    gap_s = _means([run.results.gap_mean_s for run in runs], len(seeds))
    ideal_s = bed.ideal_prefill_s(trace, MACHINES["h100_fp8"])
    return [
        _row(bed, f"mean TTFT, {what}", ttft_s, ideal_s, AT_MOST),
        _row(bed, f"mean time per token, {what}", gap_s, None, 1.0),
    ]


def _row(bed: Bed, work: str, means: list[float], limit: float | None, at_most: float) -> Row:
    ours, *rivals = means
    met = all(ours <= at_most * rival for rival in rivals)
    peers: dict[str, float | str] = dict(zip(RIVALS, rivals, strict=True))
    return Row(work, ours, "s", peers, limit, f"<= {at_most:g}x both", bed.judged(met))


def _means(values: list[float], seeds: int) -> list[float]:
    """One for each policy, in whose order the values are."""
    return [fmean(values[at : at + seeds]) for at in range(0, len(values), seeds)]


def _slowed(bed: Bed) -> Row:
    """An engine slows down in the middle: first tokens of the minute that begins SETTLED_S later, beside
    those of the same minute where none does."""
    (trace, speed), seeds = WORKS[0], bed.seeds(SEEDS)
    middle = next(islice(bed.trace(trace).rows, bed.requests(trace) // 2, None))
    slow = ClusterEvent(middle.at_s / speed, Act.SLOW, "whole-1", SLOWER)
    plans = [
        bed.plan(trace, _fleet(), policy, speed=speed, seed=seed) for policy in POLICIES for seed in seeds
    ]
    well = bed.simulate("whole engines, all as fast", plans[: len(seeds)])
    runs = bed.simulate("whole engines, one slower", [replace(plan, faults=(slow,)) for plan in plans])
    from_s = slow.at_s + SETTLED_S
    ours, *rivals = _means([_p99_s(run, from_s) for run in runs], len(seeds))
    as_before = fmean(_p99_s(run, from_s) for run in well)
    return Row(
        f"p99 TTFT {SETTLED_S:g} to {SETTLED_S + WATCHED_S:g} s after one of {ENGINES} whole engines "
        f"slows down {SLOWER:g} times, {trace}, {speed:g}x [{len(seeds)} seed{'s' * (len(seeds) > 1)}]",
        ours,
        "s",
        dict(zip(RIVALS, rivals, strict=True)),
        as_before,
        f"<= {SLOWED_AT_MOST:g}x as if none had",
        bed.judged(ours <= SLOWED_AT_MOST * as_before),
    )


def _p99_s(run: Run, from_s: float) -> float:
    times_s = zip(run.results.arrived_s, run.results.ttft_s, strict=True)
    return quantile(sorted(ttft for at, ttft in times_s if from_s <= at < from_s + WATCHED_S), 0.99)


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
