"""The connector in the recorded life cycle of TensorRT-LLM's executor, against a real node; every answer is
checked byte by byte (stub_engine.py)."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from moonpool import Store
from moonpool.connectors import node_connection
from moonpool.connectors.tensorrt_llm import compat, worker
from moonpool.connectors.tensorrt_llm import pool as pools
from moonpool.connectors.tensorrt_llm import tokens as chains
from moonpool.core.errors import Error, Unavailable
from moonpool.core.store.keys import block_digests, block_name
from tests.connectors.tensorrt_llm.checks import PROMPT, check, counts
from tests.connectors.tensorrt_llm.conftest import MIB, Ended, Make, Node
from tests.connectors.tensorrt_llm.stub_engine import NO_PAGE, Engine
from tests.core.store_bed import until

LARGE: dict[str, Any] = {"model": {"head_dim": 64}, "head_dim": 64}  # blocks of 24 KiB


def test_a_second_engine_takes_what_the_first_computed(make: Make, node: Node) -> None:
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0)
    check(second, PROMPT, 20)
    check(second, [*PROMPT[:9], 1, 2, 3, 4, 5], 8)  # a common beginning of two blocks
    check(second, PROMPT[:20], 16)  # one token is left to compute
    check(second, PROMPT[:3], 0)
    assert counts(second)["loaded_blocks"] == 5 + 2 + 4
    assert counts(first)["saved_objects"] == 5 * 8


def test_only_what_the_engine_lacks_is_loaded(make: Make, node: Node) -> None:
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0)
    check(second, PROMPT, 12, on_device=8)
    check(second, PROMPT, 20 - 6, on_device=6)  # in the middle of a block
    check(second, PROMPT, 0, on_device=22)


def test_chunked_prefill_saves_as_blocks_become_full(make: Make, node: Node) -> None:
    node.start()
    first, second = make(chunk=6), make(chunk=6)
    request = first.start(PROMPT)
    first.step([request])
    first.flush()
    assert counts(first)["saved_objects"] == 8  # 6 of 23 tokens: one block
    first.step([request])
    first.flush()
    check(second, PROMPT, 12)
    while request.computed < len(PROMPT):
        first.step([request])
    first.finish(request)


def test_several_requests_in_a_step(make: Make, node: Node) -> None:
    node.start()
    first, second = make(), make()
    other = [7] * 17
    both = [first.start(PROMPT), first.start(other)]
    first.step(both)
    for request in both:
        first.finish(request)
    first.flush()
    one, two = second.start(PROMPT), second.start(other)
    loaded = second.step([], [one, two])
    while len(loaded) < 2:
        loaded += until(lambda: second.poll([]))
    assert sorted(loaded) == [one.request_id, two.request_id]
    second.step([one, two])
    assert [second.answer(one), second.answer(two)] == [second.expected(PROMPT), second.expected(other)]


@pytest.mark.parametrize(("save_decode", "hit"), [(False, 4), (True, 8)])
def test_answers_are_saved_when_asked_to(make: Make, node: Node, save_decode: bool, hit: int) -> None:
    node.start()
    engine = make({"save_decode": save_decode})
    request = engine.start([1, 2, 3, 4, 5, 6, 7])
    engine.step([request])
    for token in (8, 9, 10):
        request.tokens.append(token)
        if len(request.tokens) > 4 * len(request.pages[0]):
            request.pages[0].append(engine.free[0].pop())
        engine.step([request])
    engine.finish(request)
    engine.flush()
    check(make(), list(range(1, 11)), hit)


def test_engines_of_different_tensor_parallel_sizes_share(make: Make, node: Node) -> None:
    node.start()
    four, two, one = make(args={"tp_size": 4}), make(args={"tp_size": 2}), make()
    check(four, PROMPT, 0)
    check(two, PROMPT, 20)
    check(one, PROMPT, 20)


def test_ranks_that_hold_one_head_save_it_once(make: Make, node: Node) -> None:
    node.start()
    shape = {"heads": 1}
    ranks = make(model=shape, heads=1, args={"tp_size": 2})
    check(ranks, PROMPT, 0)
    assert sum(counts_of["saved_objects"] for counts_of in all_counts(ranks)) == 5
    check(make(model=shape, heads=1), PROMPT, 20)


def all_counts(engine: Engine) -> list[Any]:
    return [worker._link.count for worker, _ in engine.ranks]


def test_layer_groups_of_several_regions(make: Make, node: Node) -> None:
    node.start()
    first, second = make(groups=2), make(groups=2)
    check(first, PROMPT, 0)
    check(second, PROMPT, 20)
    assert counts(first)["saved_objects"] == 5 * 2  # raw: one object for a page of each group
    check(make(), PROMPT, 0)  # cut otherwise, so not shared


def test_layer_groups_with_unlike_numbers_of_pages(make: Make, node: Node) -> None:
    node.start()
    first, second = (make(groups=2, blocks=blocks) for blocks in ((64, 24), (24, 96)))
    for engine in (first, second):
        for free in engine.free:
            free.reverse()  # the last pages first
    check(first, PROMPT, 0)
    check(second, PROMPT, 20)
    check(second, list(range(60)), 0)  # 15 blocks: a quarter of the pages of the smaller group may be kept
    assert counts(second)["unsaved_blocks"] == 9


def test_blocks_without_a_page_are_neither_saved_nor_loaded(make: Make, node: Node) -> None:
    node.start()
    first, second = make(groups=2), make(groups=2)
    request = first.start(PROMPT)
    request.pages[1][3] = NO_PAGE  # the window has passed it before it was saved
    first.step([request])
    first.finish(request)
    first.flush()
    assert counts(first)["saved_objects"] == 5 + 4
    request = second.start(PROMPT)
    assert second.matched == 12
    second.finish(request)
    check(first, PROMPT, 12)  # and now the rest is there, too
    request = second.start(PROMPT)
    assert second.matched == 20
    second.finish(request)


def test_an_unknown_backend_stores_blocks_as_they_lie(make: Make, node: Node) -> None:
    node.start()
    first, second = make(args={"backend": "FLASHINFER"}), make(args={"backend": "FLASHINFER"})
    check(first, PROMPT, 0)
    assert counts(first)["saved_objects"] == 5
    check(second, PROMPT, 20)
    check(make(), PROMPT, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"args": {"dtype": "fp8"}},
        {"dtype": "float16"},
        {"model": {"weights": 2}},
        {"options": {"namespace": "other"}},
    ],
    ids=["kv dtype", "memory", "weights", "namespace"],
)
def test_who_differs_shares_nothing(make: Make, node: Node, other: dict[str, Any]) -> None:
    node.start()
    check(make(), PROMPT, 0)
    check(make(**other), PROMPT, 0)
    check(make(), PROMPT, 20)


def test_another_block_size_is_a_miss(make: Make, node: Node) -> None:
    node.start()
    check(make(), PROMPT, 0)
    eight = make(args={"tokens": 8})
    check(eight, PROMPT, 0)
    check(make(args={"tokens": 8}), PROMPT, 16)


def test_the_start_waits_until_the_weights_were_read(
    make: Make, node: Node, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks join together, and here only."""
    node.start()
    said: list[str] = []
    info = compat.Log.info

    def hear(log: compat.Log, text: str, *values: object) -> None:
        info(log, text, *values)
        said.append(text % values)
        if "the start waits for it" in said[-1]:
            held.set()

    monkeypatch.setattr(compat.Log, "info", hear)
    check(make(), PROMPT, 0)
    assert any("the start waits for it" in text for text in said)
    check(make(), PROMPT, 20)


