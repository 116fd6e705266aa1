from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest

from moonpool.connectors.lmcache.lanes import Lane
from tests.core.store_bed import until


class Notifier:
    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.closed = False

    def fileno(self) -> int:
        return self.fd

    def notify(self) -> None:
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        os.close(self.fd)
        self.closed = True


@pytest.fixture
def lane() -> Iterator[Lane[str]]:
    lane: Lane[str] = Lane("test", Notifier(), logging.getLogger("test"))
    yield lane
    if not lane.notifier.closed:  # type: ignore[attr-defined]
        lane.close()


def test_answers_are_told_and_taken_once(lane: Lane[str]) -> None:
    for number in range(5):
        lane.submit(number, lambda number=number: f"answer {number}", "otherwise")  # type: ignore[misc]
    assert until(lambda: lane.take(4)) == "answer 4"
    assert os.eventfd_read(lane.notifier.fileno()) == 5
    assert lane.take(4) is None
    assert lane.take_all() == {number: f"answer {number}" for number in range(4)}
    assert lane.take_all() == {}


def test_a_job_that_raises_gets_the_other_answer(lane: Lane[str], caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> str:
        raise OSError("no")

    lane.submit(1, fail, "otherwise")
    lane.submit(2, lambda: "fine", "otherwise")
    assert until(lambda: lane.take(2)) == "fine"
    assert lane.take(1) == "otherwise"
    assert "the operation counts as failed" in caplog.text


def test_close_waits_for_the_running_job_and_answers_the_rest(lane: Lane[str]) -> None:
    running, go = threading.Event(), threading.Event()

    def job() -> str:
        running.set()
        assert go.wait(10)
        return "done"

    lane.submit(1, job, "otherwise")
    lane.submit(2, lambda: "never", "otherwise")
    assert running.wait(10)
    closing = threading.Thread(target=lane.close)
    closing.start()
    until(lambda: lane._closed)
    go.set()
    closing.join(10)
    assert lane.take_all() == {1: "done", 2: "otherwise"}


def test_after_close_the_answer_is_there_and_nobody_is_told(lane: Lane[str]) -> None:
    lane.close()
    lane.submit(1, lambda: "never", "otherwise")  # the descriptor is gone: no error
    assert lane.take(1) == "otherwise"
