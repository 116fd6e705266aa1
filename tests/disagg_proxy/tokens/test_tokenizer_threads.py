"""Each text is decided about once: with its ids, or without when they do not come in time."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import pytest

from moonpool.disagg_proxy.tokens.tokenizer_threads import DEADLINE_S, THREADS, TokenizerThreads

WAIT_S = 30


class Panic(BaseException):
    """As one in a tokenizer, which is no Exception."""


@dataclass
class Asked:
    """What of a ProxyRequest is looked at."""

    number: int
    arrived_s: float = 0.0
    gone: bool = False


class Line:
    """As the data plane's."""

    def __init__(self) -> None:
        self.waiting: deque[Asked] = deque()
        self.closed = False
        self.some = threading.Condition()

    def put(self, request: Asked) -> None:
        with self.some:
            self.waiting.append(request)
            self.some.notify()

    def close(self) -> None:
        with self.some:
            self.closed = True
            self.some.notify_all()

    def next(self) -> Any:
        with self.some:
            assert self.some.wait_for(lambda: self.closed or bool(self.waiting), WAIT_S)
            return None if self.closed else self.waiting.popleft()

    def overdue(self, since_s: float) -> Any:
        with self.some:
            return self.waiting.popleft() if self.waiting and self.waiting[0].arrived_s < since_s else None


class Bed:
    def __init__(self) -> None:
        self.line = Line()
        self.now_s = 0.0
        self.goes_on = threading.Event()
        self.begun: SimpleQueue[int] = SimpleQueue()
        self.told: SimpleQueue[tuple[int, bytes | None]] = SimpleQueue()
        self.threads = TokenizerThreads(
            self.line.next,
            self.line.overdue,
            self.tokenise,
            lambda request, ids: self.told.put((request.number, ids)),  # type: ignore[attr-defined]
            lambda: self.now_s,
        )

    def tokenise(self, request: Any) -> bytes:
        self.begun.put(request.number)
        if request.number < 0:
            raise Panic(request.number)
        assert self.goes_on.wait(WAIT_S)
        return b"%d" % request.number


@pytest.fixture
def bed() -> Any:
    bed = Bed()
    yield bed
    bed.goes_on.set()
    bed.line.close()
    bed.threads.join()


def test_each_is_told_its_ids(bed: Bed) -> None:
    bed.goes_on.set()
    for number in range(100):
        bed.line.put(Asked(number))
    told = [bed.told.get(timeout=WAIT_S) for _ in range(100)]
    assert sorted(told) == [(number, b"%d" % number) for number in range(100)]


def test_who_left_costs_nothing(bed: Bed) -> None:
    bed.goes_on.set()
    bed.line.put(Asked(1, gone=True))
    bed.line.put(Asked(2))
    assert bed.told.get(timeout=WAIT_S) == (2, b"2")
    assert bed.begun.get(timeout=WAIT_S) == 2


def test_what_fails_goes_on_without_its_ids_and_the_threads_go_on(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    bed.goes_on.set()
    for number in range(-2 * THREADS, 0):
        bed.line.put(Asked(number))
    assert sorted(bed.told.get(timeout=WAIT_S) for _ in range(2 * THREADS)) == [
        (number, None) for number in range(-2 * THREADS, 0)
    ]
    bed.line.put(Asked(1))
    assert bed.told.get(timeout=WAIT_S) == (1, b"1")
    assert bed.threads.failures == 2 * THREADS
    assert caplog.text.count("routed without its prefix") == 1


def test_the_time_in_line_counts(bed: Bed) -> None:
    bed.now_s = DEADLINE_S + 1.0
    bed.line.put(Asked(7, arrived_s=0.5))
    assert bed.begun.get(timeout=WAIT_S) == 7
    bed.threads.expire()
    assert bed.told.get(timeout=WAIT_S) == (7, None)


def test_what_takes_too_long_goes_on_without_its_ids_once(bed: Bed) -> None:
    """In work, and in line behind it."""
    for number in range(THREADS + 3):
        bed.line.put(Asked(number))
    for _ in range(THREADS):
        bed.begun.get(timeout=WAIT_S)
    bed.now_s = DEADLINE_S - 0.1
    bed.threads.expire()
    assert bed.told.empty()
    bed.now_s = DEADLINE_S + 0.1
    bed.threads.expire()
    told = sorted(bed.told.get(timeout=WAIT_S)[0] for _ in range(THREADS + 3))
    assert told == list(range(THREADS + 3))
    assert bed.threads.late == THREADS + 3
    bed.goes_on.set()
    bed.line.put(Asked(99, arrived_s=bed.now_s))
    assert bed.told.get(timeout=WAIT_S) == (99, b"99")
    assert bed.told.empty()
