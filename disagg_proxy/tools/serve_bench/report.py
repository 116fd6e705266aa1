"""The figures of a load, beside those of its baseline: for people, and as JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NamedTuple

from rich.table import Table

from moonpool.disagg_proxy.tools.replay.results import Results
from moonpool.disagg_proxy.tools.simulator.report import numbers
from moonpool.disagg_proxy.tools.simulator.results import Slo


class Figures(NamedTuple):
    """Of one load. Seconds from sending; tokens a second over the whole time. cached_share: of the prompt
    tokens of answers that report it, NaN where none does; reusable_share: what caches without end would have.
    """

    sent: int
    answered: int
    refused: int
    failed: int
    cut: int
    seconds: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    cached_share: float
    reusable_share: float

    @classmethod
    def of(cls, results: Results) -> Figures:
        """Sorts the times of all requests."""
        found = results.summary(Slo.of(0, 0))
        seconds = found.seconds or math.nan
        return cls(
            sent=found.sent,
            answered=found.answered,
            refused=found.refused,
            failed=found.failed,
            cut=found.cut,
            seconds=found.seconds,
            ttft_p50_s=found.ttft_p50_s if found.answered else math.nan,
            ttft_p90_s=found.ttft_p90_s if found.answered else math.nan,
            ttft_p99_s=found.ttft_p99_s if found.answered else math.nan,
            prompt_tokens_per_s=results.prompt_tokens / seconds,
            answer_tokens_per_s=found.answer_tokens / seconds,
            cached_share=found.hits,
            reusable_share=found.reusable,
        )


# Name, field, format, whether less is better; None: no ratio.
_ROWS: tuple[tuple[str, str, str, bool | None], ...] = (
    ("TTFT p50 s", "ttft_p50_s", ".4f", True),
    ("TTFT p90 s", "ttft_p90_s", ".4f", True),
    ("TTFT p99 s", "ttft_p99_s", ".4f", True),
    ("prompt tokens/s", "prompt_tokens_per_s", ",.0f", False),
    ("answer tokens/s", "answer_tokens_per_s", ",.1f", False),
    ("cached share", "cached_share", ".1%", None),
    ("reusable share", "reusable_share", ".1%", None),
    ("seconds", "seconds", ".1f", True),
)


def table(name: str, results: Results, baseline: tuple[str, Results] | None) -> Table:
    """name: heading of the results' column; baseline: the same of what it is compared with."""
    made = Table()
    found = Figures.of(results)
    columns = [(name, results, found)]
    if baseline is not None:
        columns.append((*baseline, Figures.of(baseline[1])))
    made.add_column("")
    for heading, _, _ in columns:
        made.add_column(heading, justify="right", overflow="fold")
    if baseline is not None:
        made.add_column("better by", justify="right")
    made.add_row("requests answered", *(f"{each.answered:,} of {each.sent:,}" for _, _, each in columns))
    for label, field, form, _ in _ROWS:
        values = [_text(getattr(each, field), form) for _, _, each in columns]
        ratio = [] if baseline is None else [_text(ratios(found, columns[1][2]).get(field), ".2f", "x")]
        made.add_row(label, *values, *ratio)
    if any(each.refused or each.failed for _, _, each in columns):
        made.add_row("errors", *(_errors(each) for _, each, _ in columns))
    return made


def ratios(found: Figures, baseline: Figures) -> dict[str, float]:
    """How many times better than the baseline, by field; what cannot be divided is left out."""
    made = {}
    for _, field, _, less_is_better in _ROWS:
        if less_is_better is not None:
            ours, theirs = getattr(found, field), getattr(baseline, field)
            above, below = (theirs, ours) if less_is_better else (ours, theirs)
            if below > 0 and above >= 0:
                made[field] = above / below
    return made


def as_json(results: Results, baseline: Results | None, about: dict[str, Any]) -> str:
    """about: target and shape. NaN becomes null."""
    found = Figures.of(results)
    made = {**about, "measured": _object(found, results)}
    if baseline is not None:
        other = Figures.of(baseline)
        made |= {"baseline": _object(other, baseline), "ratios": numbers(ratios(found, other))}
    return json.dumps(made, indent=1)


def _object(figures: Figures, results: Results) -> dict[str, Any]:
    return {
        **numbers(figures._asdict()),
        "refused_by_reason": dict(results.refused),
        "failed_by_reason": dict(results.failed),
    }


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None or math.isnan(value) else f"{value:{form}}{unit}"


def _errors(results: Results) -> str:
    reasons: Counter[str] = results.refused + results.failed
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(8)) or "-"
