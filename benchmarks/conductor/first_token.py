"""Mean time to the first token: beside the paper's other schedulers, and beside Dynamo's cost function."""

from __future__ import annotations

from benchmarks.conductor.bed import Bed, set_up
from benchmarks.report import Row

LOCAL, BALANCE, DYNAMO = "min_ttft/local", "load_balancing/local", "dynamo_cost/local"
PAPER_RATIO = 5.27 / 3.58  # load balancing to local cache awareness (FAST '25, figure 5)
PAPER_SPEEDS = [round(1.0 + 0.05 * step, 2) for step in range(11)]
QUICK_SPEED = 1.2  # what a full run finds
SPEEDS = (1.0, 1.5, 2.0)
SYNTHETIC_SPEEDS = (0.75, 1.0)


def rows(bed: Bed) -> list[Row]:
    return [*_schedulers(bed), *_dynamo(bed)]


def paper_speed(bed: Bed) -> float:
    """The first at which load balancing is as much slower than local cache awareness as in the paper:
    ours has no say."""
    if bed.quick:
        return QUICK_SPEED
    for speed in PAPER_SPEEDS:
        plans = [bed.plan("conversation", set_up(8, 8), policy, speed=speed) for policy in (BALANCE, LOCAL)]
        balance, local = [run.results.ttft_mean_s for run in bed.simulate(f"paper's speed? {speed:g}", plans)]
        if balance >= PAPER_RATIO * local:
            return speed
    raise SystemExit("load balancing is never as much slower as in the paper")


def _schedulers(bed: Bed) -> list[Row]:
    at_paper = paper_speed(bed)
    cells = [("conversation", speed) for speed in sorted({at_paper, *SPEEDS})]
    cells += [("synthetic", speed) for speed in SYNTHETIC_SPEEDS]
    policies = ("conductor", LOCAL, BALANCE)
    cluster = set_up(8, 8)
    plans = [bed.plan(name, cluster, policy, speed=speed) for name, speed in cells for policy in policies]
    means = [run.results.ttft_mean_s for run in bed.simulate("schedulers", plans)]
    made = []
    for at, (name, speed) in enumerate(cells):
        ours, local, balance = means[3 * at : 3 * at + 3]
        met: bool | None
        if name == "conversation" and speed == at_paper:
            target = "<= 0.86x local, 0.6x balance (the paper's ratios)"
            met = bed.judged(ours <= 0.86 * local and ours <= 0.6 * balance)
        elif name == "conversation":
            target, met = "below both", ours < min(local, balance)
        else:
            target, met = "ours < local < balance", ours < local < balance
        made.append(
            Row(
                f"mean TTFT, {name}, {speed:g}x [{bed.requests(name):,} requests, 8P+8D, 3 M tokens each]",
                ours,
                "s",
                {"local cache aware": local, "load balancing": balance},
                bed.ideal_prefill_s(name, cluster.machine),
                target,
                met,
            )
        )
    return made


def _dynamo(bed: Bed) -> list[Row]:
    cluster = set_up(4, 4, "h100_fp8")
    policies = ("conductor", DYNAMO, "dynamo_cost")
    plans = [bed.plan("conversation", cluster, policy, speed=4.0) for policy in policies]
    ours, local, pooled = [run.results.ttft_mean_s for run in bed.simulate("beside Dynamo", plans)]
    requests = bed.requests("conversation")
    return [
        Row(
            f"mean TTFT, conversation, 4x [{requests:,} requests, 4P+4D of h100_fp8]",
            ours,
            "s",
            {"dynamo_cost": local, "dynamo_cost and our pool": pooled},
            bed.ideal_prefill_s("conversation", cluster.machine),
            "<= 0.8x dynamo_cost",
            ours <= 0.8 * local,
        )
    ]
