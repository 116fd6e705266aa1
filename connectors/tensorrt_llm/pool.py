"""The connection to the node: made as soon as there is one, and found again by the native client after the
node was lost. While it does not answer, nobody waits for it: a thread asks it, after REST_S and then ever
more seldom, and the executor only reads whether it is up.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

from moonpool import _native
from moonpool.connectors.tensorrt_llm.compat import Log
from moonpool.connectors.tensorrt_llm.settings import Settings
from moonpool.core import paths
from moonpool.core.control_tls import control_client_of
from moonpool.core.errors import Error, Unavailable
from moonpool.core.keys import BLOCK_NAME_BYTES

REST_S = 1.0
REST_MAX_S = 30.0
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
        self._lock = threading.Lock()  # what follows
        self._up = True
        self._seeker: threading.Thread | None = None
        self._closed = threading.Event()

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
        return self._connection if self._up else None

    def reach(self) -> Connection:
        """The connection, however the pool answered before: for who cannot do without. Raises Error."""
        with self._dialling:
            if self._closed.is_set():
                raise Unavailable("this engine has ended", operation="connect")
            if self._connection is None:
                self._connection = self._dial()
            return self._connection

    def failed(self, error: object) -> None:
        """The pool does not answer: from now on nobody asks but a thread of this object, until it does."""
        with self._lock:
            if not self._up or self._closed.is_set():
                return
            self._up = False
            self._log.warning(
                "the pool at %s does not answer (%s); prompts are computed until it does",
                self._address,
                error,
            )
            self._seeker = threading.Thread(target=self._seek, name="moonpool-seek", daemon=True)
            self._seeker.start()

    def _seek(self) -> None:
        rest_s = REST_S
        while not self._closed.wait(rest_s):
            rest_s = min(2 * rest_s, REST_MAX_S)
            try:
                self.reach().ask()
            except Error:
                continue
            with self._lock:
                self._up = True
            self._log.info("the pool at %s answers", self._address)
            return

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            seeker = self._seeker
        if seeker is not None:
            seeker.join()
        with self._dialling:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
