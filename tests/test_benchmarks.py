"""The benchmarks' own machinery: lost bytes are seen, verdicts are right, a short run gives JSON."""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.soft_card import COMPILER, compile_library

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """load("transfer.cells") imports a module of this checkout's benchmarks."""
    monkeypatch.syspath_prepend(str(ROOT))

    def module(name: str) -> ModuleType:
        return importlib.import_module(f"benchmarks.{name}")

    return module


def test_the_calls_of_a_cell_cover_its_working_set_and_have_no_neighbours(load: Any) -> None:
    for cell in load("transfer.cells").CELLS:
        calls = cell.calls()
        offsets = [offset for call in calls for offset in call]
        assert len(set(offsets)) == len(offsets)
        assert max(offsets) + cell.block <= cell.working_set
        assert max(offsets) > cell.working_set * 0.7
        assert {len(call) for call in calls} == {cell.batch}
        if cell.batch > 1:
            ordered = sorted(calls[0])
            assert all(after - before > cell.block for before, after in pairwise(ordered))


def test_a_byte_that_did_not_arrive_is_seen_and_what_was_compared_is_spoilt(load: Any) -> None:
    memory = load("transfer.memory")
    size, block = 1 << 20, 4096
    source, sink = memory.Region(size), memory.Region(size)
    source.fill("one")
    offsets = [3 * block, 0, 200 * block]

    def check() -> bool:
        pid, checker = os.getpid(), memory.Checker()
        ends = [memory.Blocks(pid, region.address, offsets, block) for region in (source, sink)]
        return bool(checker.check(*ends))

    for offset in offsets:
        ctypes.memmove(sink.address + offset, source.address + offset, block)
    assert check()
    assert bytes(sink.view()[:block]) == bytes([memory.POISON]) * block
    assert bytes(sink.view()[block : 2 * block]) == bytes(block)  # was not moved, and is left alone
    for offset in offsets:
        ctypes.memmove(sink.address + offset, source.address + offset, block)
    sink.view()[201 * block - 1] ^= 1
    assert not check()


def test_the_memory_of_another_process_is_mapped_here(load: Any) -> None:
    memory = load("transfer.memory")
    fd = os.memfd_create("benchmark")
    os.ftruncate(fd, 1 << 20)
    with mmap.mmap(fd, 1 << 20) as shared:
        address = memory.address_of(shared)
        seen = memory.mapped(os.getpid(), address + 4096, 8192)
        shared[4096:4100] = b"here"
        assert seen[:4] == b"here"
    os.close(fd)
    assert memory.mapped(os.getpid(), memory.Region(8192).address, 8192) is None


@pytest.mark.parametrize(
    ("ours", "memcpy", "met"), [(9.1, 10.0, True), (8.9, 10.0, False), (9.1, None, None)]
)
def test_a_row_is_met_by_its_ratio_in_the_better_placement(
    load: Any, ours: float, memcpy: float | None, met: bool | None
) -> None:
    rows, cell = load("transfer.rows"), load("transfer.cells").STREAM[0]

    def passes(gb_s: float) -> dict[str, Any]:
        return {
            cell.name: {
                "together": [{"p50_us": 1 / gb_s, "gb_s": gb_s, "cpu_s_gb": 1.0}] * 3,
                "apart": [{"p50_us": 2 / gb_s, "gb_s": gb_s / 2, "cpu_s_gb": 2.0}] * 3,
            }
        }

    measured = {"ours shm": passes(ours)} | ({"memcpy": passes(memcpy)} if memcpy else {})
    row = next(rows.own(rows.Outcome(measured, {})))
    assert row.ours == ours
    assert row.met is met
    assert row.peers == {"mooncake": "not run", "nixl shm": "not run"}


def test_one_failed_bar_of_several_is_a_miss_and_an_absent_peer_is_no_verdict(load: Any) -> None:
    rows, cells = load("transfer.rows"), load("transfer.cells")
    cell = cells.SINGLE[4 * cells.KIB, cells.SMALL_SET]

    def verdict(**p50_us: float) -> bool | None:
        figures = {"gb_s": 1.0, "cpu_s_gb": 1.0}
        found = {
            name.replace("_", " "): {cell.name: {"free": [{"p50_us": value, **figures}]}}
            for name, value in p50_us.items()
        }
        row = next(rows.tcp(rows.Outcome(found, {})))
        assert row is not None
        return bool(row.met) if row.met is not None else None

    assert verdict(ours_tcp=10, plain=9, mooncake=40, nixl_tcp=20) is True
    assert verdict(ours_tcp=10, plain=8, mooncake=40, nixl_tcp=20) is False
    assert verdict(ours_tcp=10, plain=9) is None
    assert verdict(ours_tcp=10, plain=8) is False


