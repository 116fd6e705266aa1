"""The table, the proof, and the same as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from chat import Answer
from counters import Counts
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One request: what was asked, what came back, and where the engine says the prompt's KV came from."""

    asked: str
    answer: Answer
    counts: Counts


@dataclass(frozen=True)
class Check:
    """One thing that must hold; ``seen`` is the sentence with the figures."""

    name: str
    passed: bool
    seen: str


def print_table(rows: list[Row]) -> None:
    table = Table(title="Where the prompt's KV cache came from (tokens)")
    table.add_column("#", justify="right")
    table.add_column("request")
    table.add_column("engine")
    for heading in ("prompt", "output", "TTFT", "computed", "own cache", "pool"):
        table.add_column(heading, justify="right")
    for number, row in enumerate(rows, 1):
        pool = f"[bold green]{row.counts.pool}[/]" if row.counts.pool else "0"
        table.add_row(
            str(number),
            row.asked,
            row.answer.engine,
            str(row.answer.prompt_tokens),
            str(row.answer.output_tokens),
            f"{1000 * row.answer.ttft_s:.0f} ms",
            str(row.counts.computed),
            str(row.counts.own_cache),
            pool,
        )
    console = Console()
    # Not cut off where the output is no terminal (a log, CI).
    (console if console.is_terminal else Console(width=110)).print(table)


def print_checks(checks: list[Check]) -> None:
    for check in checks:
        print(f"  {'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.seen}", flush=True)


def write_json(path: Path, rows: list[Row], checks: list[Check], facts: dict[str, object]) -> None:
    """requests, checks and facts; written whole or not at all."""
    document = {
        **facts,
        "passed": all(check.passed for check in checks),
        "checks": [asdict(check) for check in checks],
        "requests": [
            {
                "asked": row.asked,
                "engine": row.answer.engine,
                "prompt_tokens": row.answer.prompt_tokens,
                "output_tokens": row.answer.output_tokens,
                "output_token_ids": row.answer.token_ids,
                "ttft_ms": round(1000 * row.answer.ttft_s, 1),
                "computed_tokens": row.counts.computed,
                "own_cache_tokens": row.counts.own_cache,
                "pool_tokens": row.counts.pool,
                "load_errors": row.counts.load_errors,
            }
            for row in rows
        ],
    }
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.rename(path)
