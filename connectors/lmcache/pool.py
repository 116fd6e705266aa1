"""The connection to the node: made at once or as soon as there is one, and found again after the node was
lost. While the node does not answer no caller waits for it: see Seeker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from moonpool import _native
from moonpool.connectors.seeker import Seeker
from moonpool.core.errors import AuthError, Error, ProtocolError, Timeout, Unavailable

# What says that the node does not answer; any other error is about the call.
_SILENCE = (AuthError, ProtocolError, Timeout, Unavailable)
_NOBODY = ["?"]  # asked for only to hear an answer


class Pool:
    """One client. ``joined`` is called with it whenever the node answers for the first time or again, before
    any other caller gets it; ``left`` when it does not answer any more. Says once that there is no node, and
    when it is joined, lost and back.
    """

    def __init__(
        self,
        connect: Callable[[], _native.Client],
        joined: Callable[[_native.Client], None],
        *,
        address: str,
        log: logging.Logger,
        left: Callable[[], None] = lambda: None,
        required: bool = False,
    ) -> None:
        """Raises what ``connect`` raises only when the pool is ``required``."""
        self._connect, self._joined = connect, joined
        self._address, self._log = address, log
        self._client: _native.Client | None = None
        self._trouble = ""
        self._seeker = Seeker(self._seek, left)
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
            self._seeker.lost()

    @property
    def client(self) -> _native.Client | None:
        """None: the node did not answer when it was last asked, or there was none yet. Never waits."""
        return self._client if self._seeker.up else None

    def heard(self, error: Error) -> None:
        """A call failed. Where the node did not answer, only a thread of this object asks it from now
        on."""
        if isinstance(error, _SILENCE):
            self.lost(str(error))

    def lost(self, why: str) -> None:
        """The node does not answer."""
        if self._seeker.lost():
            self._trouble = why
            self._log.warning(
                "moonpool: the pool at %s does not answer (%s); until it does, this goes on without it",
                self._address,
                why,
            )

    def close(self) -> None:
        self._seeker.close()
        if self._client is not None:
            self._client.close()

    def _join(self) -> None:
        client = self._connect()
        try:
            self._joined(client)
        except BaseException:
            client.close()
            raise
        self._client = client

    def _seek(self) -> None:
        known = self._client
        try:
            if known is None:
                self._join()
            else:
                known.exists(_NOBODY)
                self._joined(known)
        except Exception as error:  # the boundary: whatever it is, it is said once and tried again
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._log.warning("moonpool: still no pool at %s (%s)", self._address, error)
            raise
        self._trouble = ""
        self._log.info(
            "moonpool: joined the pool at %s" if known is None else "moonpool: the pool at %s answers again",
            self._address,
        )