def test_salts_are_apart_and_lora_is_left_out(make: Make, node: Node) -> None:
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0, cache_salt="one")
    check(second, PROMPT, 0)
    check(second, PROMPT, 20, cache_salt="one")
    check(second, PROMPT, 0, cache_salt="two")
    check(second, PROMPT, 0, lora_task_id=7)
    assert counts(second)["requests_left_out"] == 1
    check(first, PROMPT, 0, lora_task_id=7)


def test_a_prompt_that_comes_again_is_not_copied_again(make: Make, node: Node) -> None:
    node.start()
    engine = make()
    check(engine, PROMPT, 0)
    check(engine, PROMPT, 0, on_device=22)
    assert counts(engine)["existing_objects"] == 0


def test_a_step_saves_no_more_than_may_be_kept(make: Make, node: Node) -> None:
    """A quarter of the engine's pages, else requests that have ended could keep all of them."""
    node.start()
    first, second = make(blocks=24), make()
    check(first, list(range(60)), 0)  # 15 blocks, 6 may be kept
    assert counts(first)["unsaved_blocks"] == 9
    check(second, list(range(60)), 24)
    first.poll([])
    check(first, list(range(60)), 24 + 9 * 4 - 4)  # second has saved what first could not


def test_pages_are_kept_until_their_save_has_read_them(make: Make, node: Node) -> None:
    node.start()
    first, second = make(), make()
    saving = Gate(first)
    request = first.start(PROMPT)
    first.step([request])
    free = len(first.free[0])
    first.finish(request)
    first.poll([])
    assert len(first.free[0]) == free
    other = first.start([9] * 23)
    first.step([other])
    assert counts(first)["waits_for_saves"] == 0  # it got other pages
    saving.open()
    until(lambda: first.poll([]) or len(first.free[0]) == free)
    assert not first.kept
    first.finish(other)
    first.flush()
    check(second, PROMPT, 20)


