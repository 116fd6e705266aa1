"""The table, the proof, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from chat import Answer
from counters import Counts
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One request: what was asked, what came back, and where each engine that had a part in it says the
    prompt's KV came from; the engine that answered is the last.
    """

    asked: str
    answer: Answer
    parts: Mapping[str, Counts]

    @property
    def answering(self) -> Counts:
        return self.parts[self.answer.engine]

    @property
    def computing(self) -> Counts:
        """Of the engine that computed the prompt: the first."""
        return next(iter(self.parts.values()))

    @property
    def is_apart(self) -> bool:
        return len(self.parts) > 1


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
    for heading in ("prompt", "computed", "own cache", "pool", "handed over", "TTFT"):
        table.add_column(heading, justify="right")
    for number, row in enumerate(rows, 1):
        for name, counts in row.parts.items():
            first, last = counts is row.computing, name == row.answer.engine
            table.add_row(
                str(number) if first else "",
                row.asked if first else "",
                name,
                str(row.answer.prompt_tokens),
                str(counts.computed),
                str(counts.own_cache),
                _seen(counts.pool),
                _seen(counts.handed_over),
                f"{1000 * row.answer.ttft_s:.0f} ms" if last else "",
            )
    console = Console()
    # Not cut off where the output is no terminal (a log, CI).
    (console if console.is_terminal else Console(width=118)).print(table)


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
                "decision": row.answer.decision,
                "parts": [
                    {
                        "engine": name,
                        "computed_tokens": counts.computed,
                        "own_cache_tokens": counts.own_cache,
                        "pool_tokens": counts.pool,
                        "handed_over_tokens": counts.handed_over,
                        "errors": counts.errors,
                    }
                    for name, counts in row.parts.items()
                ],
            }
            for row in rows
        ],
    }
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.rename(path)


def _seen(tokens: int) -> str:
    return f"[bold green]{tokens}[/]" if tokens else "0"
