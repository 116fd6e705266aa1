"""Hit rate over capacity, as a table, as JSON and drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from moonpool.disagg_proxy.tools.simulator import plots
from moonpool.disagg_proxy.tools.simulator.eviction.study import CLAIRVOYANT, Question
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS


class Found(NamedTuple):
    """rates: of all prompt tokens, by what was asked."""

    trace: str
    requests: int
    rates: Mapping[Question, float]

    @property
    def capacities(self) -> list[int]:
        """In blocks of BLOCK_TOKENS tokens, the smallest first, each once."""
        return sorted({question.blocks_max for question in self.rates})

    def curves(self) -> dict[str, list[float]]:
        """By cache, in the order of the capacities."""
        curves: dict[str, list[float]] = {}
        for question, rate in sorted(self.rates.items(), key=lambda item: item[0].blocks_max):
            curves.setdefault(question.cache, []).append(rate)
        return {question.cache: curves[question.cache] for question in self.rates}


def table(found: Found) -> Table:
    """One row for each cache, one column for each capacity; the shares have three digits."""
    made = Table(
        caption=f"{found.trace}: share of all prompt tokens found, by blocks of {BLOCK_TOKENS} tokens"
    )
    made.add_column("cache", no_wrap=True)
    for blocks_max in found.capacities:
        made.add_column(f"{blocks_max:,}", justify="right", no_wrap=True)
    for name, rates in found.curves().items():
        made.add_row(name, *(f"{rate:.3f}" for rate in rates))
    return made


def as_json(found: Found) -> str:
    """{"trace", "requests", "block_tokens", "blocks": [capacity, ...], "hit_rate": {cache: [...]}}"""
    return json.dumps(
        {
            "trace": found.trace,
            "requests": found.requests,
            "block_tokens": BLOCK_TOKENS,
            "blocks": found.capacities,
            "hit_rate": {name: [round(rate, 6) for rate in rates] for name, rates in found.curves().items()},
        },
        indent=1,
    )


def draw(path: Path, found: Found) -> None:
    """Writes one curve for each cache, over a logarithmic axis of capacities; .html adds the table, .png does
    not. Raises ConfigError without matplotlib, or when the file cannot be written."""
    with plots.figure(1) as (figure, (axes,)):
        for name, rates in found.curves().items():
            bound = name == CLAIRVOYANT
            axes.plot(
                [max(blocks_max, 1) for blocks_max in found.capacities],
                rates,
                label=name,
                marker=".",
                linestyle="--" if bound else "-",
                color="black" if bound else None,
            )
        axes.set(
            xscale="log", xlabel=f"capacity, blocks of {BLOCK_TOKENS} tokens", ylabel="hit rate, of tokens"
        )
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        picture = plots.as_png(figure)
    head = ("cache", *(f"{blocks_max:,}" for blocks_max in found.capacities))
    rows = [(name, *(f"{rate:.3f}" for rate in rates)) for name, rates in found.curves().items()]
    plots.write(path, f"{found.trace}: hit rate over capacity", head, rows, picture)