def test_a_request_whose_saves_were_read_keeps_no_page(make: Make, node: Node) -> None:
    node.start()
    engine = make()
    request = engine.start(PROMPT)
    engine.step([request])
    engine.flush()
    assert engine.scheduler.request_finished(request, []) is False


def test_a_step_waits_for_a_save_of_a_page_that_it_writes_to(make: Make, node: Node) -> None:
    """The engine may free a page without asking, for example one that a window has passed."""
    node.start()
    first, second = make(), make()
    saving = Gate(first)
    request = first.start(PROMPT)
    first.step([request])
    first.free[0] += request.pages[0]  # not asked for
    other = first.start([9] * 23)
    assert set(other.pages[0]) == set(request.pages[0])
    threading.Timer(0.05, saving.open).start()
    first.step([other])
    assert counts(first)["waits_for_saves"] == 1
    assert first.answer(other) == first.expected([9] * 23)
    first.flush()
    check(second, PROMPT, 20)


class Gate:
    """What becomes of the saves of an engine's first rank is not heard until it is open."""

    def __init__(self, engine: Engine) -> None:
        saves = engine.scheduler._link.engine.saves
        self._saves, self._poll = saves, saves._poll
        saves._poll = lambda: None

    def open(self) -> None:
        self._saves._poll = self._poll


# Faults


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
    until(lambda: _asks(second))
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
    until(lambda: _asks(second))  # it has a session with the new one
    check(first, [8] * 23, 0)
    loaded = second.step([], [request]) or until(lambda: second.poll([]))
    assert loaded == [request.request_id]
    second.step([request])
    assert second.answer(request) == second.expected(PROMPT)
    second.finish(request)


def _asks(engine: Engine) -> bool:
    """Whether the node answers again: the native client tries at most every quarter of a second."""
    before = counts(engine)["unanswered"]
    engine.finish(engine.start([5] * 9))
    return bool(counts(engine)["unanswered"] == before)


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
    until(lambda: _asks(engine))
    check(engine, PROMPT, 0)
    check(make(), PROMPT, 20)


