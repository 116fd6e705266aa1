"""One form for every benchmark's result: rows, a table of them, and JSON.

python -m benchmarks.report FILE.json...     the same rows as Markdown tables, for RESULTS.md
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

from moonpool.core.bench.report import Column, table

MORE_IS_BETTER = ("GB/s", "x", "%")
NOT_RUN = "not run"  # in the place of a peer's figure
TABLE_WIDTH_MIN = 170  # also where the output is a file


@dataclass(frozen=True)
class Row:
    """work: what was done, with its working set. ours: the median. peers: name -> median, or "not run".
    limit: what the machine itself can do, in the same unit. target: in words. met: None where there is no
    target or it could not be judged.
    """

    work: str
    ours: float
    unit: str
    peers: dict[str, float | str]
    limit: float | None
    target: str
    met: bool | None


def write_json(path: Path | None, rows: list[Row]) -> None:
    """path: None for nowhere."""
    if path is not None:
        path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def read_json(path: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def number(value: float) -> str:
    """Three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def times(row: Row, other: float) -> str:
    """How many times better ours is than ``other``."""
    if row.ours <= 0 or other <= 0:
        return "-"
    factor = row.ours / other if row.unit in MORE_IS_BETTER else other / row.ours
    return f"{factor:.3g}x"


def verdict(row: Row) -> str:
    if not row.target:
        return ""
    return {True: "met", False: "MISSED", None: "not judged"}[row.met]


def print_table(title: str, rows: list[Row], limit_name: str = "") -> None:
    """Beside each other's figure, in brackets: how many times better ours is."""
    color = {True: "green", False: "red", None: "yellow"}
    columns = [
        Column("work [working set]", lambda row: Text(row.work), "left"),
        Column("ours", lambda row: number(row.ours)),
        Column("unit", lambda row: row.unit, "left"),
        *(Column(name, lambda row, name=name: beside(row, row.peers.get(name))) for name in rows[0].peers),
        *([Column(limit_name, lambda row: beside(row, row.limit))] if limit_name else []),
        Column("target", lambda row: row.target, "left"),
        Column("", lambda row: Text(verdict(row), color[row.met]), "left"),
    ]
    wide = max(Console().width, TABLE_WIDTH_MIN)
    Console(width=wide).print(table(columns, rows, title))


def beside(row: Row, other: float | str | None) -> str:
    if other is None or isinstance(other, str):
        return other or ""
    return f"{number(other)} ({times(row, other)})"  # a whole number, too, as JSON has it


def markdown(rows: list[Row]) -> str:
    """As print_table, without colours; a table for each set of peers."""
    tables = [list(group) for _, group in groupby(rows, key=lambda row: list(row.peers))]
    return "\n\n".join(map(markdown_table, tables))


def markdown_table(rows: list[Row]) -> str:
    peers = list(rows[0].peers)
    lines = [
        ["work [working set]", "ours", "unit", *peers, "limit", "target", ""],
        ["---", "--:", "---", *["--:"] * (len(peers) + 1), "---", "---"],
    ]
    for row in rows:
        others = [beside(row, other) for other in [*row.peers.values(), row.limit]]
        lines.append([row.work, number(row.ours), row.unit, *others, row.target, verdict(row)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print("\n\n".join(markdown(read_json(Path(name))) for name in sys.argv[1:]))
