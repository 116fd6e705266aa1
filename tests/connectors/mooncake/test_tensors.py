"""Tensors, shards, files: tensor_checks.py and parallel_checks.py in an interpreter that has torch."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.core.master_bed import MasterProcess

SCRIPT = Path(__file__).with_name("tensor_checks.py")
CHECKS = [
    node.name
    for script in (SCRIPT, SCRIPT.with_name("parallel_checks.py"))
    for node in ast.parse(script.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.decorator_list
]

pytestmark = pytest.mark.engine  # torch comes with the engine's environment


@pytest.fixture(scope="module")
def said(vllm_python: str, master: MasterProcess) -> dict[str, str]:
    done = subprocess.run(
        [vllm_python, str(SCRIPT), master.address],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers: dict[str, str] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("name", CHECKS)
def test_tensors(said: dict[str, str], name: str) -> None:
    assert said[name] == "ok", said[name]