def test_a_node_that_came_back_empty_is_filled_again(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with what the engine has on its device, and so does not ask for."""
    monkeypatch.setattr(node_connection, "RETRY_MAX_S", 0.02)
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 0.02)
    node.start()
    engine, longer = make(), [*PROMPT, *range(200, 216)]
    check(engine, PROMPT, 0)
    node.kill()
    node.start()
    until(lambda: _asks(engine))
    check(engine, longer, 0, on_device=16)
    check(make(), longer, 36)


@pytest.mark.parametrize("on_device", [16, 22])
def test_what_the_pool_evicted_is_saved_again(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, on_device: int
) -> None:
    """Nobody reads from the pool what every engine has on its device, so just that is evicted."""
    node.start(2 * MIB)
    first, second = make(**LARGE), make(**LARGE)
    check(first, PROMPT, 0)
    for salt in range(10):  # more than the pool holds
        second.run([salt] * 60, until)
        second.flush()
    saved = counts(first)["saved_objects"]
    first.run(PROMPT, until, on_device=on_device)
    first.flush()
    assert counts(first)["saved_objects"] < saved + 40  # heard of a moment ago
    monkeypatch.setattr(chains, "KNOWN_S", 0.0)
    first.run(PROMPT, until, on_device=on_device)
    first.flush()
    check(make(**LARGE), PROMPT, 20)


def test_what_was_heard_of_long_ago_is_doubtful() -> None:
    now_s = [1000.0]
    known = chains.Known(limit=3, clock=lambda: now_s[0])
    known.add([b"a", b"b"])
    now_s[0] += chains.KNOWN_S / 2
    known.add([b"b", b"c"])
    assert known.doubtful([b"a", b"b", b"c", b"d"]) == []
    now_s[0] += chains.KNOWN_S / 2
    assert known.doubtful([b"a", b"b", b"c", b"d"]) == [b"a"]
    assert known.leading([b"a", b"b", b"d"]) == 2  # until it is asked for
    known.seen_at(b"one")
    assert known.leading([b"a"]) == 0
    known.add([b"a", b"b", b"c", b"d"])
    known.seen_at(b"")  # no node there now
    known.seen_at(b"one")
    assert known.leading([b"b", b"c", b"d"]) == 3
    assert known.leading([b"a"]) == 0  # too many
    known.seen_at(b"another")
    assert known.leading([b"b"]) == 0


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


@pytest.mark.parametrize("tp_size", [1, 2])
def test_cancelled_while_it_is_loaded(make: Make, node: Node, tp_size: int) -> None:
    """Its pages are another request's only when no rank writes into them any more."""
    node.start()
    first, second = make(args={"tp_size": tp_size}), make(args={"tp_size": tp_size})
    check(first, PROMPT, 0)
    gate = threading.Event()
    second.ranks[-1][0]._thread.submit(gate.wait, 10)
    request = second.start(PROMPT)
    loaded = second.step([], [request])
    free = len(second.free[0])
    second.finish(request)
    other = second.start([9] * 23)
    loaded += second.step([other])
    assert loaded == []
    assert len(second.free[0]) == free - 6  # those of the other
    gate.set()
    assert until(lambda: second.poll([])) == [request.request_id]
    second.flush()
    assert second.answer(other) == second.expected([9] * 23)
    until(lambda: second.poll([]) or len(second.free[0]) == free)
    assert not second.kept
    second.finish(other)
    assert not second.scheduler._chains
    check(second, PROMPT, 20)


def test_cancelled_before_it_is_loaded(make: Make, node: Node) -> None:
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0)
    request = second.start(PROMPT)
    second.finish(request)
    assert second.step([], [request]) == [request.request_id]
    second.flush()
    assert counts(second)["loaded_blocks"] == 0
    assert not second.kept
    assert not second.scheduler._link.offers
    assert not second.scheduler._chains


