"""Threads that tokenise and decide. They take requests with text from the relay's queue, so the relay does
not wait for the GIL; tokenizers release it while they work.

A request that takes longer than DEADLINE_S, queue included, goes on without its ids.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from moonpool._native import ProxyRequest

DEADLINE_S = 5.0
THREADS = 2
THREAD_NAME = "moonpool-tokens"
JOIN_S = 1.0

_log = logging.getLogger("moonpool.proxy")


class TokenizerThreads:
    """The threads.

    next_text:    waits for the next request; None: the relay has ended.
    overdue_text: takes a queued request that arrived before the given time; None: there is none.
    tokenise:     the ids of a request; blocks.
    told:         called once for each request with its ids, or with None after the deadline.
    clock:        the relay's, in seconds.
    """

    def __init__(
        self,
        next_text: Callable[[], ProxyRequest | None],
        overdue_text: Callable[[float], ProxyRequest | None],
        tokenise: Callable[[ProxyRequest], bytes | None],
        told: Callable[[ProxyRequest, bytes | None], None],
        clock: Callable[[], float],
    ) -> None:
        self._next = next_text
        self._overdue = overdue_text
        self._tokenise = tokenise
        self._told = told
        self._clock = clock
        self._numbers = itertools.count()
        # Requests in work and their arrival. The thread that removes an entry answers it.
        self._working: dict[int, tuple[ProxyRequest, float]] = {}
        self.late = 0
        self.failures = 0
        self._threads = [
            threading.Thread(target=self._work, name=THREAD_NAME, daemon=True) for _ in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def expire(self) -> None:
        """Answers requests after their deadline. Called several times a second."""
        since_s = self._clock() - DEADLINE_S
        for number, (_, arrived_s) in list(self._working.items()):
            if arrived_s < since_s and self._answer(number, None):
                self.late += 1
        while (request := self._overdue(since_s)) is not None:
            self.late += 1
            self._told(request, None)

    def join(self) -> None:
        """Joins the threads after the relay's end, except one that works on a long text."""
        for thread in self._threads:
            thread.join(JOIN_S)

    def _work(self) -> None:
        _name_this_thread()
        while (request := self._next()) is not None:
            if not request.gone:
                number = next(self._numbers)
                self._working[number] = request, request.arrived_s
                self._answer(number, self._ids_of(request))
            del request  # its body may be large, and the next one far

    def _ids_of(self, request: ProxyRequest) -> bytes | None:
        try:
            return self._tokenise(request)
        except BaseException as error:  # a panic of a tokenizer is no Exception; the thread goes on
            self.failures += 1
            if self.failures == 1:
                _log.warning("a prompt has no token ids, so it is routed without its prefix: %r", error)
            return None

    def _answer(self, number: int, ids: bytes | None) -> bool:
        working = self._working.pop(number, None)
        if working is None:
            return False
        self._told(working[0], ids)
        return True


def are_at_work() -> bool:
    """Whether a thread of this process is still tokenising after its ``join``."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


def _name_this_thread() -> None:
    """Names the thread for the system, which shows its CPU time by name."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD_NAME)
