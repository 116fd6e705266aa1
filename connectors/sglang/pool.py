"""SGLang's way to the node. Its storage threads may wait, so they dial and run the operations themselves.

Without a node a call costs nothing but, every RETRY_S seconds, one attempt to connect.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from moonpool import _native
from moonpool.connectors.blocking_worker import BlockingWorker
from moonpool.connectors.node_connection import NodeConnection, State
from moonpool.connectors.sglang.settings import Settings
from moonpool.connectors.weights import Pending
from moonpool.core.errors import ConfigError, Error

RETRY_S = 0.5
REST_S = 5.0
TIMEOUT_S = 2.0
# A call that took so long has waited in vain: one silent node may take three quarters of TIMEOUT_S.
LONG_WAIT_S = 0.7 * TIMEOUT_S
# Beside the pool's own: a socket's folder or a token that may not be read, a file that is half written.
NO_POOL = (Error, OSError, ValueError)


class PoolClient:
    """One client of the node, with a worker for each kind of operation, so that a load never waits for saves,
    nor a lookup for a load."""

    def __init__(self, client: _native.Client) -> None:
        """client: a connected client, which this owns from now on."""
        self._client = client
        self.lookups, self.loads, self.saves = (BlockingWorker(client) for _ in range(3))

    @classmethod
    def dial(cls, settings: Settings, fingerprint: bytes) -> PoolClient:
        """Connects. Raises Unavailable without a node, AuthError when the token does not fit."""
        return cls(settings.dial(fingerprint, TIMEOUT_S))

    def close(self) -> None:
        """Waits for the operations under way, then disconnects."""
        for worker in (self.lookups, self.loads, self.saves):
            worker.close()
        self._client.close()


class PoolConnection(NodeConnection[PoolClient]):
    """Dials inside the engine's calls, and leaves a pool that made one of them wait alone for REST_S."""

    def __init__(
        self,
        dial: Callable[[], PoolClient],
        *,
        address: str,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """dial: connects; raises one of NO_POOL without a node, Pending while the weights have no digest.
        address: of the node, for the log. clock: seconds, monotonic."""
        super().__init__(dial, address=address, log=log, failures=NO_POOL, background=False)
        self._clock = clock
        self._dialling = threading.Lock()
        self._next_s = self._rests_until_s = float("-inf")
        self._pending = False  # whether the engine's KV had no name yet
        self._silence = self._partial = ""  # what the log has said of the answers to calls

    def client_now(self) -> PoolClient | None:
        """The client, or None without a node and while the pool rests after ``ended``. Dials when the last
        attempt is RETRY_S ago and no other thread dials."""
        now_s = self._clock()
        if now_s < self._rests_until_s:
            return None
        absent = self.state is State.ABSENT and now_s >= self._next_s
        if absent and self._dialling.acquire(blocking=False):
            try:
                return self._attempt()
            except NO_POOL as error:
                self._attempt_failed(error)
            finally:
                self._dialling.release()
        return self.client

    def answered(self, error: str) -> None:
        """A call was answered: error: "" or why not. The log says when a trouble begins and when it ends."""
        if error and not self._silence:
            self._log.warning(self._messages.silent, self._address, error)
        elif self._silence and not error:
            self._log.info(self._messages.answers, self._address)
        self._silence = error

    def answered_in_part(self, why: str) -> None:
        """A lookup in several nodes was answered: why: "" or why not by all of them."""
        if why and not self._partial:
            self._log.warning(
                "moonpool: the pool at %s answers in part only (%s); what is not found is computed",
                self._address,
                why,
            )
        elif self._partial and not why:
            self._log.info("moonpool: the pool at %s answers in full again", self._address)
        self._partial = why

    def ended(self, seconds: float, *, answered: bool = True) -> None:
        """A call took ``seconds``. After the longest wait and a trouble, a process in the pool hangs: as each
        call would wait anew, and SGLang makes one after the other, none is made for REST_S."""
        if seconds >= LONG_WAIT_S and not (answered and not self._silence and not self._partial):
            self._rests_until_s = self._clock() + REST_S

    def _attempt_failed(self, error: Exception, *, quiet: bool = False) -> None:
        self._next_s = self._clock() + (REST_S if isinstance(error, TimeoutError) else RETRY_S)
        if isinstance(error, Pending):
            if not self._pending:
                self._log.info("moonpool: %s; this engine serves without the pool until then", error)
            self._pending = True
        elif isinstance(error, ConfigError) and self._pending:  # the weights that were read have no name
            self._log.warning("moonpool: this engine serves without the pool: %s", error)
            self.close()
        else:
            super()._attempt_failed(error, quiet=quiet)
