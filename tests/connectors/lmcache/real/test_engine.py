"""LMCache's engine, unchanged, in processes of its own."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.lmcache.real.beds import EngineProcess
from tests.connectors.own_node import Node
from tests.connectors.vllm.processes import Node as NodeProcess
from tests.core.store_bed import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOKENS, CHUNK = 120, 16
FULL = TOKENS // CHUNK * CHUNK
Start = Callable[..., EngineProcess]
PARTIAL = {"save_unfull_chunk": True}
LARGE = {"tokens": 4096, "layers": 8, "heads": 8, "head_size": 64}
LARGE_CACHE = {"chunk_size": 256, "max_local_cpu_size": 0.2, "blocking_timeout_secs": 10}


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    made: list[EngineProcess] = []

    def start(lmcache: dict[str, Any] | None = None, **options: Any) -> EngineProcess:
        made.append(EngineProcess(folder, f"engine-{len(made)}", lmcache or {}, **options))
        return made[-1]

    yield start
    for engine in made:
        engine.kill()


def test_a_second_process_retrieves_what_the_first_stored(node: Node, start: Start) -> None:
    node.start()
    plugin = {
        "remote_url": None,
        "remote_storage_plugins": ["moonpool"],
        "extra_config": {"save_chunk_meta": False},
    }
    first, second = start(PARTIAL), start({**plugin, **PARTIAL})
    assert first.call("store", 1)["tokens"] == TOKENS
    assert second.call("lookup", 1)["tokens"] == TOKENS
    assert second.call("retrieve", 1)["tokens"] == TOKENS
    first.end()
    answer = second.call("retrieve", 1)  # its writer is gone
    assert (answer["tokens"], answer["right"]) == (TOKENS, True)
    assert second.call("retrieve", 2)["tokens"] == 0


@pytest.mark.heavy  # the short form is in test_remote_faults.py
def test_a_restart_with_a_warm_pool(node: Node, start: Start) -> None:
    node.start()
    first = start(PARTIAL)
    assert first.call("store", 1)["tokens"] == TOKENS
    first.end()
    answer = start().call("retrieve", 1)
    assert (answer["tokens"], answer["right"]) == (FULL, True)


@pytest.fixture
def node_process() -> Iterator[NodeProcess]:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as path:
        node = NodeProcess(Path(path)).start()
        yield node
        node.kill()


@pytest.mark.heavy
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_node_that_goes_in_the_middle(
    how: signal.Signals, node_process: NodeProcess, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right bytes or none, and an answer soon."""
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(node_process.runtime))
    monkeypatch.delenv("MOONPOOL_CLUSTER_TOKEN", raising=False)
    engine = start(LARGE_CACHE, **LARGE)
    assert engine.call("store", 1)["tokens"] == 4096
    assert engine.call("retrieve", 1) | {"seconds": 0} == {"seconds": 0, "tokens": 4096, "right": True}
    engine.tell("store", 2)
    until(lambda: node_process.metrics()["objects"] > 16)  # the second prompt has begun to arrive
    os.kill(node_process.pid, how)
    engine.answer()
    for seed in (1, 2):
        answer = engine.call("retrieve", seed)
        assert answer["right"]
        assert answer["seconds"] < 25
    assert engine.call("store", 3)["returned_s"] < 10


@pytest.mark.heavy
def test_a_node_killed_while_chunks_are_retrieved(
    node_process: NodeProcess, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(node_process.runtime))
    monkeypatch.delenv("MOONPOOL_CLUSTER_TOKEN", raising=False)
    engine = start(LARGE_CACHE, **LARGE)
    assert engine.call("store", 1)["tokens"] == 4096
    engine.tell("retrieve", 1)
    node_process.kill()
    answer = engine.answer()
    assert answer["right"]
    assert engine.call("retrieve", 1)["right"]
