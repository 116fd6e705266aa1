"""A pool that does not answer is asked by one thread, after REST_S and then ever more seldom; everybody else
only reads whether it is up. A node that hangs then costs its callers one wait, not one after another.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

REST_S = 1.0
REST_MAX_S = 30.0


class Seeker:
    """``ask`` waits for the pool and raises when it does not answer; it is called by the thread alone, and
    says itself what there is to say. ``left`` is called when the pool was up and is not any more, before
    anybody asks anew. Any thread may call.
    """

    def __init__(self, ask: Callable[[], None], left: Callable[[], None] = lambda: None) -> None:
        self._ask, self._left = ask, left
        self._lock = threading.Lock()  # what follows
        self._up = True
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def up(self) -> bool:
        """Whether the pool answered when it was last asked. Never waits."""
        return self._up

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def lost(self) -> bool:
        """The pool does not answer. False: that is known, or this is closed."""
        with self._lock:
            if not self._up or self._closed.is_set():
                return False
            self._up = False
            self._left()
            self._thread = threading.Thread(target=self._seek, name="moonpool-seek", daemon=True)
            self._thread.start()
            return True

    def close(self) -> None:
        """Waits for a question that is under way."""
        with self._lock:
            self._closed.set()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _seek(self) -> None:
        rest_s = REST_S
        while not self._closed.wait(rest_s):
            rest_s = min(2 * rest_s, REST_MAX_S)
            with contextlib.suppress(Exception):  # whatever it is, it is asked again
                self._ask()
                with self._lock:
                    self._up = True
                return
