"""Several proxies in front of the same engines that hear of each other's requests late, beside one that sends
all: how many first tokens come in time.

The machine is derived, not measured (docs/simulator.md). All have our pool, load accounting and models.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from benchmarks.conductor.bed import Bed, set_up
from benchmarks.report import Row
from moonpool.disagg_proxy.tools.simulator.cluster import ClusterSettings
from moonpool.disagg_proxy.tools.simulator.machine import MACHINES
from moonpool.disagg_proxy.tools.simulator.results import Slo

PROXIES, LAG_S = 4, 0.2
SLO_S = 2.0
SEEDS = 3
AT_LEAST = 0.97
RIVAL = "min_ttft"
FLEETS = {
    "4P+4D": set_up(4, 4, "h100_fp8"),
    "8 whole": ClusterSettings(whole=8, machine=MACHINES["h100_fp8"], chunk_tokens=8192),
}
WORKS = (("conversation", 4.0), ("conversation", 6.0), ("synthetic", 4.0))


def rows(bed: Bed) -> list[Row]:
    return [_row(bed, fleet, trace, speed) for fleet in FLEETS for trace, speed in WORKS]


def _row(bed: Bed, fleet: str, trace: str, speed: float) -> Row:
    seeds, slo = bed.seeds(SEEDS), Slo(SLO_S)
    late = replace(FLEETS[fleet], tell_after_s=LAG_S)
    plans = [
        replace(bed.plan(trace, late, policy, speed=speed, seed=seed), proxies=count)
        for policy, count in (("conductor", 1), ("conductor", PROXIES), (RIVAL, PROXIES))
        for seed in seeds
    ]
    good = [
        run.results.summary(slo).good for run in bed.simulate(f"{PROXIES} proxies, {fleet}, {trace}", plans)
    ]
    one, several, rival = (fmean(good[at : at + len(seeds)]) for at in range(0, len(good), len(seeds)))
    return Row(
        f"first tokens within {SLO_S:g} s, {PROXIES} proxies that hear of each other after {LAG_S:g} s, "
        f"{trace}, {speed:g}x [{bed.requests(trace):,} requests, {fleet} of h100_fp8, "
        f"{len(seeds)} seed{'s' * (len(seeds) > 1)}]",
        several,
        "",
        {RIVAL: rival},
        one,
        f">= {AT_LEAST:g}x one proxy",
        bed.judged(several >= AT_LEAST * one),
    )
