"""What is in the pictures of simulations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moonpool.disagg_proxy.tools.simulator import plots, run_plots
from moonpool.disagg_proxy.tools.simulator.cluster import ClusterSettings
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.loads import Loads
from moonpool.disagg_proxy.tools.simulator.results import Results, Slo
from moonpool.disagg_proxy.tools.simulator.runs import Plan, Run
from moonpool.disagg_proxy.tools.simulator.trace import Arrival

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SLO = Slo(1.0, 0.1)


def run_of(
    prefill: int,
    *,
    total: int = 5,
    speed: float = 1.0,
    gap_s: float = 0.05,
    served: int = 10,
    why_not: str = "",
) -> Run:
    """served: all are good where prefill instances are enough. why_not: for one more, that is refused."""
    results = Results()
    for number in range(served):
        job = Job(1, Arrival(float(number), 1000, 5, (1, 2)), own=200, fetched=300)
        job.first_s, job.gap_s, job.predicted_ttft_s = number + 0.3 * total / prefill, gap_s, 0.3
        results.add(job)
    if why_not:
        results.add(Job(1, Arrival(9.0, 1000, 5, (1, 2)), why_not=why_not))
    loads = Loads()
    loads.add(0.5, 0.1, 0.02)
    cluster = ClusterSettings(prefill=prefill, decode=total - prefill)
    return Run(Plan(Path("some.jsonl"), cluster, speed=speed), results, loads, 1.0, 1.0, 1.0, 0)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Gets each figure before it is closed."""
    figures: list[Figure] = []
    as_png = plots.as_png

    def kept(figure: Figure) -> bytes:
        figures.append(figure)
        return as_png(figure)

    monkeypatch.setattr(plots, "as_png", kept)
    return figures


def labels(figure: Figure) -> list[str]:
    return [axes.get_xlabel() for axes in figure.axes]


def panel(figure: Figure, what: str) -> Axes:
    (found,) = (axes for axes in figure.axes if what in axes.get_ylabel() + axes.get_xlabel())
    return found


def test_gaps_and_where_tokens_came_from_are_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    run_plots.draw(tmp_path / "two.png", [run_of(2), run_of(3)], SLO)
    (figure,) = drawn
    (one, _, objective) = panel(figure, "TBT").lines
    assert list(one.get_xdata()) == [50.0] * 10
    assert list(one.get_ydata()) == pytest.approx([(at + 1) / 10 for at in range(10)])
    assert objective.get_xdata()[0] == 100.0
    widths = [bar.get_width() for bar in panel(figure, "share of the prompts").patches]
    assert widths == pytest.approx([0.2, 0.2, 0.3, 0.3, 0.5, 0.5])
    assert figure.get_suptitle() == ""


def test_what_never_happened_has_no_picture(tmp_path: Path, drawn: list[Figure]) -> None:
    run_plots.draw(tmp_path / "a.png", [run_of(2, gap_s=0.0)], SLO)
    run_plots.draw(tmp_path / "b.png", [run_of(2, why_not="ttft")], SLO)
    calm, refusing = drawn
    assert not any("TBT" in label for label in labels(calm))
    assert "refused" not in {axes.get_ylabel() for axes in calm.axes}
    assert max(panel(refusing, "refused").lines[0].get_ydata()) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sweep", [False, True])
def test_all_may_have_been_refused(tmp_path: Path, sweep: bool) -> None:
    path = tmp_path / "none.html"
    run_plots.draw(path, [run_of(2, served=0, why_not="ttft")], SLO, sweep=sweep)
    assert "1 ttft" in path.read_text()


def test_a_sweep_is_drawn_over_the_split(tmp_path: Path, drawn: list[Figure]) -> None:
    """All splits there, and the loads of the best ones: that with room on both sides."""
    runs = [run_of(prefill, speed=speed) for speed in (1.0, 2.0) for prefill in (1, 2, 3, 4)]
    run_plots.draw(tmp_path / "sweep.png", runs, SLO, sweep=True)
    (figure,) = drawn
    good = figure.axes[0]
    assert good.get_ylabel() == "good, %"
    curves = [line for line in good.lines if len(line.get_xdata()) == 4]
    assert [list(line.get_xdata()) for line in curves] == [[1, 2, 3, 4]] * 2
    assert [list(line.get_ydata()) for line in curves] == [[0, 100, 100, 100]] * 2
    assert [axes.get_ylabel() for axes in figure.axes[1:3]] == ["TTFT p90, s", "TBT p90, ms"]
    loads = [axes.get_title() for axes in figure.axes if axes.get_ylabel() == "load"]
    assert [title.partition(":")[0] for title in loads] == ["conductor, 3P+2D, 1x", "conductor, 3P+2D, 2x"]


def test_loads_that_are_not_drawn_are_told(tmp_path: Path, drawn: list[Figure]) -> None:
    runs = [run_of(2, speed=1.0 + number) for number in range(run_plots.LOADS_MAX + 1)]
    run_plots.draw(tmp_path / "many.png", runs, SLO)
    (figure,) = drawn
    assert sum(axes.get_ylabel() == "load" for axes in figure.axes) == run_plots.LOADS_MAX
    assert figure.get_suptitle() == f"loads of the first {run_plots.LOADS_MAX} of {len(runs)} runs"


def test_a_load_says_what_it_is_a_share_of(tmp_path: Path, drawn: list[Figure]) -> None:
    """Without an objective it is 1 at the busiest moment, however idle that is."""
    for slo in (SLO, Slo()):
        run_plots.draw(tmp_path / "load.png", [run_of(2)], slo)
    curves = [panel(figure, "load").lines for figure in drawn]
    assert [(line.get_label(), round(line.get_ydata()[0], 4)) for lines in curves for line in lines] == [
        ("prefill: wait / the objective, 1 s", 0.1),
        ("decode: gap / the objective, 100 ms", 0.2),
        ("prefill: wait / the objective, 30 s", 0.0033),
        ("decode: gap / the longest, 20 ms", 1.0),
    ]
