"""A thread with a queue of jobs. An event descriptor becomes readable when a job has ended. The adapter has
one queue for stores, one for lookups and one for loads, so that none waits behind another. Between its jobs
the thread runs a chore now and then."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Answer = TypeVar("Answer")
JOBS_MAX = 4096
ANSWERS_MAX = 65536  # LMCache never takes those of lookups that it gave up
CHORE_S = 10.0


class Notifier(Protocol):
    """LMCache's event notifier: a descriptor that a poll loop waits on."""

    def fileno(self) -> int:
        """The descriptor."""

    def notify(self) -> None:
        """Makes the descriptor readable."""

    def close(self) -> None:
        """Closes the descriptor."""


class JobQueue(Generic[Answer]):
    """Jobs run one after the other. Every job gets an answer: ``otherwise`` when it raises, when JOBS_MAX
    wait before it, or when the lane is closed before it ran. ``chore`` runs after each job and, without jobs,
    every CHORE_S.
    """

    def __init__(
        self, name: str, notifier: Notifier, log: logging.Logger, chore: Callable[[], None] = lambda: None
    ) -> None:
        self.notifier = notifier
        self._log = log
        self._chore = chore
        self._guard = threading.Lock()
        self._answers: dict[int, Answer] = {}
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], Answer], Answer] | None] = queue.SimpleQueue()
        self._closed = False
        self._gone = False  # the descriptor
        self._thread = threading.Thread(target=self._run, name=f"moonpool-{name}", daemon=True)
        self._thread.start()

    def submit(self, number: int, job: Callable[[], Answer], otherwise: Answer) -> None:
        """Queues ``job``. Its answer, or ``otherwise``, is filed under ``number``. Never waits."""
        with self._guard:
            if not self._closed and self._queue.qsize() < JOBS_MAX:
                self._queue.put((number, job, otherwise))
                return
        self._say(number, otherwise)

    def take(self, number: int) -> Answer | None:
        """The answer, once; None when there is none."""
        with self._guard:
            return self._answers.pop(number, None)

    def take_all(self) -> dict[int, Answer]:
        """All answers that were not taken yet, by number."""
        with self._guard:
            answers, self._answers = self._answers, {}
        return answers

    def close(self) -> None:
        """Waits for the running job, answers the others and closes the descriptor."""
        with self._guard:  # nothing is put behind the None
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        with self._guard:
            self._gone = True
            self.notifier.close()

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=CHORE_S)
            except queue.Empty:
                self._chore()
                continue
            if item is None:
                return
            number, job, otherwise = item
            try:
                answer = otherwise if self._closed else job()
            except Exception:  # the boundary: LMCache's server goes on
                self._log.exception("moonpool: an unexpected error; the operation counts as failed")
                answer = otherwise
            self._say(number, answer)
            self._chore()

    def _say(self, number: int, answer: Answer) -> None:
        with self._guard:
            self._answers[number] = answer
            if len(self._answers) > ANSWERS_MAX:
                del self._answers[next(iter(self._answers))]
            if not self._gone:
                self.notifier.notify()
