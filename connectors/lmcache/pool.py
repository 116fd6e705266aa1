"""The connection to the node: made at once or as soon as there is one, and found again by the native client
after the node was lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from moonpool import _native
from moonpool.core.errors import Error

RETRY_S = 0.5


class Pool:
    """One client. While there is no node a thread tries every RETRY_S seconds; ``joined`` is called with the
    client, once, by whoever connects. Says once when there is no node, and when it is joined, lost and back.
    """

    def __init__(
        self,
        connect: Callable[[], _native.Client],
        joined: Callable[[_native.Client], None],
        *,
        address: str,
        log: logging.Logger,
        required: bool = False,
    ) -> None:
        """Raises what ``connect`` raises only when the pool is ``required``."""
        self._connect, self._joined = connect, joined
        self._address, self._log = address, log
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._client: _native.Client | None = None
        self._trouble = ""
        self._thread: threading.Thread | None = None
        try:
            self._join()
        except Error as error:
            if required:
                raise
            self._trouble = str(error)
            log.warning(
                "moonpool: no pool at %s (%s); this goes on without it and joins when a node appears there",
                address,
                error,
            )
            self._thread = threading.Thread(target=self._wait_for_node, name="moonpool-join", daemon=True)
            self._thread.start()

    @property
    def client(self) -> _native.Client | None:
        """None: there was no node yet."""
        return self._client

    def heard(self, error: str) -> None:
        """What the pool said to a call: "" or a sentence. A trouble is logged when it begins and ends."""
        if self._client is None:
            return
        with self._lock:
            before, self._trouble = self._trouble, error
        if error and not before:
            self._log.warning("moonpool: the pool at %s does not answer (%s)", self._address, error)
        elif before and not error:
            self._log.info("moonpool: the pool at %s answers again", self._address)

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._client is not None:
            self._client.close()

    def _join(self) -> None:
        client = self._connect()
        self._joined(client)
        self._client = client

    def _wait_for_node(self) -> None:
        while not self._closing.wait(RETRY_S):
            try:
                self._join()
            except Error as error:
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    self._log.warning("moonpool: still no pool at %s (%s)", self._address, error)
                continue
            self._trouble = ""
            self._log.info("moonpool: joined the pool at %s", self._address)
            return