@pytest.mark.parametrize(("more_us", "met"), [(4.9, True), (5.1, False)])
def test_the_drop_in_may_take_5_us_more(load: Any, more_us: float, met: bool) -> None:
    rows, cells = load("transfer.rows"), load("transfer.cells")
    cell = cells.SINGLE[4 * cells.KIB, cells.SMALL_SET]
    took_us = {"ours foreign": 3.0, "drop-in": 3.0 + more_us}
    figures = {"gb_s": 1.0, "cpu_s_gb": 1.0}
    found = {name: {cell.name: {"free": [{"p50_us": value, **figures}]}} for name, value in took_us.items()}
    row = next(rows.drop_in(rows.Outcome(found, {})))
    assert (row.ours, row.peers, row.met) == (3.0 + more_us, {"ours foreign": 3.0}, met)
    rows, cell = load("store.rows"), load("store.workload").CELLS[-1]
    took_us = {"ours": 3.0, "drop-in": 3.0 + more_us}
    found = {name: {cell.name: {"hit": [{"p50_us": value}]}} for name, value in took_us.items()}
    (row,) = rows.drop_in_rows(rows.Outcome(found, {}))
    assert (row.ours, row.peers, row.met) == (3.0 + more_us, {"moonpool": 3.0}, met)


SCRIPTS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "parse_args()" in path.read_text()
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_benchmark_takes_the_same_options(
    load: Any, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        load(name).main()
    told = capsys.readouterr().out
    assert not ended.value.code
    assert all(f"\n  {option}" in told for option in ("--quick", "--peers-venv DIR", "--json FILE")), told


def test_the_benchmark_of_a_card_says_that_it_needs_one(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_engine = load("gpu_engine")
    monkeypatch.setattr(gpu_engine, "first_card", lambda: "libcuda.so.1 was not found")
    monkeypatch.setattr(sys, "argv", ["gpu_engine"])
    with pytest.raises(SystemExit) as ended:
        gpu_engine.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "gpu_engine: it needs a CUDA device (libcuda.so.1 was not found)\n"


def answered(cached: int, seconds: float, tokens: list[int], logprob: float) -> dict[str, Any]:
    """What a driver of gpu_engine says of a prompt of 2,048 tokens with so many loaded."""
    check = {"tokens": tokens, "logprobs": [logprob] * len(tokens)}
    return {
        "pool": {"cached": cached, "first_s": seconds},
        "card": {"cached": 2032, "first_s": 0.010},
        "check": check,
    }


def test_a_hit_on_a_card_counts_when_it_was_whole_and_its_answer_is_the_computed_one(load: Any) -> None:
    gpu = load("gpu_engine")
    bench = gpu.Bench(None, gpu.ON_A_CARD, None, gpu.Clock(60.0))
    bench.figures = {name: gpu.Figures() for name in (gpu.RECOMPUTE, gpu.RING, gpu.PEER)}

    def note(name: str, cached: int, seconds: float, tokens: list[int], logprob: float = -2.0) -> None:
        bench._note(name, 2048, 0, answered(cached, seconds, tokens, logprob), counts=True)

    note(gpu.RECOMPUTE, 0, 0.100, [5, 6])
    note(gpu.RING, 2032, 0.018, [5, 6])
    note(gpu.RING, 2016, 0.011, [5, 6])  # a block was not loaded
    note(gpu.RING, 2032, 0.011, [5, 7])  # another answer
    note(gpu.RING, 2032, 0.011, [5, 6], logprob=-2.5)  # the same answer by other numbers
    note(gpu.PEER, 2032, 0.020, [5, 6])

    row = gpu.rows_of_loads(bench, [gpu.RING])[0]
    assert row.work == "load time 2k [ring, 1 hits, 3 more were wrong: 2016 of 2032 tokens were loaded]"
    assert row.ours == pytest.approx(8.0)
    assert row.peers == {gpu.PEER: pytest.approx(10.0), gpu.PEER_V1: "not run"}
    assert row.met
    assert [other.ours for other in gpu.rows_of_loads(bench, [gpu.PINNED])] == [0.0] * 3


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_an_identity_costs_is_rows(tmp_path: Path) -> None:
    result = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.identity", "--gb", "0.01", "--folder", str(tmp_path)]
    ended = subprocess.run(
        [*command, "--json", str(result)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(result.read_text())["rows"]
    assert [row["unit"] for row in rows] == ["s"] * 5
    assert all(row["ours"] > 0 for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_copies_of_a_card_are_compared_and_are_rows(tmp_path: Path) -> None:
    """On the software device: each kind of copy runs, and the benchmark itself compares the bytes."""
    driver = compile_library(tmp_path)
    words = ["--quick", "--tokens", "32", "--driver", str(driver), "--json", str(tmp_path / "rows.json")]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_copies", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    work = [row["work"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]]
    for kind in ("like layouts", "unlike layouts", "load, ring, tokens first", "load, pinned, heads first"):
        assert any(kind in row for row in work), work


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_what_the_page_costs_is_rows(tmp_path: Path) -> None:
    result = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.page_cost", "--quick", "--json", str(result)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(result.read_text())["rows"]
    assert [row["unit"] for row in rows] == ["us", "us", "ms", "ms"]
    assert all(row["ours"] > 0 for row in rows)


def hostile(result: Path, *words: str) -> list[dict[str, Any]]:
    """The rows of these scenarios in the short form."""
    command = [sys.executable, "-m", "benchmarks.hostile", "--quick", "--json", str(result), *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "left out" not in ended.stdout
    rows: list[dict[str, Any]] = json.loads(result.read_text())["rows"]
    return rows


def missed(rows: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Of counts and bytes: times are no matter of a test."""
    return [
        (row["work"], row["ours"]) for row in rows if row["unit"] not in ("s", "ms") and row["met"] is False
    ]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_hostile_bodies_cost_is_rows(tmp_path: Path) -> None:
    rows = hostile(tmp_path / "rows.json", "--only", "large_bodies")
    assert len(rows) == 2 * (1 + 3 * 6)
    assert {row["unit"] for row in rows} == {"ms", "x bodies", "s"}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_hostile_clients_and_hosts_may_not_do(tmp_path: Path) -> None:
    names = ("tenants", "forged", "killers", "other_hosts", "too_much_memory")
    rows = hostile(tmp_path / "rows.json", "--only", *names)
    assert len(rows) == 3 + 2 + 1 + 2 + 2
    assert missed(rows) == []
    assert [row["work"].endswith(": exit 2") for row in rows[-2:]] == [True, True]


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_other_hostile_scenarios(tmp_path: Path) -> None:
    names = ("held_bodies", "priority", "stopped_engine", "event_flood", "replay_askers", "two_stopped")
    rows = hostile(tmp_path / "rows.json", "--only", *names, "connection_floods", "frozen_threads")
    assert len(rows) == 1 + 1 + 1 + 1 + 1 + 3 + 5 + 4
    assert missed([row for row in rows if row["unit"] != "%"]) == []  # probes in time are a speed, too


def test_nixl_is_taken_out_of_a_venv_alone(load: Any, tmp_path: Path) -> None:
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    nixl_of = load("pd_handover").nixl_of
    assert nixl_of(tmp_path / "venv", tmp_path) is None
    for name in ("nixl", "nixl_cu12.libs", "numpy"):
        (packages / name).mkdir(parents=True)
    (packages / "nixl" / "__init__.py").touch()
    alone = nixl_of(tmp_path / "venv", tmp_path)
    assert sorted(path.name for path in alone.iterdir()) == ["nixl", "nixl_cu12.libs"]
    assert (alone / "nixl" / "__init__.py").exists()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            [
                "benchmarks.transfer_vs_peers",
                "--only",
                "ours shm",
                "ours foreign",
                "drop-in",
                "ours tcp",
                "plain",
            ],
            marks=pytest.mark.heavy,
        ),
        ["benchmarks.store_vs_peers"],
    ],
)
def test_a_quick_run_without_peers_gives_rows(words: list[str], tmp_path: Path) -> None:
    result = tmp_path / "rows.json"
    command = [sys.executable, "-m", *words, "--quick", "--rounds", "1", "--json", str(result)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(result.read_text())["rows"]
    assert len(found) > 20
    for row in found:
        assert set(row) == {"work", "ours", "unit", "peers", "limit", "target", "met"}
        assert row["ours"] > 0
        measured = "plain C++" in row["peers"] or row["work"].startswith("drop-in")
        assert set(row["peers"].values()) <= {"not run"} or measured
    assert any(row["work"].startswith("drop-in") and row["target"] for row in found)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_transfers_beside_each_other_are_rows(tmp_path: Path) -> None:
    result = tmp_path / "rows.json"
    parts = ["--parts", "beside_long_ones,several_connections"]
    command = [sys.executable, "-m", "benchmarks.transfer_shared", *parts, "--quick", "--json", str(result)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(result.read_text())["rows"]
    assert [row["unit"] for row in rows] == ["ms", "x"]
    assert "0 of 20 failed" in rows[0]["work"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_each_path_of_a_machine_is_measured_or_left_out_with_a_reason(tmp_path: Path) -> None:
    result = tmp_path / "rows.json"
    options = ["--dir", str(tmp_path), "--quick", "--json", str(result)]
    command = [sys.executable, "-m", "benchmarks.transfer_paths", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(result.read_text())["rows"]
    for name in ("loopback", "shm", "tcp", "file"):
        assert f"{name}: right bytes in both directions" in ended.stdout
        assert len([row for row in rows if f" by {name} " in row["work"]]) == 6
    assert "cuda_ipc: " in ended.stdout
    assert list(tmp_path.iterdir()) == [result]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_proxys_memory_is_flat() -> None:
    """40,000 requests, in the long form 100,000; a million takes minutes and is run by hand."""
    requests = "100000" if os.environ.get("HEAVY") else "40000"
    command = [sys.executable, "-m", "benchmarks.proxy_soak", "--requests", requests]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("\nflat\n")


def test_hicache_is_judged_by_mooncakes_median_in_the_same_run(load: Any) -> None:
    runs = load("sglang.runs")
    figures = runs.Figures()
    for ours, mooncake in ((6.0, 10.0), (7.0, 11.0), (90.0, 2.0)):
        figures.keep("ours", "hit", {"wall_s": ours})
        figures.keep("mooncake", "hit", {"wall_s": mooncake})
    row = figures.row("a hit", "hit", "wall_s", "ms", 1e3)
    assert (row.ours, row.peers, row.met) == (7000, {"drop-in": "not run", "mooncake": 10000}, True)
    assert figures.row("", "hit", "wall_s", "ms", 1e3, judged=False).met is None
    figures.keep("ours", "hit", {"wall_s": 90.0})
    assert figures.row("a hit", "hit", "wall_s", "ms", 1e3).met is False
    figures.keep("ours", "set", {"wall_s": 1.0})
    assert figures.row("", "set", "wall_s", "ms", 1e3).met is None  # nobody to judge by


def test_the_calls_of_a_hicache_backend_are_noted(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, calls = load("sglang.recorder"), tmp_path / "calls"
    monkeypatch.setenv("MOONPOOL_BENCHMARK_CALLS", str(calls))
    call = recorder.noted("get", lambda keys, slots: [True, True, False], [os.getpid()])
    assert call(["a", "b", "c"], slots=None) == [True, True, False]
    assert recorder.noted("exists", lambda keys: 2, [])(["a", "b"]) == 2
    got, found = map(json.loads, calls.read_text().splitlines())
    assert (got["verb"], got["pages"], found["verb"], found["pages"]) == ("get", 2, "exists", 2)
    assert got["wall_s"] >= 0
    assert got["cpu_s"] >= 0


def test_a_page_of_hicache_has_the_bytes_that_its_row_says(load: Any) -> None:
    shapes = load("sglang.shapes")
    sizes = {shape.name: shape.page_bytes for shape in shapes.SHAPES}
    assert sizes["8 heads of 128"] == 4 << 20
    assert sizes["MLA, 576"] == 16 * 64 * 576 * 2
    assert all(shape.pages * shape.page_bytes >= 64 << 20 for shape in shapes.SHAPES)  # beyond every cache


@pytest.mark.sglang
@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_run_over_sglangs_own_pools_gives_json(tmp_path: Path, sglang_python: str) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.sglang_vs_peers", "--quick", "--parts", "storage"]
    subprocess.run([*command, "--sglang-python", sglang_python, "--json", str(out)], cwd=ROOT, check=True)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 15
    assert all(row["ours"] > 0 and row["peers"]["drop-in"] > 0 for row in rows)
    assert all(row["peers"]["mooncake"] == "not run" and row["met"] is None for row in rows)
