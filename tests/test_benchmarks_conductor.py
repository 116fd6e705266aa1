"""The machinery of conductor_vs_rivals, on traces small enough for a test."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """load("conductor.bed") imports a module of this checkout's benchmarks."""
    monkeypatch.syspath_prepend(str(ROOT))

    def module(name: str) -> ModuleType:
        return importlib.import_module(f"benchmarks.{name}")

    return module


@pytest.fixture
def made(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> Any:
    """A Bed of two small traces in the place of the published ones."""
    bed = load("conductor.bed")
    sums = {}
    for name in bed.SHA256:
        rows = []
        for number in range(150):
            blocks = [0, *(1000 * rng.randrange(40) + place for place in range(rng.randrange(1, 12)))]
            rows.append(
                {
                    "timestamp": 300 * number,
                    "input_length": 512 * len(blocks) - 7,
                    "output_length": rng.randrange(1, 80),
                    "hash_ids": blocks,
                }
            )
        path = tmp_path / f"{name}_trace.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        sums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(bed, "SHA256", sums)
    return bed.Bed(tmp_path, quick=True, processes=1)


def test_every_row_of_a_quick_run_has_its_figures(load: Any, made: Any) -> None:
    for part in ("first_token", "end_to_end", "overload", "hit_rate"):
        for row in load(f"conductor.{part}").rows(made):
            json.dumps(
                asdict(row), allow_nan=part == "overload"
            )  # a load that never moves correlates with nothing
            assert "[" in row.work


def test_the_capacity_of_ours_counts_what_it_refuses(
    load: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("conductor.capacity"), "RIVALS", {"round_robin/local": 2.6})
    (row,) = load("conductor.capacity").rows(made)
    assert row.met is None  # a part of a trace is not the whole
    assert row.ours >= 0.9 * row.peers["round_robin"] > 0


def test_a_trace_that_is_not_the_published_one_is_refused(load: Any, made: Any, tmp_path: Path) -> None:
    bed = load("conductor.bed")
    (tmp_path / "synthetic_trace.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="is not the published trace"):
        bed.Bed(tmp_path, quick=True, processes=1)
    with pytest.raises(SystemExit, match="it is published at github"):
        bed.Bed(tmp_path / "nowhere", quick=True, processes=1)


def test_the_command_says_where_the_traces_are() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MOONPOOL_TRACES"}
    command = [sys.executable, "-m", "benchmarks.conductor_vs_rivals"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "github.com/kvcache-ai/Mooncake" in done.stderr
