"""A replay's figures for people, as JSON, and a line for each request."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import msgspec
from rich.table import Table

from moonpool.disagg_proxy.tools.replay.client import Outcome
from moonpool.disagg_proxy.tools.replay.results import Results, Summary
from moonpool.disagg_proxy.tools.simulator.report import numbers
from moonpool.disagg_proxy.tools.simulator.results import Slo

WARM_SHARE = 0.01  # of the prompt tokens: below that a difference is one of block sizes


def table(results: Results, slo: Slo) -> Table:
    """``rows``, for a console."""
    made = Table(show_header=False)
    made.add_column(no_wrap=True)
    made.add_column()
    for name, text in rows(results, slo):
        made.add_row(name, text)
    return made


def rows(results: Results, slo: Slo) -> list[tuple[str, str]]:
    """(name, text) for people. Refused, failed, cut and late requests have rows only if there are some."""
    found = results.summary(slo)
    made = [
        ("requests", f"{found.sent} sent in {found.seconds:.1f} s, {found.answered} answered"),
        ("TTFT s", _quantiles(found.ttft_mean_s, found.ttft_p50_s, found.ttft_p90_s, found.ttft_p99_s)),
        ("between tokens s", _quantiles(found.gap_mean_s, found.gap_p50_s, found.gap_p90_s, found.gap_p99_s)),
        ("cached", _cached(found)),
        *_warm(found),
        ("good", f"{found.good:.1%} within {slo.text}, {found.good_per_s:.2f} a second"),
    ]
    if found.refused:
        made.append(("refused", f"{found.refused}: {_reasons(results.refused)}"))
    if found.failed:
        made.append(("failed", f"{found.failed}: {_reasons(results.failed)}"))
    if found.cut:
        made.append(("cut by the end", str(found.cut)))
    if results.engines:
        made.append(("engines", _reasons(results.engines)))
    if found.late_p99_s > 0.1:
        made.append(("late", f"99 % were sent at most {found.late_p99_s:.1f} s after they were due"))
    return made


def as_json(results: Results, slo: Slo, about: dict[str, Any]) -> str:
    """about: the trace and the URLs of the replay. NaN becomes null."""
    found = results.summary(slo)
    return json.dumps(
        {
            **about,
            "slo": numbers(slo._asdict()),
            **numbers({**found._asdict(), "hits": found.hits}),
            "refused_by_reason": dict(results.refused),
            "failed_by_reason": dict(results.failed),
            "answers_by_engine": dict(results.engines),
        },
        indent=1,
    )


def line(outcome: Outcome) -> bytes:
    """One request as JSON, without its gaps."""
    return msgspec.json.encode(
        {
            "number": outcome.number,
            "ended": outcome.ended.value,
            "why": outcome.why,
            "at_s": round(outcome.at_s, 6),
            "sent_s": round(outcome.sent_s, 6),
            "end_s": round(outcome.end_s, 6),
            "ttft_s": round(outcome.ttft_s, 6),
            "gap_s": round(outcome.mean_gap_s, 6),
            "gap_tail_s": round(outcome.tail_gap_s, 6),
            "input_tokens": outcome.input_tokens,
            "reusable": outcome.reusable,
            "prompt_tokens": outcome.prompt_tokens,
            "cached_tokens": outcome.cached_tokens,
            "answer_tokens": outcome.answer_tokens,
            "engine": outcome.engine,
        }
    )


def _cached(found: Summary) -> str:
    if not found.told:
        return "no engine that computed prompts told (vLLM does with --enable-prompt-tokens-details)"
    return (
        f"{found.hits:.1%} of {found.prompt_tokens} prompt tokens; caches without end would have "
        f"{found.reusable:.1%}"
    )


def _warm(found: Summary) -> list[tuple[str, str]]:
    """A row where the engines had more cached than this replay's own prompts can have left there."""
    if not found.told or found.hits <= found.reusable + WARM_SHARE:
        return []
    return [
        ("warm", "the caches held these prompts already, of an earlier replay; another --seed shares none")
    ]


def _quantiles(mean: float, p50: float, p90: float, p99: float) -> str:
    if math.isnan(mean):
        return "-"
    return f"mean {mean:.4f}, p50 {p50:.4f}, p90 {p90:.4f}, p99 {p99:.4f}"


def _reasons(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common(8))
