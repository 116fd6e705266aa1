"""The connection to the node, for threads that may wait: made as soon as there is a node, and found again by
the native client after the node was lost.

Without a node a call costs nothing but, every RETRY_S seconds, one attempt to connect.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from moonpool import _native
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


class Lane:
    """Operations that the calling thread runs itself, without the interpreter's lock: SGLang's storage
    threads may wait, and a thread of our own would have to be woken for each call, which on a busy host costs
    more than the call. One caller at a time, so that ``close`` can wait for it."""

    def __init__(self, client: _native.Client) -> None:
        self._worker = _native.Worker(client, threads=0)
        self._turn = threading.Lock()

    def run(self, submit: Callable[[_native.Worker], int]) -> Any:
        """The answer to what ``submit`` hands over, at the latest TIMEOUT_S after the last progress. Raises
        Closed after close()."""
        with self._turn:
            submit(self._worker)
            ((_, answer),) = self._worker.poll()
            return answer

    def release(self, pin_id: int) -> None:
        """Gives a pin back that this lane was given; harmless for 0."""
        if pin_id:
            self._worker.release(pin_id)

    def close(self) -> None:
        with self._turn:
            self._worker.close()


class Lanes:
    """One connection: a load never stands behind saves, nor a lookup behind a load."""

    def __init__(self, client: _native.Client) -> None:
        self._client = client
        self.lookups, self.loads, self.saves = Lane(client), Lane(client), Lane(client)

    @classmethod
    def dial(cls, settings: Settings, fingerprint: bytes) -> Lanes:
        """Connects. Raises Unavailable without a node, AuthError when the token does not fit."""
        return cls(settings.dial(fingerprint, TIMEOUT_S))

    def close(self) -> None:
        for lane in (self.lookups, self.loads, self.saves):
            lane.close()
        self._client.close()


class Pool:
    """The lanes as soon as there are some. Says once when there is no node, and when it is joined, lost and
    back."""

    def __init__(
        self,
        dial: Callable[[], Lanes],
        *,
        address: str,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dial = dial
        self._address = address
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._lanes: Lanes | None = None
        self._next_s = 0.0
        self._rests_until_s = float("-inf")
        self._closed = False
        self._trouble = self._part = ""
        self._pending = False  # whether there was no name for this engine's KV yet

    def open(self, *, required: bool) -> None:
        """Dials once. Raises the error only when the pool is ``required``. What dials may raise Pending."""
        with self._lock:
            try:
                self._lanes = self._dial()
            except NO_POOL as error:
                if required:
                    raise
                self._no_pool(error)

    def lanes(self) -> Lanes | None:
        """The connection, or None. Dials when the last attempt is RETRY_S ago and no other thread dials.
        None, too, while it rests after ended()."""
        if self._clock() < self._rests_until_s:
            return None
        if self._lanes is not None or self._closed or self._clock() < self._next_s:
            return self._lanes
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._lanes is None and not self._closed:
                self._lanes = self._dial()
                self._trouble = ""
                self._log.info("moonpool: joined the pool at %s", self._address)
        except NO_POOL as error:
            self._no_pool(error)
        finally:
            self._lock.release()
        return self._lanes

    def heard(self, error: str) -> None:
        """What the pool said to a call: "" or a sentence. A trouble is logged when it begins and ends."""
        if error and not self._trouble:
            self._log.warning(
                "moonpool: the pool at %s does not answer (%s); prompts are computed", self._address, error
            )
        elif self._trouble and not error:
            self._log.info("moonpool: the pool at %s answers again", self._address)
        self._trouble = error

    def heard_in_part(self, why: str) -> None:
        """Why a lookup for which more than the own node was asked had no answer from all of them, or ""."""
        if why and not self._part:
            self._log.warning(
                "moonpool: the pool at %s answers in part only (%s); what is not found is computed",
                self._address,
                why,
            )
        elif self._part and not why:
            self._log.info("moonpool: the pool at %s answers in full again", self._address)
        self._part = why

    def ended(self, seconds: float, *, answered: bool = True) -> None:
        """A call took so long. A process in the pool hangs when it was the longest wait and there is trouble;
        as each call would wait anew, and SGLang makes one after the other, none is made for REST_S."""
        if seconds >= LONG_WAIT_S and not (answered and not self._trouble and not self._part):
            self._rests_until_s = self._clock() + REST_S

    def close(self) -> None:
        with self._lock:
            self._closed = True
            lanes, self._lanes = self._lanes, None
        if lanes is not None:
            lanes.close()

    def _no_pool(self, error: Exception) -> None:
        self._next_s = self._clock() + (REST_S if isinstance(error, TimeoutError) else RETRY_S)
        if isinstance(error, Pending):
            if not self._pending:
                self._log.info("moonpool: %s; this engine serves without the pool until then", error)
            self._pending = True
            return
        if isinstance(error, ConfigError) and self._pending:  # what was read has no name
            self._closed = True
            self._log.warning("moonpool: this engine serves without the pool: %s", error)
            return
        if not self._trouble:
            self._log.warning(
                "moonpool: no pool at %s (%s); this engine serves without it and joins when a node appears "
                "there",
                self._address,
                error,
            )
        self._trouble = str(error)
