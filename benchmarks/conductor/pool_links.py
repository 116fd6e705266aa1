"""What the network of the pool changes: first tokens where blocks of other engines cost more or less to fetch
than to compute. With a fast pool a prefix is nearly the same everywhere, and requests go by load; with a slow
one they go where their prefix lies. Engines serve requests whole: hand-overs from prefill to decode of this
trace need more than these links have.

The machine is derived, not measured (docs/simulator.md). All have our pool, load accounting and models.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from benchmarks.conductor.bed import Bed
from benchmarks.report import Row
from moonpool.disagg_proxy.tools.simulator.cluster import ClusterSettings
from moonpool.disagg_proxy.tools.simulator.machine import MACHINES
from moonpool.disagg_proxy.tools.simulator.results import Slo

RIVALS = ("dynamo_cost", "min_ttft", "load_balancing")
GBIT_S = (1, 10, 100)
SPEED = 4.0
SEEDS = 3
FLEET = ClusterSettings(whole=8, machine=MACHINES["h100_fp8"], chunk_tokens=8192)


def rows(bed: Bed) -> list[Row]:
    return [_row(bed, gbit_s) for gbit_s in GBIT_S]


def _row(bed: Bed, gbit_s: int) -> Row:
    seeds = bed.seeds(SEEDS)
    machine = replace(FLEET.machine, link_bytes_s=gbit_s * 1e9 / 8)
    cluster = replace(FLEET, machine=machine)
    plans = [
        bed.plan("conversation", cluster, policy, speed=SPEED, seed=seed)
        for policy in ("conductor", *RIVALS)
        for seed in seeds
    ]
    runs = bed.simulate(f"pool at {gbit_s} Gbit/s", plans)
    means = [
        fmean(run.results.ttft_mean_s for run in runs[at : at + len(seeds)])
        for at in range(0, len(runs), len(seeds))
    ]
    found = [run.results.summary(Slo()) for run in runs[: len(seeds)]]
    own, fetched = fmean(each.own for each in found), fmean(each.fetched for each in found)
    ours, *rivals = means
    peers: dict[str, float | str] = dict(zip(RIVALS, rivals, strict=True))
    return Row(
        f"mean TTFT, pool at {gbit_s} Gbit/s, conversation, {SPEED:g}x [{bed.requests('conversation'):,} "
        f"requests, 8 whole of h100_fp8, {len(seeds)} seed{'s' * (len(seeds) > 1)}; tokens found {own:.0%} "
        f"in the own cache, {fetched:.0%} fetched]",
        ours,
        "s",
        peers,
        bed.ideal_prefill_s("conversation", machine),
        "below all",
        bed.judged(all(ours < rival for rival in rivals)),
    )
