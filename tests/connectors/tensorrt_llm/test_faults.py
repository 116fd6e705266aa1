"""Nodes that are absent, silent, full, hung or killed, under an engine in the recorded life cycle of
TensorRT-LLM's executor."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

import pytest

from moonpool import Store
from moonpool.connectors import node_connection
from moonpool.connectors.tensorrt_llm import pool as pools
from moonpool.core.errors import Error, Unavailable
from moonpool.core.store.keys import block_digests, block_name
from tests.connectors.tensorrt_llm.checks import LARGE, PROMPT, asks, check, counts
from tests.connectors.tensorrt_llm.conftest import MIB, Make, Node
from tests.connectors.tensorrt_llm.stub_engine import Engine
from tests.core.store_bed import until


def test_no_node_at_start_and_later(
    make: Make, node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_connection, "RETRY_MAX_S", 0.02)
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 0.02)
    engine = make()
    check(engine, PROMPT, 0)
    check(engine, [9] * 12, 0)
    ours = [record for record in caplog.records if record.name == "moonpool.tensorrt_llm"]
    assert len([record for record in ours if record.levelno == logging.WARNING]) == 1
    node.start()
    until(lambda: _is_up(engine))
    check(engine, PROMPT, 0, on_device=22)  # what could not be saved is saved now
    check(make(), PROMPT, 20)


def test_a_pool_that_is_silent_is_left_alone(make: Make, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 600.0)
    engine = make()
    check(engine, PROMPT, 0)
    node.start()
    check(engine, PROMPT, 0)
    assert counts(engine)["lookups"] == 0  # within REST_S of the first attempt


def test_required_pool(make: Make, node: Node) -> None:
    with pytest.raises(Unavailable):
        make({"require_pool": True})


def test_a_wrong_token(
    make: Make, node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start()
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "another token")
    engine = make()
    check(engine, PROMPT, 0)
    assert "token" in caplog.text
    with pytest.raises(Error, match="token"):
        make({"require_pool": True})


def test_node_killed_after_the_promise(make: Make, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is promised is in the engine's hands: TensorRT-LLM could not be told of a loss any more."""
    monkeypatch.setattr(node_connection, "RETRY_MAX_S", 0.02)
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 0.02)
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0)
    request = second.start(PROMPT)
    assert second.matched == 20
    node.kill()
    loaded = second.step([], [request]) or until(lambda: second.poll([]))
    assert loaded == [request.request_id]
    second.step([request])
    assert second.answer(request) == second.expected(PROMPT)
    second.finish(request)
    second.flush()
    check(second, PROMPT, 0)  # and everything goes on without a pool
    node.start()
    until(lambda: asks(second))
    check(second, PROMPT, 0)
    check(first, PROMPT, 20)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_node_killed_as_a_load_begins(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    """What is promised is pinned, and every rank has it mapped: it is loaded without a node."""
    node.start()
    ranks = {"tp_size": tp_size}
    first, second = make(args=ranks), make(args=ranks)
    tokens = list(range(60))
    check(first, tokens, 0)
    all_began = threading.Barrier(tp_size, node.kill)
    descriptors = pools.Held.descriptors

    def wait(held: pools.Held, which: Any) -> Any:
        all_began.wait(30)
        return descriptors(held, which)

    monkeypatch.setattr(pools.Held, "descriptors", wait)
    request = second.start(tokens)
    assert second.matched == 56
    loaded = second.step([], [request]) or until(lambda: second.poll([]))
    assert loaded == [request.request_id]
    assert node.process is None
    second.step([request])
    assert second.answer(request) == second.expected(tokens)


def test_another_node_in_the_place_of_the_one_that_promised(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_connection, "RETRY_MAX_S", 0.02)
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 0.02)
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0)
    request = second.start(PROMPT)
    node.kill()
    node.start()
    until(lambda: asks(second))  # it has a session with the new one
    check(first, [8] * 23, 0)
    loaded = second.step([], [request]) or until(lambda: second.poll([]))
    assert loaded == [request.request_id]
    second.step([request])
    assert second.answer(request) == second.expected(PROMPT)
    second.finish(request)


def _is_up(engine: Engine) -> bool:
    """Whether the engine knows that the node is there."""
    return engine.scheduler._link.engine.pool.client is not None


