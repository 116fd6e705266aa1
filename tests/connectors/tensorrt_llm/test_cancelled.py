"""Requests that are cancelled, or asked for twice, before what was promised to them is loaded."""

from __future__ import annotations

import threading

import pytest

from tests.connectors.tensorrt_llm.checks import PROMPT, check, counts
from tests.connectors.tensorrt_llm.conftest import Make, Node
from tests.core.store_bed import until


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
    """No request wants the blocks any more, so it is no reason to end the engine."""
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
