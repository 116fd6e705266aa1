from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest

from moonpool.connectors.lmcache import job_queue
from moonpool.connectors.lmcache.job_queue import JobQueue
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
def lane() -> Iterator[JobQueue[str]]:
    lane: JobQueue[str] = JobQueue("test", Notifier(), logging.getLogger("test"))
    yield lane
    if not lane.notifier.closed:  # type: ignore[attr-defined]
        lane.close()


def test_answers_are_told_and_taken_once(lane: JobQueue[str]) -> None:
    for number in range(5):
        lane.submit(number, lambda number=number: f"answer {number}", "otherwise")  # type: ignore[misc]
    assert until(lambda: lane.take(4)) == "answer 4"
    assert os.eventfd_read(lane.notifier.fileno()) == 5
    assert lane.take(4) is None
    assert lane.take_all() == {number: f"answer {number}" for number in range(4)}
    assert lane.take_all() == {}


def test_a_job_that_raises_gets_the_other_answer(
    lane: JobQueue[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> str:
        raise OSError("no")

    lane.submit(1, fail, "otherwise")
    lane.submit(2, lambda: "fine", "otherwise")
    assert until(lambda: lane.take(2)) == "fine"
    assert lane.take(1) == "otherwise"
    assert "the operation counts as failed" in caplog.text


def test_a_chore_is_done_with_and_without_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue, "CHORE_S", 600.0)
    done: list[str] = []
    busy: JobQueue[str] = JobQueue(
        "test", Notifier(), logging.getLogger("test"), lambda: done.append("chore")
    )
    busy.submit(1, lambda: "fine", "otherwise")
    until(lambda: done)
    busy.close()
    assert done == ["chore"]
    monkeypatch.setattr(job_queue, "CHORE_S", 0.005)
    idle: JobQueue[str] = JobQueue(
        "test", Notifier(), logging.getLogger("test"), lambda: done.append("chore")
    )
    until(lambda: len(done) > 3)
    idle.close()


def test_jobs_and_answers_have_a_maximum(lane: JobQueue[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue, "JOBS_MAX", 2)
    monkeypatch.setattr(job_queue, "ANSWERS_MAX", 3)
    running, go = threading.Event(), threading.Event()

    def job() -> str:
        running.set()
        assert go.wait(10)
        return "done"

    lane.submit(1, job, "otherwise")
    assert running.wait(10)
    for number in (2, 3, 4):
        lane.submit(number, lambda: "done", "otherwise")
    assert lane.take(4) == "otherwise"
    go.set()
    until(lambda: len(lane._answers) == 3)
    lane.submit(5, lambda: "done", "otherwise")
    until(lambda: 5 in lane._answers)
    assert lane.take_all() == {2: "done", 3: "done", 5: "done"}


def test_close_waits_for_the_running_job_and_answers_the_rest(lane: JobQueue[str]) -> None:
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


def test_after_close_the_answer_is_there_and_nobody_is_told(lane: JobQueue[str]) -> None:
    lane.close()
    lane.submit(1, lambda: "never", "otherwise")  # the descriptor is gone: no error
    assert lane.take(1) == "otherwise"
