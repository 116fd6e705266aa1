"""What is saved, and again, and how long the pages of a save are kept; in the recorded life cycle of
TensorRT-LLM's executor, against a real node."""

from __future__ import annotations

import threading

import pytest

from moonpool.connectors import node_connection
from moonpool.connectors.tensorrt_llm import tokens as chains
from tests.connectors.tensorrt_llm.checks import LARGE, PROMPT, asks, check, counts
from tests.connectors.tensorrt_llm.conftest import MIB, Make, Node
from tests.connectors.tensorrt_llm.stub_engine import Engine
from tests.core.store_bed import until


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
    until(lambda: asks(engine))
    check(engine, longer, 0, on_device=16)
    check(make(), longer, 36)


@pytest.mark.parametrize("on_device", [16, 22])
def test_what_the_pool_evicted_is_saved_again(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, on_device: int
) -> None:
    """No engine reads from the pool what every engine has on its device, so just that is evicted."""
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
