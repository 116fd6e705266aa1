"""LMCache's own checks (``python -m lmcache.v1.basic_check``) against ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.connectors.lmcache.conftest import Node
from tests.connectors.lmcache.real.l2 import BY_NAME, BY_PATH, NATIVE


def passed(*arguments: str, **environment: str) -> dict[str, str]:
    """Of each operation how many passed: {"PUT": "5/5", ...}."""
    run = subprocess.run(
        [sys.executable, "-m", "lmcache.v1.basic_check", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    )
    rows = re.findall(r"^\| ([A-Z][\w ()-]+?) +\|.*?\| +(\d+/\d+) \|", run.stdout, re.MULTILINE)
    assert rows, run.stdout
    return dict(rows)


@pytest.mark.parametrize(
    "mode", ["test_remote", pytest.param("test_storage_manager", marks=pytest.mark.heavy)]
)
def test_the_remote_connector(node: Node, mode: str) -> None:
    node.start()
    operations = ("EXISTS (non-exist)", "PUT", "EXISTS (exist)", "GET")
    told = passed("--mode", mode, "--num-keys", "5", LMCACHE_REMOTE_URL="moonpool://")
    assert told == dict.fromkeys(operations, "5/5")


@pytest.mark.parametrize(
    "spec",
    [BY_NAME, pytest.param(BY_PATH, marks=pytest.mark.heavy), NATIVE],
    ids=["moonpool", "plugin", "native_plugin"],
)
def test_the_l2_adapters(node: Node, spec: dict[str, object]) -> None:
    node.start()
    operations = ("LOOKUP (absent)", "STORE", "LOOKUP (exist)", "LOAD")
    told = passed(
        "--mode",
        "test_l2_adapter",
        "--l2-adapter",
        json.dumps(spec),
        "--num-keys",
        "5",
        "--obj-size",
        "262144",
    )
    assert told == dict.fromkeys(operations, "5/5")
