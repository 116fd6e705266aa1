"""LMCache's own checks (``python -m lmcache.v1.basic_check``) against ours."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import sys

import pytest
from lmcache.v1 import basic_check

from tests.connectors.lmcache.real.l2 import BY_NAME, BY_PATH, NATIVE
from tests.connectors.own_node import Node


def passed(*arguments: str) -> dict[str, str]:
    """Of each operation how many passed: {"PUT": "5/5", ...}. In this process: importing LMCache takes
    seconds."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["basic_check", *arguments])
        asyncio.run(basic_check.main())
    rows = re.findall(r"^\| ([A-Z][\w ()-]+?) +\|.*?\| +(\d+/\d+) \|", output.getvalue(), re.MULTILINE)
    assert rows, output.getvalue()
    return dict(rows)


@pytest.mark.parametrize(
    "mode", ["test_remote", pytest.param("test_storage_manager", marks=pytest.mark.heavy)]
)
def test_the_remote_connector(node: Node, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node.start()
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "moonpool://")
    operations = ("EXISTS (non-exist)", "PUT", "EXISTS (exist)", "GET")
    told = passed("--mode", mode, "--num-keys", "5")
    assert told == dict.fromkeys(operations, "5/5")


@pytest.mark.parametrize(
    "spec",
    [BY_NAME, BY_PATH, NATIVE],
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
