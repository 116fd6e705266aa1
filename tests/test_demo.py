"""The demo says "proved" only when it is, and it proves it with real engines."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DEMO))
    return importlib.import_module("main")


def row(demo: ModuleType, engine: str, *, own_cache: int = 0, pool: int = 0, last_token: int = 0) -> object:
    """A request of 100 prompt tokens (three whole blocks) and the demo's number of output tokens."""
    tokens = (*range(demo.OUTPUT_TOKENS - 1), last_token)
    counts = importlib.import_module("counters").Counts(
        prompt=100, own_cache=own_cache, pool=pool, pool_bytes=pool, load_errors=0
    )
    return demo.Row("asked", demo.Answer(engine, "text", tokens, 100, len(tokens), 0.1), counts)


def verdict(demo: ModuleType, computed: object, served: object) -> tuple[bool, bool]:
    """(served from the pool, with the same output)"""
    first, second = demo.Demo._shared("name", computed, served)
    return first.passed, second.passed


def test_the_proof_needs_all_blocks_from_the_pool_and_the_same_output(demo: ModuleType) -> None:
    computed = row(demo, "a")
    assert verdict(demo, computed, row(demo, "b", pool=96)) == (True, True)
    assert verdict(demo, computed, row(demo, "b", pool=96, last_token=1)) == (True, False)
    assert verdict(demo, computed, row(demo, "b", pool=64)) == (False, True)
    assert verdict(demo, computed, row(demo, "b", own_cache=96)) == (False, True)
    assert verdict(demo, row(demo, "a", pool=32), row(demo, "b", pool=96)) == (False, True)


@pytest.mark.parametrize(
    ("served_bytes", "load_errors", "loaded_bytes", "expected"),
    [
        (96 * 4096, 0, 96 * 4096, [True, True]),
        (96 * 4096, 1, 96 * 4096, [False, True]),
        (95 * 4096, 0, 96 * 4096, [True, False]),
        (96 * 4096, 0, 95 * 4096, [True, False]),
    ],
)
def test_the_accounts_of_both_sides_must_agree(
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    served_bytes: int,
    load_errors: int,
    loaded_bytes: int,
    expected: list[bool],
) -> None:
    counts = demo.counters.Counts(200, 0, 96, loaded_bytes, load_errors)
    nothing = dataclasses.replace(counts, pool=0, pool_bytes=0, load_errors=0)
    by_address = {("h", 1): counts, ("h", 2): nothing}
    monkeypatch.setattr(demo.counters, "engine_counts", by_address.__getitem__)
    monkeypatch.setattr(demo.counters, "node_served_bytes", lambda _: served_bytes)
    monkeypatch.setattr(demo.counters, "SETTLED_AFTER_S", 0.0)

    class Cluster:
        engines = {"a": ("h", 1), "b": ("h", 2)}  # noqa: RUF012
        nodes = {"node": ("h", 3)}  # noqa: RUF012

    model = demo.Model("tiny", "float32", 4096, is_local=True)
    checks = demo.Demo(Cluster(), model)._accounts()
    assert [check.passed for check in checks] == expected


@pytest.mark.parametrize(
    ("sent", "expected"), [((300, 100), True), ((400, 0), False), ((200, 100), False), ((300, 101), False)]
)
def test_on_two_nodes_all_of_it_must_have_come_over_tcp_from_both(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, sent: tuple[int, int], expected: bool
) -> None:
    by_address = {("h", 3): sent[0], ("h", 4): sent[1]}
    monkeypatch.setattr(demo.counters, "node_sent_bytes", by_address.__getitem__)

    class Cluster:
        nodes = {"node-a": ("h", 3), "node-b": ("h", 4)}  # noqa: RUF012

    model = demo.Model("tiny", "float32", 4096, is_local=True)
    assert demo.Demo(Cluster(), model)._from_node_to_node(400).passed is expected


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_file_for_up_can_be_meant(demo: ModuleType, runtime_dir: Path, nodes: int) -> None:
    """Each engine joins its own node, and the nodes count as different hosts."""
    from moonpool.core import config, up_plan

    model = demo.Model("tiny", "float32", 4096, is_local=False)
    cluster = importlib.import_module("cluster").Cluster(model, True, nodes)
    try:
        made = config.load(cluster.config, env={})
        assert [bool(engine.node) for engine in made.up.engine] == [nodes == 2] * 2
        plain = [
            config.Engine(command=["x", "{node}"], name=each.name, node=each.node) for each in made.up.engine
        ]
        up = msgspec.structs.replace(made.up, engine=plain)
        plan = up_plan.plan(msgspec.structs.replace(made, up=up), env={})
    finally:
        shutil.rmtree(cluster.folder)
    names = [spec.name for spec in plan.specs]
    if nodes == 1:
        assert names == ["node", "engine-a", "engine-b", "proxy"]
    else:
        assert names == ["master", "node-a", "node-b", "engine-a", "engine-b", "proxy"]
        hosts = {spec.command[spec.command.index("--host-id") + 1] for spec in plan.specs[1:3]}
        assert len(hosts) == 2


def test_counters_are_summed_over_series(demo: ModuleType) -> None:
    samples = {'x_total{a="1",s="p"}': 2.0, 'x_total{a="2",s="q"}': 3.0, "x_total_more": 5.0}
    assert demo.counters.total(samples, "x_total") == 5
    assert demo.counters.total(samples, "x_total", 's="q"') == 3
    assert demo.counters.total(samples, "y_total") == 0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_whole_demo(vllm_python: str, tmp_path: Path, nodes: int) -> None:
    """All in separate processes: what `make demo ONCE=1 NODES=N JSON=FILE` runs."""
    if subprocess.run([vllm_python, "-c", "import moonpool"], check=False).returncode != 0:
        pytest.skip("moonpool is not installed beside this vLLM; `make test` installs it")
    table = tmp_path / "table.json"
    command = [
        vllm_python,
        DEMO / "main.py",
        "--once",
        "--cache",
        tmp_path,
        "--json",
        table,
        "--nodes",
        str(nodes),
    ]
    if not os.path.exists("/dev/nvidia0"):
        command.append("--cpu")
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(result.stdout)
    assert result.returncode == 0
    document = json.loads(table.read_text())
    assert document["passed"]
    first, second = document["requests"][:2]
    assert first["engine"] != second["engine"]
    assert first["output_token_ids"] == second["output_token_ids"]
    assert (first["pool_tokens"], second["own_cache_tokens"]) == (0, 0)
    assert second["pool_tokens"] > 0.9 * second["prompt_tokens"]
    assert not [row for row in document["requests"] if row["load_errors"]]


def test_it_says_why_when_it_cannot_start(tmp_path: Path) -> None:
    """A folder that is no model: one sentence and exit code 2, before anything is started."""
    command = [sys.executable, DEMO / "main.py", "--once", "--cpu", "--cache", tmp_path, "--model", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert f"MODEL={tmp_path} is a folder without config.json" in result.stderr
