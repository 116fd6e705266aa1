"""The one family of errors that Moonpool raises.

A miss is a value, never an error. Every error carries the same five fields, so that a caller can tell what
was attempted, on what, with whom, and how much was at stake; ``str(error)`` is one clear sentence that names
the thing and, where the user can do something about it, the remedy.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar


class Error(Exception):
    """Base of every error that Moonpool raises.

    operation: the verb that failed ("get", "put", "connect", "config", ...), or "".
    key:       the object's name, the config key or the argument that the error is about, or None.
    peer:      the other side: a socket path, "host:port", or None.
    bytes:     how many bytes the operation was about, or None.
    cause:     the exception or errno text underneath, or None. An exception is also chained as ``__cause__``.
    """

    _fields: ClassVar[tuple[str, ...]] = ("operation", "key", "peer", "bytes")

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        key: bytes | str | None = None,
        peer: str | None = None,
        bytes: int | None = None,
        cause: BaseException | str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.operation = operation
        self.key = key
        self.peer = peer
        self.bytes = bytes
        self.cause = cause
        if isinstance(cause, BaseException):
            self.__cause__ = cause

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross process borders (multiprocessing, engines' workers): keep the fields when pickled."""
        fields = {name: getattr(self, name) for name in self._fields}
        cause = None if self.cause is None else str(self.cause)
        return partial(type(self), self.message, **fields, cause=cause), ()


class ConfigError(Error, ValueError):
    """A setting is unknown, malformed or out of range; the message names it, where it came from and the
    remedy.
    """


class InvalidArgument(Error, ValueError):
    """A call was given something that cannot be meant: wrong type or count, an empty key, a short buffer."""


class TooLarge(InvalidArgument):
    """A key, an object, its parts or a frame exceed a limit; the message names the limit and its key."""


class Unavailable(Error, ConnectionError):
    """The node is not there, or was lost during the call. Nothing is retried inside; the next call may
    reconnect.
    """


class AuthError(Error):
    """The handshake was refused: wrong or missing token, or another user's socket."""


class Timeout(Error, TimeoutError):
    """No progress within the deadline."""


class Closed(Error):
    """The handle was closed before this call."""


class Forked(Error):
    """The handle was made by a parent process; open a new one after fork."""


class ProtocolError(Error):
    """The peer sent bytes that are no valid frame of a version that we speak."""


class CorruptObject(Error):
    """A stored object's bytes do not match their checksum; they were not returned."""


class TransferError(Error):
    """A transfer between engines failed or was cancelled, as a whole or in some of its slices.

    ``bytes`` is what was asked for. Besides the fields of Error:

    path:       how the first slice that failed was last tried: the transport and both addresses, or None.
    bytes_done: how many bytes are where they should be, in whole slices.
    states:     one byte a slice: 0 waiting, 1 done, 2 failed, 3 cancelled (see moonpool.SliceState); empty
                when nothing was started. A slice that is not done may have been written in part.
    settled:    whether no byte of it can reach memory any more: the peer has confirmed it where a write
                failed. False: bytes may still land, over newer ones.
    """

    _fields = (*Error._fields, "path", "bytes_done", "states", "settled")

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        bytes_done: int = 0,
        states: bytes = b"",
        settled: bool = True,
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.path = path
        self.bytes_done = bytes_done
        self.states = states
        self.settled = settled


__all__ = [
    "AuthError",
    "Closed",
    "ConfigError",
    "CorruptObject",
    "Error",
    "Forked",
    "InvalidArgument",
    "ProtocolError",
    "Timeout",
    "TooLarge",
    "TransferError",
    "Unavailable",
]
