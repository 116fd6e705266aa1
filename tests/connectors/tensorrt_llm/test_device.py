"""Engines whose KV cache lies on a card: the real node, the real native threads, and the software device in
the place of a CUDA driver. What the engine computes is queued on a stream, and runs late."""

from __future__ import annotations

import functools
import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool import _native
from moonpool.core.errors import Error
from tests.connectors.tensorrt_llm.card_engine import CardEngine
from tests.connectors.tensorrt_llm.checks import PROMPT, check, counts
from tests.connectors.tensorrt_llm.conftest import Make, Node
from tests.connectors.tensorrt_llm.stub_engine import Engine, Request
from tests.core.store_bed import until
from tests.soft_card import COMPILER, POLICIES, SoftCard, compile_library, soft_card

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

GPU = {"gpu": True, "gpu_ring": "8MiB", "gpu_copy_threads": 2}
OTHER = [9] * 23
AT_ONCE = "at once"  # then the save may have read its pages before another request asks for them


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("soft"))


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def card(policy: str, library: Path, rng: random.Random) -> Iterator[SoftCard]:
    with soft_card(library, policy, rng.randrange(1 << 32)) as card:
        CardEngine.card = card
        yield card


@pytest.fixture
def late_card(library: Path) -> Iterator[SoftCard]:
    with soft_card(library, "late") as card:
        CardEngine.card = card
        yield card


@pytest.fixture
def make_on_card(make: Make) -> Make:
    def made(options: dict[str, Any] | None = None, **more: Any) -> Engine:
        return make(GPU | (options or {}), kind=CardEngine, **more)

    return made


@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_one_card_computed_is_loaded_on_another(
    card: SoftCard, make_on_card: Make, make: Make, node: Node, tp_size: int
) -> None:
    """And on the host, and back: objects have one form."""
    node.start()
    ranks = {"tp_size": tp_size}
    first, second, host = make_on_card(args=ranks), make_on_card(args=ranks), make()
    check(second, OTHER, 0)  # an earlier owner of the pages
    check(first, PROMPT, 0)
    check(second, PROMPT, 20)
    check(host, PROMPT, 20)
    check(host, [7] * 23, 0)
    check(second, [7] * 23, 20)


