"""The drawing of a replay, as one HTML page without external resources: its table, the distribution of TTFT,
and the TTFT of each request over time."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.replay import report
from moonpool.disagg_proxy.tools.replay.results import Results
from moonpool.disagg_proxy.tools.simulator.results import Slo

WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 16, 40
POINTS_MAX = 4_000  # of a drawing
_STYLE = (
    ":root{color-scheme:light dark}body{font:14px system-ui;margin:2em;max-width:60em}"
    "td{padding:.2em .8em .2em 0;vertical-align:top}svg{max-width:100%;height:auto}"
    "svg text{font:12px system-ui;fill:currentColor}.axis{stroke:currentColor;opacity:.25}"
    ".line{fill:none;stroke:#2a78d6;stroke-width:1.5}.dot{fill:#2a78d6;opacity:.55}"
    ".bad{stroke:#d03b3b;stroke-width:1.5}.slo{stroke:currentColor;opacity:.6;stroke-dasharray:4 4}"
)

_bad = partial(ConfigError, operation="replay")


def check(path: Path) -> None:
    """Raises ConfigError before the replay, not after."""
    if path.suffix != ".html":
        raise _bad(f"a replay is drawn to an .html file, not {path}")
    if not path.absolute().parent.is_dir():
        raise _bad(f"the folder of {path} does not exist")


def draw(path: Path, title: str, results: Results, slo: Slo) -> None:
    """Writes the page. Raises ConfigError when the file cannot be written."""
    try:
        path.write_text(page(title, results, slo))
    except OSError as error:
        raise _bad(f"the plot cannot be written to {path}: {error}") from error


def page(title: str, results: Results, slo: Slo) -> str:
    """The whole HTML. slo: a dashed line in the drawing, and the measure of the table. A drawing shows at
    most POINTS_MAX answers."""
    cells = "".join(
        f"<tr><td>{html.escape(name)}<td>{html.escape(text)}" for name, text in report.rows(results, slo)
    )
    title = html.escape(title)
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        f"<table>{cells}</table><h2>Share of the answers with a first token within</h2>"
        f"{_spread(results, slo)}<h2>First token of each request, by when it was due</h2>"
        f"{_over_time(results, slo)}<p>A red tick: refused or failed. Dashed: the objective.</p>\n"
    )


def _spread(results: Results, slo: Slo) -> str:
    ttft_s = sorted(results.ttft_s)
    if not ttft_s:
        return "<p>No request was answered.</p>"
    x, marks = _logarithmic(ttft_s[0], ttft_s[-1], LEFT, WIDTH - RIGHT)
    step = -(-len(ttft_s) // POINTS_MAX)
    points = [
        (x(ttft_s[at]), _height((at + 1) / len(ttft_s)))
        for at in sorted({*range(0, len(ttft_s), step), len(ttft_s) - 1})
    ]
    line = " ".join(f"{left:.1f},{top:.1f}" for left, top in points)
    parts = [_vertical(x(mark), f"{mark:g} s") for mark in marks]
    parts += [_horizontal(_height(share), f"{share:.0%}") for share in (0.0, 0.5, 0.9, 1.0)]
    parts.append(f'<polyline class="line" points="{line}"/>')
    if ttft_s[0] <= slo.ttft_s <= ttft_s[-1]:
        parts.append(_vertical(x(slo.ttft_s), "", kind="slo"))
    return _svg(parts)


def _over_time(results: Results, slo: Slo) -> str:
    times = [*results.at_s, *results.refused_s]
    if not times:
        return "<p>No request ended.</p>"
    last_s = max(max(times), 1e-3)
    low, high = min(results.ttft_s, default=0.01), max(results.ttft_s, default=1.0)
    y, marks = _logarithmic(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_horizontal(y(mark), f"{mark:g} s") for mark in marks]
    parts += [_vertical(_right(mark_s / last_s), f"{mark_s:g} s") for mark_s in round_marks(last_s)]
    step = -(-len(results.at_s) // POINTS_MAX) or 1
    for at in range(0, len(results.at_s), step):
        left, top = _right(results.at_s[at] / last_s), y(results.ttft_s[at])
        parts.append(f'<circle class="dot" cx="{left:.1f}" cy="{top:.1f}" r="2"/>')
    step = -(-len(results.refused_s) // POINTS_MAX) or 1
    for at in range(0, len(results.refused_s), step):
        left = _right(results.refused_s[at] / last_s)
        parts.append(f'<path class="bad" d="M{left:.1f} {HEIGHT - BOTTOM}v-8"/>')
    if low <= slo.ttft_s <= high:
        parts.append(_horizontal(y(slo.ttft_s), "", kind="slo"))
    return _svg(parts)


def _logarithmic(
    low: float, high: float, start: float, end: float
) -> tuple[Callable[[float], float], Sequence[float]]:
    """(where a value lies between start and end, values to mark): 1, 2 and 5 times powers of ten."""
    low = max(low, 1e-6) / 1.05
    high = max(high * 1.05, low * 1.2)
    first, wide = math.log10(low), math.log10(high / low)
    steps = (1, 2, 5) if wide < 3 else (1,)
    found = [step * 10.0**power for power in range(-6, 7) for step in steps]
    marks = [mark for mark in found if low <= mark <= high]

    def place(value: float) -> float:
        return start + (end - start) * (math.log10(max(value, low)) - first) / wide

    return place, marks


def round_marks(last: float) -> list[float]:
    """From 0 to at most ``last``, 3 to 6 of them: multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(last))
    step = next(step * power for step in (0.2, 0.5, 1.0, 2.0) if last / (step * power) <= 5.0)
    return [round(step * part, 9) for part in range(math.floor(last / step + 1e-9) + 1)]


def _right(share: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * share


def _height(share: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share


def _vertical(left: float, text: str, kind: str = "axis") -> str:
    line = f'<path class="{kind}" d="M{left:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
    return f'{line}<text x="{left:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{text}</text>'


def _horizontal(top: float, text: str, kind: str = "axis") -> str:
    line = f'<path class="{kind}" d="M{LEFT} {top:.1f}H{WIDTH - RIGHT}"/>'
    return f'{line}<text x="{LEFT - 8}" y="{top + 4:.1f}" text-anchor="end">{text}</text>'


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'
