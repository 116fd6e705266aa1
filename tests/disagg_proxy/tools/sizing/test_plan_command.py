"""`moonpool plan` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool.cli import run as command
from moonpool.disagg_proxy.tools.sizing import report
from moonpool.disagg_proxy.tools.sizing.model import read_model

from ..replay.beds import write_trace
from .models import GEMMA_3, LLAMA_70B


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return str(tmp_path)


def test_figures(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path, (0.0, 1024, 1, [1, 2]), (1.0, 1025, 1, [1, 2, 3]))
    gib = 1 << 30
    arguments = [
        "--gpu",
        "A800",
        "--gpus",
        "8",
        "--efficiency",
        "1",
        "--link",
        "10",
        "--prefix",
        "8192",
        "--pool",
        "100MiB,1GiB",
    ]
    assert command(["plan", model, *arguments, "--trace", str(trace), "--json", "-"]) == 0
    out, shown = capsys.readouterr()
    found = json.loads(out)
    assert (found["kv_bytes_per_token"], found["attention"]) == (327_680, "GQA")
    (row,) = found["prefixes"]
    assert row["bytes"] == 8192 * 327_680
    assert row["fetch_s"] == pytest.approx(row["bytes"] / 10e9)
    assert row["link_bytes_per_second"] == pytest.approx(row["bytes"] / row["compute_s"])
    assert row["link_bytes_per_second"] / 1e9 == pytest.approx(5.16, abs=0.01)
    assert found["pools"] == [
        {"bytes": 100 << 20, "tokens": 0, "hits": 0.0},  # less than a block of the trace
        {"bytes": gib, "tokens": 3072, "hits": 1024 / 2049},
    ]
    assert found["hits_endless"] == 1024 / 2049
    assert "327,680 bytes" in shown
    assert "5.16" in shown
    assert "50.0%" in shown


def test_without_a_trace_there_are_capacities_alone(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", model, "--tflops", "1000", "--efficiency", "0.5", "--dtype", "fp8"]) == 0
    shown = capsys.readouterr().out
    assert "163,840 bytes" in shown
    assert "500 TFLOP/s" in shown
    assert "6,710,784" in shown  # tokens in 1 TiB, in whole blocks
    assert "50% of its peak" in shown


def test_by_default_one_gpu_reaches_half_of_its_peak(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight GPUs at their peak told a newcomer with a small model that fetching never pays."""
    assert command(["plan", model]) == 0
    assert "prefill on 1 x h100 at 50% of its peak" in capsys.readouterr().out


@pytest.mark.parametrize("link", [0.5e9, 1.2e9, 3e9])
def test_a_sentence_says_from_where_fetching_pays(
    model: str, link: float, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tflops", "2000", "--efficiency", "0.5", "--link", f"{link / 1e9:g}"]
    assert command(["plan", model, *arguments]) == 0
    sentence = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Over a link"))
    plan = report.Plan(read_model(LLAMA_70B, "x"), report.Compute("x", 1e15), (), link, ())
    tokens = report.fetch_from_tokens(plan, link)
    if tokens == 0:
        assert "computing beats fetching at every length" in sentence
        assert plan.model.link_bytes_s(report.LONGEST, 1e15) > link
    elif tokens == 1:
        assert "fetching beats computing at every length" in sentence
    else:
        assert f"from {tokens:,} tokens on" in sentence
        assert plan.model.link_bytes_s(tokens, 1e15) <= link < plan.model.link_bytes_s(tokens - 1, 1e15)


def test_windows_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3))
    assert command(["plan", str(tmp_path), "--json", str(tmp_path / "out")]) == 0
    assert "of the last 512" in capsys.readouterr().out
    layers = json.loads((tmp_path / "out").read_text())["layers"]
    assert {(layer["count"], layer["window"]) for layer in layers} == {(2, None), (10, 512)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "tpu"], "--gpu knows"),
        (["--efficiency", "0"], "--efficiency"),
        (["--prefix", "a"], "--prefix takes"),
        (["--prefix", "0"], "positive"),
        (["--pool", "1XB"], "is no size"),
        (["--pool", "0"], "above 0"),
        (["--dtype", "int3"], "--dtype"),
        (["--trace", "nowhere.jsonl"], "cannot be read"),
    ],
)
def test_one_sentence_for_what_is_wrong(
    model: str, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["plan", model, *arguments]) == 2
    assert sentence in capsys.readouterr().err
