"""Native operations that the calling thread runs itself, for engines whose threads may wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from moonpool import _native


class BlockingWorker:
    """Runs one operation after the other on the threads that ask for it, without the interpreter's lock. A
    thread of its own would have to be woken for each call, which on a busy host costs more than the call. One
    caller at a time, so that ``close`` can wait for it."""

    def __init__(self, client: _native.Client) -> None:
        """client: the connection that the operations use; stays the caller's to close."""
        self._worker = _native.Worker(client, threads=0)
        self._turn = threading.Lock()

    def run(self, submit: Callable[[_native.Worker], int]) -> Any:
        """The answer to the operation that ``submit`` hands over, at the latest the client's time-out after
        the last progress; until then the memory of the operation is in use. Raises Closed after close()."""
        with self._turn:
            submit(self._worker)
            ((_, answer),) = self._worker.poll()
            return answer

    def release(self, pin_id: int) -> None:
        """Releases a pin that an operation of this worker took; 0 is no pin."""
        if pin_id:
            self._worker.release(pin_id)

    def close(self) -> None:
        """Waits for the operation under way; later ones raise Closed."""
        with self._turn:
            self._worker.close()
