from __future__ import annotations

import threading

import pytest

from moonpool.connectors import seeker
from moonpool.connectors.seeker import Seeker
from tests.core.store_bed import until


class Pool:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = 0
        self.left = 0

    def ask(self) -> None:
        self.asked += 1
        if not self.answers.is_set():
            raise OSError("not there")

    def leave(self) -> None:
        self.left += 1


def test_one_thread_asks_until_the_pool_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeker, "REST_S", 0.005)
    monkeypatch.setattr(seeker, "REST_MAX_S", 0.005)
    pool = Pool()
    it = Seeker(pool.ask, pool.leave)
    assert (it.up, pool.asked) == (True, 0)
    before = set(threading.enumerate())  # of which some, of other tests, may end at any time
    assert [it.lost() for _ in range(20)] == [True] + [False] * 19
    assert len(set(threading.enumerate()) - before) == 1
    assert (it.up, pool.left) == (False, 1)
    until(lambda: pool.asked > 3)
    assert not it.up
    pool.answers.set()
    until(lambda: it.up)
    pool.answers.clear()
    assert it.lost()
    assert pool.left == 2
    it.close()
    asked = pool.asked
    assert not it.lost()
    assert pool.asked == asked


def test_it_is_asked_ever_more_seldom() -> None:
    rests: list[float] = []

    class Closed(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            rests.append(timeout)
            return len(rests) == 8

    it = Seeker(Pool().ask)
    it._closed = Closed()
    it.lost()
    it.close()
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
