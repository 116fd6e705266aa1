"""What the simulator itself costs."""

from __future__ import annotations

import resource
import sys
import time

from benchmarks.conductor.bed import Bed, set_up
from benchmarks.report import Row
from moonpool.disagg_proxy.tools.simulator.cluster import ClusterSettings
from moonpool.disagg_proxy.tools.simulator.runs import Plan, simulate

MANY = 1_000_000
MINUTES_MAX = 10  # of CPU: other work on the machine makes the wall clock slower, and that little


def rows(bed: Bed) -> list[Row]:
    made = [_small(bed)]
    return made if bed.quick else [*made, *_large(bed)]


def _small(bed: Bed) -> Row:
    """All of the trace, quick or not."""
    plan = Plan(bed.paths["conversation"], set_up(8, 8))
    seconds = min(simulate(plan, bed.trace("conversation")).cpu_s for _ in range(1 if bed.quick else 3))
    return Row(
        f"simulate {len(bed.trace('conversation')):,} requests, CPU [conversation, 8P+8D, conductor]",
        seconds,
        "s",
        {},
        None,
        "<= 2 s",
        seconds <= 2.0,
    )


def _large(bed: Bed) -> list[Row]:
    """As many copies of the trace as keep 500 prefill instances as busy as 8 are by one."""
    cluster = ClusterSettings(prefill=500, decode=500)
    plan = Plan(bed.paths["conversation"], cluster, copies=84, requests=MANY)
    at_half = 0

    def tell(count: int) -> None:
        nonlocal at_half
        if count % 50_000 == 0:
            print(f"scale: {count:,} of {MANY:,}, {_peak_mib():,} MiB", file=sys.stderr)
        if count <= MANY // 2:
            at_half = _peak_mib()

    began_s = time.monotonic()
    run = simulate(plan, bed.trace("conversation"), tell)
    minutes, cpu_minutes = (time.monotonic() - began_s) / 60, run.cpu_s / 60
    grown = _peak_mib() / at_half
    what = f"[{len(run.results):,} requests, 500P+500D, conductor]"
    return [
        Row(
            f"simulate a large fleet, CPU {what}",
            cpu_minutes,
            "min",
            {},
            None,
            f"<= {MINUTES_MAX} min",
            cpu_minutes <= MINUTES_MAX,
        ),
        Row(f"simulate a large fleet, by the clock {what}", minutes, "min", {}, None, "", None),
        Row(f"peak memory {what}", _peak_mib(), "MiB", {}, None, "second half adds < 10 %", grown < 1.1),
    ]


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
