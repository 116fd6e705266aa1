"""The connection to the node: made as soon as there is one, and found again by the native client after the
node was lost. While it does not answer, no caller waits for it: a thread asks it (see Seeker), and the
executor only reads whether it is up.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from moonpool import _native
from moonpool.connectors.seeker import Seeker
from moonpool.connectors.tensorrt_llm.compat import Log
from moonpool.connectors.tensorrt_llm.settings import Settings
from moonpool.core.errors import Error, Unavailable
from moonpool.core.store.keys import BLOCK_NAME_BYTES

TIMEOUT_S = 1.0
LONG_WAIT_S = 0.2 * TIMEOUT_S  # a lookup that took longer has waited for a peer that says nothing

Views = list[memoryview]


class Held:
    """Objects that are pinned where they lie; while this lives, no node evicts them. sizes: of each, in
    bytes; far: of each, whether it lies on another host."""

    def __init__(self, client: _native.Client, pin: _native.Pin, objects: int) -> None:
        self._client, self._pin = client, pin
        self._names = pin.names[:objects]
        rows = pin.objects[:objects]
        self.sizes: list[int] = [size for size, _ in rows]
        self.far: list[bool] = [far for _, far in rows]

    def __len__(self) -> int:
        return len(self._names)

    def views(self, which: Sequence[int]) -> list[memoryview | None]:
        """Memory that stays readable, and the same, whatever happens to the node; None for what is gone. What
        is near is not copied, what is far is read now. Raises Error when its node does not answer."""
        return list(self._client.pinned_views(self._pin, [self._names[at] for at in which]))


class Connection:
    """One client of a node, and a native thread for saves."""

    def __init__(self, client: _native.Client) -> None:
        self._client = client
        self._worker = _native.Worker(client, threads=1)
        self._turn = threading.Lock()
        self._done = select.poll()
        self._done.register(self._worker.eventfd, select.POLLIN)

    @classmethod
    def dial(cls, settings: Settings, fingerprint: bytes) -> Connection:
        """Raises Unavailable without a node, AuthError when the token does not fit."""
        return cls(settings.dial(fingerprint, TIMEOUT_S))

    def hold(self, names: Sequence[bytes], width: int) -> Held | None:
        """The objects of the longest prefix of blocks of ``width`` names that are all there, pinned where
        they lie; None when there are none. Raises Error when the pool does not answer: its node is away, or
        the call waited in vain. A reason that came at once (a node of another host is away, pins hold their
        share of the memory) is a miss: the next lookup may be a hit."""
        began_s = time.monotonic()
        blocks, pin, _, why = self._client.longest_prefix(list(names), width, True)
        waited = time.monotonic() - began_s > LONG_WAIT_S or not self._client.connected
        if pin is None and why and not blocks and waited:
            raise Unavailable(why, operation="longest_prefix")
        return None if pin is None else Held(self._client, pin, blocks * width)

    def exists(self, names: Sequence[bytes]) -> bytes:
        """For each name 1: it is there, 0: it is not, 2: it is not known. Raises Error when the pool does
        not answer."""
        return self._client.exists(list(names))

    def ask(self) -> None:
        """Raises Error when the pool does not answer."""
        self.hold([bytes(BLOCK_NAME_BYTES)], 1)

    @property
    def life(self) -> bytes:
        """Another value after the node has been another one, and none before its first answer."""
        return self._client.incarnation

    def save(self, submit: Callable[[_native.Worker], int]) -> Any:
        """The answer to what ``submit`` handed over. The native side answers every ticket, at the latest
        TIMEOUT_S after the last progress, and until then the memory it was given is in use."""
        with self._turn:
            ticket = submit(self._worker)
            while True:
                for number, answer in self._worker.poll():
                    if number == ticket:
                        return answer
                self._done.poll()

    @property
    def connected(self) -> bool:
        """Whether the node was there at the last call."""
        return self._client.connected

    def close(self) -> None:
        with self._turn:
            self._worker.close()
        self._client.close()


class Pool:
    """The connection as soon as there is one. Says once when there is no pool, and when it is lost and
    back."""

    def __init__(self, dial: Callable[[], Connection], *, address: str, log: Log) -> None:
        self._dial = dial
        self._address = address
        self._log = log
        self._dialling = threading.Lock()
        self._connection: Connection | None = None
        self._seeker = Seeker(self._seek)

    def open(self, *, required: bool) -> None:
        """Dials once. Raises the error only when the pool is ``required``."""
        try:
            self.reach()
        except Error as error:
            if required:
                raise
            self.failed(error)

    def connection(self) -> Connection | None:
        """The connection, unless the pool was silent when last asked. Never waits."""
        return self._connection if self._seeker.up else None

    def reach(self) -> Connection:
        """The connection, however the pool answered before: for callers that need one. Raises Error."""
        with self._dialling:
            if self._seeker.closed:
                raise Unavailable("this engine has ended", operation="connect")
            if self._connection is None:
                self._connection = self._dial()
            return self._connection

    def failed(self, error: object) -> None:
        """The pool does not answer: from now on only a thread of this object asks, until it does."""
        if self._seeker.lost():
            self._log.warning(
                "the pool at %s does not answer (%s); prompts are computed until it does",
                self._address,
                error,
            )

    def _seek(self) -> None:
        self.reach().ask()
        self._log.info("the pool at %s answers", self._address)

    def close(self) -> None:
        self._seeker.close()
        with self._dialling:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