def test_promised_blocks_cannot_be_evicted(make: Make, node: Node) -> None:
    node.start(2 * MIB)
    first, second = make(**LARGE), make(**LARGE)
    check(first, PROMPT, 0)
    request = second.start(PROMPT)
    for salt in range(10):  # more than the pool holds
        first.run([salt] * 60, until)
        first.flush()
    assert node.metrics()["evicted_total"] > 0
    loaded = second.step([], [request]) or until(lambda: second.poll([]))
    assert loaded == [request.request_id]
    second.step([request])
    assert second.answer(request) == second.expected(PROMPT)


def test_node_killed_in_mid_store(make: Make, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_connection, "RETRY_MAX_S", 0.02)
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 0.02)
    node.start()
    engine = make(chunk=8)
    request = engine.start(PROMPT)
    engine.step([request])
    engine.flush()
    node.kill()
    while request.computed < len(PROMPT):
        engine.step([request])
    assert engine.answer(request) == engine.expected(PROMPT)
    engine.finish(request)
    engine.flush()
    assert counts(engine)["unsaved_blocks"] == 3
    node.start()
    until(lambda: asks(engine))
    check(engine, PROMPT, 0)
    check(make(), PROMPT, 20)


def test_a_stream_that_cannot_be_marked(make: Make, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was promised is not loaded, so the engine must hear of it."""
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0)
    request = second.start(PROMPT)

    def mark(stream: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(second.scheduler._link.engine.memory, "mark", mark)
    with pytest.raises(RuntimeError, match="CUDA error"):
        second.step([], [request])


def test_a_full_pool(make: Make, node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Everything in it is pinned by promises: saves are refused, counted and said once."""
    node.start(2 * MIB)
    first, holder = make(**LARGE), make(**LARGE)
    held = []
    for salt in range(100):
        tokens = [salt] * 8
        first.run(tokens, until)
        first.flush()
        request = holder.start([*tokens, 1])
        held += [request] if holder.matched else []
        holder.free[0] += request.pages[0]  # the stub's own pages: they play no part here
        if counts(first)["refused_objects"]:
            break
    assert counts(first)["refused_objects"]
    assert caplog.text.count("were not saved") == 1
    check(first, PROMPT, 0)
    loaded = holder.step([], held)
    until(lambda: loaded.extend(holder.poll([])) or len(loaded) == len(held))
    for request in held:
        holder.scheduler.request_finished(request, [])
    until(lambda: _room(first))


def _room(engine: Engine) -> bool:
    before = counts(engine)["saved_objects"]
    engine.run([int(time.monotonic_ns() % 1000)] * 12, until)
    engine.flush()
    return bool(counts(engine)["saved_objects"] > before)


def test_a_node_that_hangs_is_waited_for_once(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others ask it meanwhile, and the executor hears when it answers."""
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 0.02)
    node.start()
    first = make()
    check(first, PROMPT, 0)
    monkeypatch.setattr(pools, "TIMEOUT_S", 1.0)
    second = make()
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, node.process.pid, os.WSTOPPED | os.WNOWAIT)  # until it stands still
    try:
        matched, answer = second.run(PROMPT, until)
        assert (matched, answer) == (0, second.expected(PROMPT))
        tries = count_tries(second, monkeypatch)
        while tries() < 2:  # two times a second in which the node says nothing
            second.finish(second.start(PROMPT))
        assert counts(second)["lookups"] == 1
    finally:
        node.process.send_signal(signal.SIGCONT)
    until(lambda: _is_up(second))
    check(second, PROMPT, 20)


def count_tries(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How often the node was asked whether it is there, as far as the asking has come back."""
    tries, ask = [0], pools.PoolClient.ask

    def counted(connection: pools.PoolClient) -> None:
        try:
            ask(connection)
        finally:
            tries[0] += 1

    monkeypatch.setattr(pools.PoolClient, "ask", counted)
    return lambda: tries[0]


def test_an_object_of_another_size_is_not_used(make: Make, node: Node) -> None:
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0)
    engine = first.scheduler._link.engine
    name = block_name(block_digests(PROMPT, 4)[2], engine.shape.ranges[3])
    with Store(str(node.socket), fingerprint=engine.mark) as store:
        assert store.exists(name)
        store.put(name, b"too short", replace=True)
    check(second, PROMPT, 8)
