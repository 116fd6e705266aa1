"""What the tests share: nodes that come and go, and engines that are closed at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moonpool.connectors.tensorrt_llm as connector
from moonpool.connectors.tensorrt_llm import compat, pool
from moonpool.connectors.tensorrt_llm.settings import VARIABLE
from tests.connectors.tensorrt_llm import stub_engine
from tests.connectors.tensorrt_llm.stub_engine import Engine

NODE = Path(__file__).parents[1] / "vllm" / "node_process.py"
TOKEN = "a token of this test"
MIB = 1 << 20
Make = Callable[..., Engine]


class Ended(Exception):
    """All ranks would have ended."""


def ended() -> None:
    raise Ended


class Node:
    """A node in a process of its own."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, size: int = 32 * MIB) -> Node:
        self.process = subprocess.Popen(
            [sys.executable, str(NODE), str(self.socket), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        return self

    def metrics(self) -> dict[str, int]:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()  # type: ignore[union-attr]
            self.process.stdout.close()  # type: ignore[union-attr]
            self.process = None


@pytest.fixture
def node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Not started."""
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", TOKEN)
    monkeypatch.setattr(compat, "rank", lambda: stub_engine.RANK[0])
    monkeypatch.setattr(compat, "end_all_ranks", ended)
    monkeypatch.setattr(pool, "TIMEOUT_S", 10.0)  # a node that hangs is one that a test stopped
    stub_engine.RANK[0] = 0
    node = Node(folder / "n.sock")
    yield node
    node.kill()


@pytest.fixture
def make(node: Node, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """make(options={...}, model={...}, args={...}, **of Engine): an engine with its memory registered."""
    made: list[Engine] = []

    def make(
        options: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        args: dict[str, Any] | None = None,
        kind: type[Engine] = Engine,
        **engine: Any,
    ) -> Engine:
        monkeypatch.setenv(VARIABLE, json.dumps({"node": str(node.socket)} | (options or {})))
        path = stub_engine.write_model(folder / f"model{len(made)}", **(model or {}))
        made.append(kind(connector, stub_engine.llm_args(path, **(args or {})), **engine))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
