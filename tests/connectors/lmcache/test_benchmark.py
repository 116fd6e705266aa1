"""What benchmarks/lmcache_vs_peers makes of figures."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BYTES = 10**9


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """rows({backend: (store s, retrieve s)}) -> the table for a prompt of 1 GB."""
    monkeypatch.syspath_prepend(str(ROOT))
    bench = importlib.import_module("benchmarks.lmcache_vs_peers")

    def table(seconds: dict[str, tuple[float, float]], part: str = "remote") -> Any:
        run = bench.Run(Path(), Path(), None, ExitStack(), bench.PARTS[part])
        run.prompt_bytes = BYTES
        for name, (store, retrieve) in seconds.items():
            run.passes[name] = bench.Passes()
            for what, s in (
                ("store", store),
                ("retrieve", retrieve),
                ("returned", s_of(store)),
                ("lookup", 1e-3),
            ):
                run.passes[name].seconds[what] = [s, s, 100.0]  # a median minds no outlier
        return list(bench.rows(run))

    def s_of(store: float) -> float:
        return store / 2

    return table


def test_figures_are_medians_beside_all_peers(rows: Any) -> None:
    store, retrieve, returned, lookup = rows({"ours": (0.5, 0.25), "fs": (2, 4), "in_process": (0.4, 0.2)})
    assert (store.ours, store.peers["fs"], store.limit, store.met) == (2, 0.5, 2.5, True)
    assert (retrieve.ours, retrieve.peers["fs"], retrieve.limit, retrieve.met) == (4, 0.25, 5, True)
    assert store.peers["lm"] == store.peers["mooncakestore"] == "not run"
    assert (returned.ours, returned.unit, returned.met) == (250, "ms", None)
    assert (lookup.ours, lookup.limit) == (1, 1)


@pytest.mark.parametrize(
    ("seconds", "met"),
    [
        ({"ours": (1 / 1.5, 0.4), "lm": (4, 4)}, [True, True]),
        ({"ours": (1 / 1.4, 0.41), "lm": (4, 4)}, [False, False]),
        ({"ours": (1 / 1.4, 0.41), "lm": (4, 4), "in_process": (1 / 1.3, 0.5)}, [True, True]),  # the bound
        ({"ours": (0.5, 0.2), "lm": (0.9, 0.39)}, [False, False]),  # not twice the best
        ({"ours": (0.5, 0.2)}, [None, None]),  # nobody to compare with
        ({"ours": (1, 1)}, [False, False]),
    ],
)
def test_targets(rows: Any, seconds: dict[str, tuple[float, float]], met: list[bool | None]) -> None:
    assert [row.met for row in rows(seconds)[:2]] == met


def test_the_adapters_have_two_forms_and_no_multiple(rows: Any) -> None:
    table = rows({"ours": (0.5, 0.3), "native": (0.7, 0.25), "fs": (0.4, 0.2)}, "l2")
    assert [row.met for row in table] == [True, True, None, None, False, True, None, None]
    assert "native" in table[4].work
    assert table[4].peers == {"fs": 2.5, "fs_native": "not run"}
