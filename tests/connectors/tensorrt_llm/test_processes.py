"""Engines in processes of their own, over a node in another: what one computed the next takes, after it has
ended, under both layouts of TensorRT-LLM's modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.connectors.tensorrt_llm.settings import VARIABLE
from tests.connectors.tensorrt_llm.conftest import Node
from tests.connectors.tensorrt_llm.stub_engine import write_model

ROOT = Path(__file__).parents[3]
PROMPTS = [list(range(40, 59)), [3] * 16]


def run(layout: str, model: Path, node: Node) -> list[tuple[int, str, str]]:
    environment = {
        **os.environ,
        VARIABLE: json.dumps({"node": str(node.socket)}),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    command = [sys.executable, "-m", "tests.connectors.tensorrt_llm.engine_process", layout, str(model)]
    done = subprocess.run(
        [*command, json.dumps(PROMPTS)], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [(matched, answer, right) for matched, answer, right in json.loads(done.stdout)]


@pytest.mark.parametrize(("first", "second"), [("old", "new"), ("new", "old")])
def test_a_later_process_finds_a_warm_pool(node: Node, folder: Path, first: str, second: str) -> None:
    node.start()
    model = write_model(folder / "model")
    for layout, hits in ((first, [0, 0]), (second, [16, 12])):
        answers = run(layout, model, node)
        assert [matched for matched, _, _ in answers] == hits
        assert [answer for _, answer, _ in answers] == [right for _, _, right in answers]
