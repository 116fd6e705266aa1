"""Ranks that fail: TensorRT-LLM's ranks wait for each other, so all of them end, or none uses the pool."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from moonpool.connectors import node_connection
from moonpool.connectors.tensorrt_llm import compat, worker
from moonpool.connectors.tensorrt_llm import pool as pools
from moonpool.core.errors import Unavailable
from tests.connectors.tensorrt_llm.checks import PROMPT, check, counts
from tests.connectors.tensorrt_llm.conftest import Ended, Make, Node
from tests.core.store_bed import until


def test_a_rank_that_cannot_load_ends_all_ranks(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another rank's process has to ask the pool itself: what it does not get is never served. The other
    ranks wait for this one behind get_finished, so an exception would be no end."""
    monkeypatch.setattr(worker, "LOAD_DEADLINE_S", 0.0)
    node.start()
    first, second = make(args={"tp_size": 2}), make(args={"tp_size": 2})
    check(first, PROMPT, 0)
    request = second.start(PROMPT)
    node.kill()
    with pytest.raises(Ended):
        second.step([], [request]) or until(lambda: second.poll([]))
    assert "all ranks end" in caplog.text


@pytest.mark.parametrize("mpi", [True, False])
def test_the_end_of_all_ranks(mpi: bool) -> None:
    told = """
import os, sys, types
from moonpool.connectors.tensorrt_llm import compat
if sys.argv[1] == "True":
    world = types.SimpleNamespace(Abort=lambda code: (print("abort", code, flush=True), os._exit(7)))
    sys.modules["mpi4py.MPI"] = types.SimpleNamespace(COMM_WORLD=world)
try:
    compat.end_all_ranks()
finally:
    print("still here")
"""
    done = subprocess.run(
        [sys.executable, "-c", told, str(mpi)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == ((7, "abort 1\n") if mpi else (1, "")), done.stderr


def test_a_rank_outlives_a_pool_that_is_silent_for_a_moment(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it failed at before does not count, and one failed answer is no reason to give an engine up."""
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 600.0)
    node.start()
    first, second = make(args={"tp_size": 2}), make(args={"tp_size": 2})
    check(first, PROMPT, 0)
    other = second.ranks[1][0]._link.engine.pool
    other.failed("a save that took too long")
    hold, answers = pools.PoolClient.hold, [0]

    def at_last(connection: pools.PoolClient, names: Any, width: int) -> Any:
        if connection is not other._client:
            return hold(connection, names, width)
        answers[0] += 1
        if answers[0] == 1:
            raise Unavailable("in this moment", operation="longest_prefix")
        return None if answers[0] == 2 else hold(connection, names, width)

    monkeypatch.setattr(pools.PoolClient, "hold", at_last)
    check(second, PROMPT, 20)
    assert answers == [3]


@pytest.mark.parametrize("others", [None, b"another fingerprint"])
def test_ranks_use_the_pool_together_or_not_at_all(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, others: Any
) -> None:
    node.start()
    monkeypatch.setattr(compat, "gather", lambda value: [value, others])
    engine = make()
    check(engine, PROMPT, 0)
    assert "another rank" in caplog.text
    assert counts(engine)["lookups"] == 0
    with pytest.raises(Exception, match="another rank"):
        make({"require_pool": True})


def test_a_rank_that_fails_says_so_before_it_raises(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others wait for it."""
    node.start()
    said: list[Any] = []
    monkeypatch.setattr(compat, "gather", lambda value: said.append(value) or [value])
    with pytest.raises(Exception, match="pipeline_parallel_size"):
        make({"require_pool": True}, args={"more": {"pipeline_parallel_size": 2}})
    assert said == [None]
