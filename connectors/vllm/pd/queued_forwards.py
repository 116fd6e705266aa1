"""Forwards that are queued on a card: what is told of a step waits until the step has run."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from moonpool import _native

LOOK_S = 0.1  # how often the thread looks whether to end


class QueuedForwards:
    """Calls functions in their order, each when the forward behind which it was given has ended.

    ``then`` is called by the worker's thread and never waits; the functions run on a thread of their own.
    """

    def __init__(self, on_lost: Callable[[], object], log: logging.Logger) -> None:
        """on_lost: called once when the card is lost or a function raises; none is called any more then."""
        self._on_lost = on_lost
        self._log = log
        self._queue: queue.SimpleQueue[tuple[_native.Mark, Callable[[], object]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self.is_lost = False  # nothing is told any more
        self._thread = threading.Thread(target=self._run, name="moonpool-forwards", daemon=True)
        self._thread.start()

    def then(self, mark: _native.Mark, call: Callable[[], object]) -> None:
        """``call`` once ``mark`` is over."""
        self._queue.put((mark, call))

    def close(self, timeout_s: float) -> None:
        """What waits is dropped. timeout_s: for a function under way."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                mark, call = item
                while not mark.wait(LOOK_S):
                    if self._closing.is_set():
                        return
                if self._closing.is_set():
                    return
                call()
        except Exception as error:  # the card is lost, or of a step nothing can be told
            self._log.warning("moonpool: this engine hands nothing over any more: %s", error)
            self.is_lost = True
            self._on_lost()
