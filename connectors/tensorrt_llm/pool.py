"""The connection to the node: made as soon as there is one, and found again by the native client after the
node was lost. While it does not answer, nobody waits for it: a thread asks it (see Seeker), and the executor
only reads whether it is up.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

from moonpool import _native
from moonpool.connectors.seeker import Seeker
from moonpool.connectors.tensorrt_llm.compat import Log
from moonpool.connectors.tensorrt_llm.settings import Settings
from moonpool.core import paths
from moonpool.core.control_tls import control_client_of
from moonpool.core.errors import Error, Unavailable
from moonpool.core.keys import BLOCK_NAME_BYTES

TIMEOUT_S = 1.0

Views = list[memoryview]


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
        socket = str(settings.socket())
        client = _native.Client(
            socket,
            paths.client_token(socket),
            settings.tenant,
            settings.namespace,
            fingerprint,
            TIMEOUT_S,
            tls=control_client_of(socket),
        )
        client.connect()
        return cls(client)

    def views(self, names: Sequence[bytes], width: int) -> Views:
        """The objects of the longest prefix of blocks of ``width`` names that are all there: memory that
        stays readable, and the same, whatever happens to the node. Raises Error when the pool does not
        answer."""
        blocks, pin, _, why = self._client.longest_prefix(list(names), width, True)
        if pin is None:
            if why and not blocks:
                raise Unavailable(why, operation="longest_prefix")
            return []
        try:
            found: list[Any] = self._client.pinned_views(pin, list(names[: blocks * width]))
        finally:
            pin.release()  # a view pins its own object
        whole = next((at for at, view in enumerate(found) if view is None), len(found)) // width
        return found[: whole * width]

    def ask(self) -> None:
        """Raises Error when the pool does not answer."""
        self.views([bytes(BLOCK_NAME_BYTES)], 1)

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
        """The connection, however the pool answered before: for who cannot do without. Raises Error."""
        with self._dialling:
            if self._seeker.closed:
                raise Unavailable("this engine has ended", operation="connect")
            if self._connection is None:
                self._connection = self._dial()
            return self._connection

    def failed(self, error: object) -> None:
        """The pool does not answer: from now on nobody asks but a thread of this object, until it does."""
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
