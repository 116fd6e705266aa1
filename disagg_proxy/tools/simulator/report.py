"""A simulation's figures, side by side, for people and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from moonpool.disagg_proxy.tools.simulator.results import Results, Slo, Summary
from moonpool.disagg_proxy.tools.simulator.runs import Plan, Run


def label(plan: Plan) -> str:
    """The difference between this plan and others of the same command."""
    cluster = plan.cluster
    parts = [plan.policy if cluster.pool else f"{plan.policy}/local"]
    if plan.admission is not None:
        parts.append(f"+{plan.admission.value}")
    if plan.queue:
        parts.append("+queue")
    return " ".join(parts)


def instances(plan: Plan) -> str:
    """How many of each kind, such as 10P+6D: P prefill, D decode, W whole; kinds of which there is none are
    left out."""
    cluster = plan.cluster
    counts = ((cluster.prefill, "P"), (cluster.decode, "D"), (cluster.whole, "W"))
    return "+".join(f"{count}{role}" for count, role in counts if count)


def name(plan: Plan) -> str:
    """The label of a curve."""
    return f"{label(plan)}, {instances(plan)}, {plan.speed:g}x"


def table(runs: Sequence[Run], slo: Slo) -> Table:
    """One row for each run."""
    made = Table(caption=f"good: share of all requests within {slo.text}; reused: own cache + fetched")
    made.add_column("policy", no_wrap=True)
    columns = ("inst.", "speed", "TTFT s", "p50", "p90", "p99", "gap ms", "reused %", "refused", "good %")
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        plan, found = run.plan, run.results.summary(slo)
        made.add_row(
            label(plan),
            instances(plan),
            f"{plan.speed:g}",
            *(_seconds(value) for value in _ttft(found)),
            "-" if not found.gap_mean_s > 0 else f"{found.gap_mean_s * 1000:.1f}",
            f"{found.own * 100:.1f} + {found.fetched * 100:.1f}",
            refused(run.results),
            f"{found.good * 100:.1f}",
        )
    return made


def best_splits(runs: Sequence[Run], slo: Slo) -> list[Run]:
    """For each speed and policy the run with most requests within the objective; among equals the one whose
    worse load, first token or gap as a share of its objective, is least."""

    def rank(run: Run) -> tuple[float, float]:
        found = run.results.summary(slo)
        shares = (found.ttft_p90_s / slo.ttft_s, found.gap_p90_s / slo.gap_s)
        return run.results.good(slo), -max(share for share in (*shares, 0.0) if not math.isnan(share))

    groups: dict[tuple[float, str], list[Run]] = {}
    for run in runs:
        groups.setdefault(group(run.plan), []).append(run)
    return [max(each, key=rank) for each in groups.values()]


def group(plan: Plan) -> tuple[float, str]:
    """Speed and policy: splits of a sweep are compared within the same."""
    return plan.speed, label(plan)


def recommendation(best: Run, slo: Slo) -> str:
    """One line for people: the plan, and its share of requests within ``slo``."""
    plan = best.plan
    good = best.results.summary(slo).good
    return f"Best at {plan.speed:g}x under {label(plan)}: {instances(plan)}, {good:.1%} good"


def as_json(runs: Sequence[Run], slo: Slo) -> str:
    """{"slo": {...}, "runs": [{"plan": ..., the fields of Summary, ...}]}; NaN becomes null."""
    return json.dumps({"slo": numbers(slo._asdict()), "runs": [_row(run, slo) for run in runs]}, indent=1)


def _row(run: Run, slo: Slo) -> dict[str, Any]:
    plan, cluster, found = run.plan, run.plan.cluster, run.results.summary(slo)
    return {
        "policy": plan.policy,
        "pool": cluster.pool,
        "admission": plan.admission.value if plan.admission is not None else None,
        "queue": plan.queue,
        "prefill": cluster.prefill,
        "decode": cluster.decode,
        "whole": cluster.whole,
        "speed": plan.speed,
        "seed": plan.seed,
        "copies": plan.copies,
        **numbers(found._asdict()),
        "computed": found.computed,
        "reasons": dict(run.results.reasons),
        "seconds": run.seconds,
        "prefill_busy_s": run.busy_s,
        "sent_bytes": run.sent_bytes,
        "load_correlation": _number(run.loads.correlation()),
        "cpu_s": round(run.cpu_s, 3),
    }


def refused(results: Results) -> str:
    """How many, and why."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(results.reasons.items()))
    return reasons or "0"


def _ttft(found: Summary) -> tuple[float, ...]:
    return (found.ttft_mean_s, found.ttft_p50_s, found.ttft_p90_s, found.ttft_p99_s)


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def numbers(values: dict[str, Any]) -> dict[str, Any]:
    """The same, with null for NaN and infinity, which JSON lacks."""
    return {name: _number(value) for name, value in values.items()}


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
