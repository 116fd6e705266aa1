"""``Metadata``: the interface of stores of names; and what all of them say alike.

Calls block for at most ``timeout_s`` (where a store needs several requests, together), may come from any
thread, and hold no connection between them.
"""

from __future__ import annotations

import http.client
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from moonpool.core.errors import AuthError, ConfigError, Error, ProtocolError, Timeout, Unavailable
from moonpool.core.printable import printable
from moonpool.core.service.addresses import Address
from moonpool.core.transfer.metadata.record import SegmentRecord, decode

LEASE_S = 8.0  # with what stores need to notice, a dead engine's name is gone within 10 s
TIMEOUT_S = 2.0
ANSWER_BYTES_MAX = 1 << 20


class NameTaken(ConfigError):
    """Another engine holds the name.

    held:   its record; None where that cannot be read.
    left_s: seconds until its lease ends, unless it is renewed.
    """

    def __init__(
        self, message: str, *, held: SegmentRecord | None = None, left_s: float = 0.0, **fields: object
    ) -> None:
        super().__init__(message, **fields)  # type: ignore[arg-type]
        self.held = held
        self.left_s = left_s


class Metadata(ABC):
    """A store of names.

    shown:   for logs and errors: kind and address, no password.
    towards: an address of the store; others reach this host by the address that leads there.
    lease_s: seconds that a name lives without a renewal.
    """

    shown: str
    towards: Address
    lease_s: float

    @abstractmethod
    def publish(self, record: SegmentRecord, *, dead: str = "") -> None:
        """Writes the name, or renews its lease; the same call does both.

        dead: the id of an engine that is known to have ended; its entry is replaced.
        Raises NameTaken while another engine's lease runs; Unavailable, Timeout, AuthError, ProtocolError.
        """

    @abstractmethod
    def withdraw(self, record: SegmentRecord) -> None:
        """Removes the name if it is still this engine's. Raises as ``publish``, never NameTaken."""

    @abstractmethod
    def resolve(self, tenant: str, name: str) -> SegmentRecord | None:
        """The living engine of a name; None without one. Raises as ``publish``, never NameTaken."""


def taken(record: SegmentRecord, text: bytes, left_s: float, shown: str) -> NameTaken:
    """The error of a name under which the store has the ``text`` of another engine."""
    held = None
    by = "another engine"
    try:
        held = decode(text, shown)
        by = f"the engine {held.id[:8]} at {printable(', '.join(held.addresses))}"
    except ProtocolError:
        pass
    return NameTaken(
        f"the name {record.name} is held by {by}, in {shown}; choose another name, or end that engine",
        held=held,
        left_s=left_s,
        operation="publish",
        key="name",
        peer=shown,
    )


def refused(shown: str, operation: str, why: str) -> AuthError:
    """The error of a store that does not accept our password or token; ``why`` has neither."""
    return AuthError(f"{shown} refuses this engine: {printable(why)}", operation=operation, peer=shown)


@contextmanager
def asking(shown: str, operation: str) -> Iterator[None]:
    """Raises one of our errors, which names the store, for all that a request can run into."""
    try:
        yield
    except Error:
        raise
    except TimeoutError as error:
        raise Timeout(f"{shown} did not answer in time", operation=operation, peer=shown) from error
    except OSError as error:
        why = printable(str(error), characters_max=200)
        raise Unavailable(f"{shown} cannot be reached: {why}", operation=operation, peer=shown) from error
    except (http.client.HTTPException, ValueError, msgspec.MsgspecError, RecursionError) as error:
        why = printable(f"{type(error).__name__}: {error}", characters_max=200)
        raise ProtocolError(f"{shown} answers garbage: {why}", operation=operation, peer=shown) from error
