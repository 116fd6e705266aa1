"""What a bench shows: a line each second, a table at the end, JSON on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from moonpool.core.config.units import format_size
from moonpool.core.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from moonpool.core.bench import store, transfer

WIDTH = 110  # of what goes to a file; a terminal has its own


class Ticker:
    """The line each second: a terminal sees it change in place, a file gets one after the other."""

    def __init__(self, console: Console, label: str, bytes_per_operation: int) -> None:
        self._console = console
        self._label = label
        self._bytes = bytes_per_operation
        self._seen = (0.0, 0)

    def __call__(self, seconds: float, operations: int) -> None:
        """Shows the rate since the call before. seconds, operations: both since the beginning."""
        before_s, before = self._seen
        self._seen = seconds, operations
        rate = (operations - before) / max(seconds - before_s, 1e-9)
        moved = f"{rate * self._bytes / 1e9:8.3f} GB/s  " if self._bytes else ""
        line = f"{self._label}  {seconds:5.1f} s  {moved}{rate:12,.0f} operations/s"
        if self._console.is_terminal:
            self._console.print(line, end="\r", highlight=False)
        else:
            self._console.print(line, highlight=False, soft_wrap=True)

    def clear(self) -> None:
        """Erases the line, so that a table can follow; on a terminal only, a file keeps its lines."""
        if self._console.is_terminal:
            self._console.control(_erase_line())


class Column(NamedTuple):
    """One column of a table: its heading, how a row's cell is made, and how the cells are aligned."""

    heading: str
    text: Callable[[Any], Any]  # of the row: a str, or a rich Text
    justify: Literal["left", "right"] = "right"


def rails_text(row: transfer.Row) -> str:
    """ "mlx5_0:1 60 %, mlx5_1:1 40 %"; of each that failed or is not up, how often and why."""
    total = sum(rail.bytes for rail in row.rails) or 1
    said = []
    for rail in row.rails:
        notes = [f"{rail.faults} faults"] if rail.faults else []
        notes += [f"{rail.state}: {rail.why}"] if rail.why else []
        said.append(
            f"{rail.port} {100 * rail.bytes / total:.0f} %" + (f" ({'; '.join(notes)})" if notes else "")
        )
    return ", ".join(said)


TRANSFER = (
    Column("size", lambda row: format_size(row.size)),
    Column("transport", lambda row: row.transport),
    Column("GB/s", lambda row: f"{row.gb_per_s:.3f}"),
    Column("ops/s", lambda row: f"{row.operations_per_s:,.0f}"),
    Column("p50 us", lambda row: f"{row.p50_us:,.1f}"),
    Column("p99 us", lambda row: f"{row.p99_us:,.1f}"),
    Column("CPU s/GB", lambda row: f"{row.cpu_s_per_gb:.3f}"),
    Column("peer's", lambda row: f"{row.peer_cpu_s_per_gb:.3f}"),
    Column("verified", lambda row: format_size(row.verified_bytes) if row.verified_bytes else "-"),
    Column("rails", rails_text, "left"),
)

STORE = (
    Column("verb", lambda row: row.verb),
    Column("size", lambda row: format_size(row.size)),
    Column("keys/s", lambda row: f"{row.keys_per_s:,.0f}"),
    Column("GB/s", lambda row: f"{row.gb_per_s:.3f}" if row.gb_per_s else "-"),
    Column("p50 us", lambda row: f"{row.p50_us:,.1f}"),
    Column("p99 us", lambda row: f"{row.p99_us:,.1f}"),
    Column("CPU s/M keys", lambda row: f"{row.cpu_s_per_million:.2f}"),
    Column("node's", lambda row: f"{row.node_cpu_s_per_million:.2f}"),
    Column("verified", lambda row: format_size(row.verified_bytes) if row.verified_bytes else "-"),
)


def columns_of(kind: str, rows: Sequence[transfer.Row | store.Row]) -> list[Column]:
    """kind: transfer or store. What was verified has a column where any bytes were; rails, where any are."""
    empty = set()
    if not any(row.verified_bytes for row in rows):
        empty.add("verified")
    if not any(getattr(row, "rails", ()) for row in rows):
        empty.add("rails")
    columns = TRANSFER if kind == "transfer" else STORE
    return [column for column in columns if column.heading not in empty]


def table(columns: Sequence[Column], rows: Sequence[Any], title: str = "") -> Table:
    """A line for each row. ``benchmarks/`` shows its rows by this, too."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for column in columns:
        made.add_column(column.heading, justify=column.justify, no_wrap=column.justify == "right")
    for row in rows:
        made.add_row(*(column.text(row) for column in columns))
    return made


def write_json(place: str, bench: str, facts: dict[str, Any], rows: Sequence[Any]) -> None:
    """``place``: a file, or - for standard output."""
    document = {"bench": bench, **facts, "rows": [asdict(row) for row in rows]}
    text = json.dumps(document, indent=2) + "\n"
    if place == "-":
        sys.stdout.write(text)
        return
    try:
        Path(place).write_text(text)
    except OSError as error:
        raise InvalidArgument(f"cannot write {place}: {error.strerror}", operation="bench") from error


def _erase_line() -> Any:
    from rich.control import Control
    from rich.segment import ControlType

    return Control((ControlType.ERASE_IN_LINE, 2), ControlType.CARRIAGE_RETURN)
