"""The demo says "proved" only when it is, and it proves it with real engines."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DEMO))
    return importlib.import_module("main")


def row(demo: ModuleType, prompt: int, **parts: dict[str, int]) -> object:
    """A request of ``prompt`` tokens; parts: where each engine that had a part in it took them from."""
    counts = {name: demo.counters.Counts(prompt=prompt, **took) for name, took in parts.items()}
    decision = {"prefill": "prefill" if "prefill" in parts else None}
    answer = demo.Answer(list(parts)[-1], "text", (1, 2), prompt, 2, 0.1, decision)
    return demo.Row("asked", answer, counts)


def test_a_hand_over_is_proved_by_what_both_engines_counted(demo: ModuleType) -> None:
    def proved(prefill: dict[str, int], decode: dict[str, int]) -> bool:
        return bool(demo.handed_over(row(demo, 100, prefill=prefill, decode=decode)).passed)

    assert proved({}, {"handed_over": 99})
    assert not proved({"pool": 32}, {"handed_over": 99})
    assert not proved({}, {"handed_over": 64})
    assert not proved({}, {"own_cache": 64, "handed_over": 35})
    assert not demo.handed_over(row(demo, 100, decode={"handed_over": 99})).passed


def test_a_turn_stayed_when_decode_had_all_blocks_of_the_last_one(demo: ModuleType) -> None:
    before = row(demo, 100, prefill={}, decode={"handed_over": 99})
    assert demo.stayed(row(demo, 150, decode={"own_cache": 96}), before).passed
    assert not demo.stayed(row(demo, 150, decode={"own_cache": 64}), before).passed
    assert not demo.stayed(row(demo, 150, prefill={}, decode={"own_cache": 96}), before).passed


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ({"own_cache": 96, "pool": 64}, {"own_cache": 160, "handed_over": 239}, True),
        ({"own_cache": 160}, {"own_cache": 160, "handed_over": 239}, False),
        ({"own_cache": 64, "pool": 96}, {"own_cache": 160, "handed_over": 239}, False),
        ({"own_cache": 96, "pool": 32}, {"own_cache": 160, "handed_over": 239}, False),
        ({"own_cache": 96, "pool": 64}, {"own_cache": 128, "handed_over": 271}, False),
        ({"own_cache": 96, "pool": 64}, {"own_cache": 160, "handed_over": 200}, False),
    ],
)
def test_the_long_turn_needs_all_four_sources(
    demo: ModuleType, prefill: dict[str, int], decode: dict[str, int], expected: bool
) -> None:
    first, second = row(demo, 100, prefill={}, decode={}), row(demo, 170, decode={})
    third = row(demo, 400, prefill=prefill, decode=decode)
    assert demo.all_four(third, first, second).passed is expected


def test_a_greeting_is_computed_where_it_is_answered(demo: ModuleType) -> None:
    assert demo.not_worth_it(row(demo, 20, decode={})).passed
    assert not demo.not_worth_it(row(demo, 20, prefill={}, decode={"handed_over": 19})).passed


def test_the_pool_is_proved_by_all_whole_blocks(demo: ModuleType) -> None:
    computed = row(demo, 100, prefill={})
    assert demo.from_the_pool(row(demo, 100, decode={"pool": 96}), computed).passed
    assert not demo.from_the_pool(row(demo, 100, decode={"pool": 64}), computed).passed
    assert not demo.from_the_pool(row(demo, 100, decode={"own_cache": 96}), computed).passed
    assert not demo.from_the_pool(
        row(demo, 100, decode={"pool": 96}), row(demo, 100, prefill={"pool": 32})
    ).passed


class OneNode:
    """The cluster as _accounts sees it."""

    engines = {"prefill": ("h", 1), "decode": ("h", 2)}  # noqa: RUF012
    nodes = {"node": ("h", 3)}  # noqa: RUF012
    proxy = ("h", 4)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({}, [True, True, True, True]),
        ({"errors": 1}, [False, True, True, True]),
        ({"served": 95 * 4096}, [True, False, True, True]),
        ({"loaded": 95 * 4096}, [True, False, True, True]),
        ({"handovers": 0}, [True, True, False, True]),
        ({"predictions": (1, 0)}, [True, True, True, False]),
        ({"predictions": (2, 1)}, [True, True, True, False]),
    ],
)
def test_the_accounts_of_all_sides_must_agree(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any], expected: list[bool]
) -> None:
    seen = {"errors": 0, "served": 96 * 4096, "loaded": 96 * 4096, "handovers": 1, "predictions": (2, 0)}
    seen |= figures
    took = demo.counters.Counts(200, pool=96, pool_bytes=seen["loaded"], errors=seen["errors"])
    by_address = {("h", 1): demo.counters.Counts(100), ("h", 2): took}
    monkeypatch.setattr(demo.counters, "engine_counts", by_address.__getitem__)
    monkeypatch.setattr(demo.counters, "node_served_bytes", lambda _: seen["served"])
    monkeypatch.setattr(demo.counters, "proxy_handovers", lambda _: seen["handovers"])
    monkeypatch.setattr(demo.counters, "proxy_predictions", lambda _: seen["predictions"])
    monkeypatch.setattr(demo.counters, "SETTLED_AFTER_S", 0.0)

    shown = demo.Demo(OneNode(), demo.Model("tiny", "float32", 4096, is_local=True))
    shown.rows = [row(demo, 100, prefill={}, decode={}), row(demo, 100, decode={})]
    assert [check.passed for check in shown._accounts()] == expected


@pytest.mark.parametrize(
    ("tokens", "computed", "expected"), [((1, 2), 100, True), ((1, 3), 100, False), ((1, 2), 68, None)]
)
def test_a_plain_run_computes_everything_and_says_the_same(
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tokens: tuple[int, ...],
    computed: int,
    expected: bool | None,
) -> None:
    plain = demo.Answer("", "text", tokens, 100, 2, 0.1)
    monkeypatch.setattr(demo, "ask", lambda *_, salt, **__: plain)
    counts = demo.counters.Counts(prompt=100, own_cache=100 - computed)
    monkeypatch.setattr(demo.counters, "engine_counts", lambda _: counts)
    monkeypatch.setattr(demo.counters, "settled", lambda *_: counts)
    shown = demo.Demo(OneNode(), demo.Model("tiny", "float32", 4096, is_local=True))
    shown.rows, shown._asked = [row(demo, 100, decode={})], [[demo.user("hi")]]
    if expected is None:
        with pytest.raises(demo.RequestFailed, match="reused"):
            shown._same_as_plain()
    else:
        assert shown._same_as_plain().passed is expected


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
    """Prefill and decode join each its own node, the nodes count as different hosts, and the proxy looks at
    prompts."""
    from moonpool.core.config import config, sections
    from moonpool.launch import up_plan

    model = demo.Model("tiny", "float32", 4096, is_local=False)
    cluster = importlib.import_module("cluster").Cluster(model, True, nodes)
    try:
        made = config.load(cluster.config, env={})
        assert [bool(engine.node) for engine in made.up.engine] == [nodes == 2] * 2
        plain = [
            sections.Engine(command=["x", "{node}"], name=each.name, node=each.node, role=each.role)
            for each in made.up.engine
        ]
        up = msgspec.structs.replace(made.up, engine=plain)
        plan = up_plan.plan(msgspec.structs.replace(made, up=up), env={})
    finally:
        shutil.rmtree(cluster.folder)
    names = [spec.name for spec in plan.specs]
    if nodes == 1:
        assert names == ["node", "prefill", "decode", "proxy"]
    else:
        assert names == ["master", "node-a", "node-b", "prefill", "decode", "proxy"]
        hosts = {spec.command[spec.command.index("--host-id") + 1] for spec in plan.specs[1:3]}
        assert len(hosts) == 2
    assert {"--prefill", "--decode"} <= set(plan.specs[-1].command)


def test_the_pool_is_awaited_for_the_blocks_that_are_new(demo: ModuleType) -> None:
    assert demo.new_block_tokens(row(demo, 100, prefill={}, decode={"handed_over": 99})) == 96
    assert demo.new_block_tokens(row(demo, 100, decode={"own_cache": 32, "pool": 32})) == 32
    assert demo.new_block_tokens(row(demo, 20, decode={})) == 0
    values = iter([0, 10, 10, 95, 96, 96])
    assert demo.counters.wait_until_still(lambda: next(values), 96, still_s=0.0) == 96


def test_counts_settle_when_the_connector_says_what_vllm_says(demo: ModuleType) -> None:
    counts = demo.counters.Counts
    early, late = counts(100, external=96), counts(100, external=96, pool=64, handed_over=32)
    readings = iter([counts(), early, early, late, late])
    assert demo.counters.settled(lambda: next(readings), 100, counts()) == late


def test_counters_are_summed_over_series(demo: ModuleType) -> None:
    samples = {'x_total{a="1",s="p"}': 2.0, 'x_total{a="2",s="q"}': 3.0, "x_total_more": 5.0}
    assert demo.counters.total(samples, "x_total") == 5
    assert demo.counters.total(samples, "x_total", 's="q"') == 3
    assert demo.counters.total(samples, "y_total") == 0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.heavy), 2])
def test_the_whole_demo(vllm_python: str, tmp_path: Path, nodes: int) -> None:
    """All in separate processes: what `make demo ONCE=1 NODES=N JSON=FILE` runs.

    On two nodes all happens that does on one, and the bytes go by TCP, too.
    """
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
    apart = [len(each["parts"]) for each in document["requests"]]
    assert apart == [2, 1, 2, 1, 1, 1]
    last = document["requests"][-1]
    assert last["parts"][0]["pool_tokens"] > 0.9 * last["prompt_tokens"]
    assert last["output_token_ids"] == document["requests"][-2]["output_token_ids"]


def test_it_says_why_when_it_cannot_start(tmp_path: Path) -> None:
    """A folder that is no model: one sentence and exit code 2, before anything is started."""
    command = [sys.executable, DEMO / "main.py", "--once", "--cpu", "--cache", tmp_path, "--model", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert f"MODEL={tmp_path} is a folder without config.json" in result.stderr