def test_a_load_that_fails_after_its_request_was_cancelled(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody wants the blocks any more, so it is no reason to end the engine."""
    node.start()
    first, second = make(args={"tp_size": 2}), make(args={"tp_size": 2})
    check(first, PROMPT, 0)
    gate = threading.Event()
    second.ranks[1][0]._thread.submit(gate.wait, 10)
    request = second.start(PROMPT)
    second.step([], [request])
    second.finish(request)
    second.poll([])
    node.kill()
    gate.set()
    assert until(lambda: second.poll([])) == [request.request_id]
    assert not second.kept
    check(second, [9] * 12, 0)


def test_a_request_that_is_asked_for_twice_in_a_step(make: Make, node: Node) -> None:
    """The second time, the engine has more of it: what was planned the first time is void."""
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0)
    request = second.start(PROMPT)
    matched, later = second.scheduler.get_num_new_matched_tokens(request, 8)
    assert (matched, later) == (12, True)
    second.free[0] += request.pages[0]
    request.pages = [[second.free[0].pop(0) for _ in range(6)]]
    second.compute(request, 0, 8)
    second.scheduler.update_state_after_alloc(request, list(request.pages[0]))
    loaded = second.step([], [request]) or until(lambda: second.poll([]))
    assert loaded == [request.request_id]
    assert counts(second)["loaded_blocks"] == 3
    second.step([request])
    assert second.answer(request) == second.expected(PROMPT)


def test_a_promise_that_is_taken_back_still_ends(make: Make, node: Node) -> None:
    """The engine waits for what it was told once."""
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0)
    request = second.start(PROMPT)
    assert second.scheduler.get_num_new_matched_tokens(request, 22) == (0, False)
    assert second.step([], [request]) == [request.request_id]
    assert counts(second)["loaded_blocks"] == 0


def test_a_request_that_never_runs_lets_go_of_its_promise(make: Make, node: Node) -> None:
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0)
    link = second.scheduler._link
    prompt = second.start(PROMPT)
    second.scheduler._loads.clear()  # as if it had had no pages yet
    assert second.scheduler.request_finished(prompt, []) is False
    assert not link.offers


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"model": "no/such-model"}, "cannot tell which weights"),
        ({"enable_attention_dp": True}, "enable_attention_dp"),
    ],
)
def test_engines_that_cannot_use_the_pool_say_why(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    args: dict[str, Any], sentence: str,
) -> None:  # fmt: skip
    node.start()
    engine = make(args={"more": args})
    check(engine, PROMPT, 0)
    assert sentence in caplog.text
    with pytest.raises(Exception, match=sentence):
        make({"require_pool": True}, args={"more": args})


def test_a_cache_that_cannot_be_copied(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*of: Any) -> Any:
        raise Unavailable("no pinned memory", operation="open")

    monkeypatch.setattr("moonpool.connectors.tensorrt_llm.link.open_kv_memory", refuse)
    node.start()
    check(make(), PROMPT, 0)
    assert "no pinned memory" in caplog.text


@pytest.mark.parametrize(
    "more",
    [
        {"model_kwargs": {"rope_theta": 1e6}},
        {"kv_cache": {"sink_token_length": 4}},
        {"kv_cache": {"max_attention_window": [4096]}, "max_seq_len": 2048},
    ],
    ids=["model_kwargs", "sink", "window"],
)
def test_arguments_that_change_the_numbers_tell_engines_apart(
    make: Make, node: Node, more: dict[str, Any]
) -> None:
    node.start()
    check(make(), PROMPT, 0)
    check(make(args={"more": more}), PROMPT, 0)
    check(make(args={"more": more}), PROMPT, 20)


def test_prompts_with_images_are_left_out(make: Make, node: Node) -> None:
    """By what they carry, and by the tokens that stand for images: not every version's requests carry it."""
    node.start()
    model = {"more": {"vision_config": {}, "image_token_id": 300, "vocab_size": 1000}}
    engine = make(model=model)
    check(engine, PROMPT, 0)
    for tokens, fields in (
        ([*PROMPT, 300, 1], {}),
        ([*PROMPT, 1000, 1], {}),
        (PROMPT, {"py_multimodal_data": {"image": 1}}),
    ):
        check(engine, tokens, 0, **fields)
    assert counts(engine)["requests_left_out"] == 3
    check(make(model=model), PROMPT, 20, py_multimodal_data={})