def test_a_card_reads_the_nodes_memory_by_itself(
    late_card: SoftCard, make_on_card: Make, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Which objects are long enough for that, the native tests choose."""
    caplog.set_level(logging.INFO)
    make_on_card({"gpu_pin": "all"})
    assert "no memory of a node is pinned (gpu_pin)" in caplog.text
    node.start()
    engine = make_on_card({"gpu_pin": "all"})
    assert "are pinned for the card" in caplog.text
    check(engine, PROMPT, 0)
    check(make_on_card({"gpu_pin": "1MiB"}), PROMPT, 20)


def test_layer_groups_of_several_regions(card: SoftCard, make_on_card: Make, node: Node) -> None:
    node.start()
    first, second = make_on_card(groups=2), make_on_card(groups=2)
    check(second, OTHER, 0)
    check(first, PROMPT, 0)
    check(second, PROMPT, 20)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_layer_groups_with_unlike_numbers_of_pages(
    card: SoftCard, make_on_card: Make, make: Make, node: Node, tp_size: int
) -> None:
    node.start()
    more: dict[str, Any] = {"args": {"tp_size": tp_size}, "groups": 2}
    engines = [make_on_card(blocks=(64, 24), **more), make_on_card(blocks=(24, 96), **more)]
    engines.append(make(blocks=(32, 48), **more))
    for number, engine in enumerate(engines):
        for free in engine.free:
            free.reverse()  # the last pages first, which the other group does not have
        check(engine, OTHER, 20 if number else 0)
        check(engine, PROMPT, 20 if number else 0)


def test_chunks_are_saved_while_the_next_are_computed(card: SoftCard, make_on_card: Make, node: Node) -> None:
    node.start()
    first, second = make_on_card(chunk=6), make_on_card()
    request = first.start(PROMPT)
    while request.computed < len(PROMPT):
        first.step([request])
    assert first.answer(request) == first.expected(PROMPT)
    first.finish(request)
    first.flush()
    check(second, PROMPT, 20)


class StoppedNode:
    """Its engine's saves wait: the first for the node, the others for the first, and have read nothing."""

    def __init__(self, node: Node, engine: Engine, request: Request) -> None:
        """request: one that was started, for the first save."""
        assert node.process is not None
        self._pid = node.process.pid
        self._saves = engine.scheduler._link.engine.saves
        os.kill(self._pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WNOWAIT)  # until it stands still
        engine.step([request])

    def goes_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def goes_on_when_a_save_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        """Of each wait whether it was one."""
        wait_for, waits = self._saves.wait_for, []

        def then(*of: Any) -> bool:
            self.goes_on()
            waits.append(wait_for(*of))
            return waits[-1]

        monkeypatch.setattr(self._saves, "wait_for", then)
        return waits


def test_a_page_is_another_requests_when_its_save_has_read_it(
    card: SoftCard, make_on_card: Make, node: Node
) -> None:
    """The stub writes to a page as soon as it is free."""
    node.start()
    first, second = make_on_card(), make_on_card()
    before, request = first.start(OTHER), first.start(PROMPT)
    stopped = StoppedNode(node, first, before)
    first.step([request])
    first.finish(request)
    first.poll([])
    assert list(first.kept) == [request.request_id]
    stopped.goes_on()
    until(lambda: first.poll([]) or not first.kept)
    first.flush()
    check(second, PROMPT, 20)


def test_a_step_waits_for_a_save_of_a_page_that_it_writes_to(
    card: SoftCard, policy: str, make_on_card: Make, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may free a page without asking, for example one that a window has passed."""
    node.start()
    first, second = make_on_card(), make_on_card()
    before, request = first.start(OTHER), first.start(PROMPT)
    stopped = StoppedNode(node, first, before)
    first.step([request])
    first.free[0] += request.pages[0]
    other = first.start([7] * 23, lora_task_id=7)  # which asks the node for nothing
    assert set(other.pages[0]) == set(request.pages[0])
    waits = stopped.goes_on_when_a_save_is_waited_for(monkeypatch)
    first.step([other])
    stopped.goes_on()
    assert first.answer(other) == first.expected([7] * 23)
    first.flush()
    check(second, PROMPT, 20)
    assert waits == [True] or (policy == AT_ONCE and waits == [False])


def test_a_load_waits_for_a_save_of_its_pages(
    card: SoftCard, policy: str, make_on_card: Make, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start()
    first, second = make_on_card(), make_on_card()
    check(second, PROMPT, 0)
    before, request = first.start(OTHER), first.start([7] * 23)
    first.free[0] += request.pages[0]
    loading = first.start(PROMPT)
    assert first.matched == 20
    planned, first.scheduler._loads = first.scheduler._loads, {}  # as if it got its pages later
    stopped = StoppedNode(node, first, before)
    first.step([request])
    first.scheduler._loads = planned
    waits = stopped.goes_on_when_a_save_is_waited_for(monkeypatch)
    assert (first.step([], [loading]) or until(lambda: first.poll([]))) == [loading.request_id]
    stopped.goes_on()
    first.flush()
    first.step([loading])
    assert first.answer(loading) == first.expected(PROMPT)
    first.flush()
    check(second, [7] * 23, 20)
    assert waits[0] or policy == AT_ONCE


def test_node_killed_after_the_promise(late_card: SoftCard, make_on_card: Make, node: Node) -> None:
    node.start()
    first, second = make_on_card(), make_on_card()
    check(first, PROMPT, 0)
    request = second.start(PROMPT)
    assert second.matched == 20
    node.kill()
    assert (second.step([], [request]) or until(lambda: second.poll([]))) == [request.request_id]
    second.step([request])
    assert second.answer(request) == second.expected(PROMPT)
    second.finish(request)


def test_a_card_that_dies_ends_the_engine(late_card: SoftCard, make_on_card: Make, node: Node) -> None:
    """What was promised is not there, and TensorRT-LLM cannot be told of it."""
    node.start()
    first, engine = make_on_card(), make_on_card()
    check(first, PROMPT, 0)
    request = engine.start(PROMPT)
    assert engine.matched == 20
    late_card.die(1, 700)
    with pytest.raises(Error, match="card is lost"):
        engine.step([], [request]) or until(lambda: engine.poll([]))


def test_a_card_that_hangs_does_not_keep_an_engine_from_closing(
    late_card: SoftCard, make_on_card: Make, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.connectors.tensorrt_llm.kv_memory.CLOSE_TIMEOUT_S", 0.1)
    node.start()
    engine = make_on_card()
    request = engine.start(PROMPT)
    late_card.hang(20)  # behind what the step computes
    engine.step([request])
    engine.close()


def refusal(make: Make, caplog: pytest.LogCaptureFixture, options: dict[str, Any], **more: Any) -> str:
    """What the engine says; it serves without the pool."""
    caplog.clear()
    engine = make(options, kind=CardEngine, **more)
    check(engine, PROMPT, 0)
    assert counts(engine)["lookups"] == 0
    return caplog.text


def test_engines_on_a_card_that_cannot_use_the_pool_say_why(
    late_card: SoftCard, make: Make, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.start()
    said = functools.partial(refusal, make, caplog)
    assert '"gpu": true' in said({})
    assert "sleep" in said(GPU, args={"more": {"enable_sleep": True}})
    _native.use_driver_for_tests("/no/such/libcuda.so.1")
    assert "/no/such/libcuda.so.1" in said(GPU)
