"""The connection to the node: made at start, or in the background as soon as there is a node.

A half asks ``link.pool`` each time; None means that there is no pool now, which is a miss and nothing else.
Once connected, the native client finds its way back by itself after the node was lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from moonpool.connectors.vllm.pool import Pool
from moonpool.core.errors import Error

RETRY_S = 0.5

Dial = Callable[[], Pool]


class Link:
    """Owns the pool and, while there is none, one daemon thread that dials every RETRY_S seconds."""

    def __init__(self, dial: Dial, *, address: str, log: logging.Logger, retry_s: float = RETRY_S) -> None:
        self._dial = dial
        self._address = address
        self._log = log
        self._retry_s = retry_s
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.pool: Pool | None = None

    def open(self, *, required: bool, quiet: bool = False) -> None:
        """Dials once. Without a node: raises the error when the pool is ``required``, otherwise says so in
        one sentence (unless ``quiet``) and goes on trying in the background."""
        try:
            self.pool = self._dial()
        except Error as error:
            if required:
                raise
            self._log.log(
                logging.DEBUG if quiet else logging.WARNING,
                "moonpool: no pool at %s (%s); this engine serves without it and joins when a node "
                "appears there",
                self._address,
                error,
            )
            self._thread = threading.Thread(target=self._join, name="moonpool-join", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread and the connection. Loads and saves under way are finished or refused first."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            pool, self.pool = self.pool, None
        if pool is not None:
            pool.close()

    def _join(self) -> None:
        last = ""
        while not self._closing.wait(self._retry_s):
            try:
                pool = self._dial()
            except Error as error:
                if str(error) != last:  # a token that does not fit, say: worth a line, once
                    last = str(error)
                    self._log.debug("moonpool: still no pool at %s (%s)", self._address, error)
                continue
            with self._lock:
                self.pool = pool
            self._log.info("moonpool: joined the pool at %s", self._address)
            return
