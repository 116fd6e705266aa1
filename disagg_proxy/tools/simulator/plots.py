"""Drawings, alone as PNG or with a table in an HTML page; the callers draw the content."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".html")

_bad = partial(ConfigError, operation="simulate")


def check(paths: Sequence[Path]) -> None:
    """Raises ConfigError before hours of simulation, not after."""
    for path in paths:
        if path.suffix not in SUFFIXES:
            raise _bad(f"a plot is a .png or an .html file, not {path}")
        if not path.absolute().parent.is_dir():
            raise _bad(f"the folder of {path} does not exist")
    if paths:
        _pyplot()


@contextmanager
def figure(count: int, columns: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    """``count`` axes, row by row."""
    pyplot = _pyplot()
    rows = -(-count // columns)
    size = (4 + 6 * columns, 1 + 4 * rows)
    made, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    axes = [each for row in grid for each in row]
    for empty in axes[count:]:
        empty.remove()
    try:
        yield made, axes[:count]
    finally:
        pyplot.close(made)


def as_png(made: Figure) -> bytes:
    """110 dots per inch. ``figure`` closes the figure, so draw within it."""
    buffer = io.BytesIO()
    made.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def write(path: Path, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], picture: bytes) -> None:
    """A page with a table for .html, the picture alone for .png."""
    try:
        if path.suffix == ".png":
            path.write_bytes(picture)
        else:
            path.write_text(_page(title, head, rows, picture))
    except OSError as error:
        raise _bad(f"the plot cannot be written to {path}: {error}") from error


def _page(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], picture: bytes) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    title = html.escape(title)
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title>"
        "<style>body{font:14px system-ui;margin:2em}td,th{padding:.2em .8em;text-align:right}"
        "td:first-child,th:first-child{text-align:left}img{max-width:100%}</style>"
        f"<h1>{title}</h1><table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
        f'<img alt="{title}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">\n'
    )


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise _bad("plots need matplotlib; pip install 'moonpool[plots]'") from error
    return pyplot
