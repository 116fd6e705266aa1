"""``Names``: opens peers by the names of their segments.

A peer that was found once is remembered: it is found again while the store is away, slow or empty. Whatever
the store says, an engine is taken for a name's only when its handshake shows the id of the name's record.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from moonpool.core.errors import ConfigError, Error, Unavailable
from moonpool.core.printable import printable
from moonpool.core.service.addresses import parse_address
from moonpool.core.transfer.metadata.backend import Metadata
from moonpool.core.transfer.metadata.record import SegmentRecord

if TYPE_CHECKING:
    from moonpool import _native

KNOWN_MAX = 4096
FILE = "file://"  # a segment that is a file of this host: no engine has such a name


class Names:
    """Of one engine. store: None: peers are opened by address alone. Any thread."""

    def __init__(self, native: _native.Engine, store: Metadata | None, tenant: str) -> None:
        self._native = native
        self._store = store
        self._tenant = tenant
        self._known: dict[str, SegmentRecord] = {}

    @property
    def by_name(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    def open(self, name: str) -> int:
        """The handle of the engine of a name, or at an address "host:port" that is no name. Raises Error."""
        if self._store is None or name.startswith(FILE):
            return self._native.open(name)
        trouble: Error | None = None
        try:
            found = self._store.resolve(self._tenant, name)
        except Error as error:
            found, trouble = None, error
        if found is not None:
            self._remember(name, found)
            return self._open_one(name, found)
        known = self._known.get(name)
        if known is not None:
            with suppress(Error):
                return self._open_one(name, known)
        if _is_address(name):
            return self._native.open(name)
        if trouble is not None:
            raise trouble
        raise Unavailable(
            f"{self._store.shown} knows no segment called {printable(name, characters_max=80)!r}; its engine "
            f"has ended, or has another tenant or store",
            operation="open",
            peer=self._store.shown,
        )

    def _remember(self, name: str, record: SegmentRecord) -> None:
        self._known.pop(name, None)
        self._known[name] = record
        while len(self._known) > KNOWN_MAX:
            with suppress(KeyError, StopIteration, RuntimeError):  # another thread was faster
                self._known.pop(next(iter(self._known)))

    def _open_one(self, name: str, record: SegmentRecord) -> int:
        trouble: Error = Unavailable(f"the record of {name} has no address", operation="open", peer=name)
        for address in record.addresses:
            try:
                handle = self._native.open(address)
                shown_id: bytes = self._native.segment(handle)[1]
            except Error as error:
                trouble = error
                continue
            if shown_id.hex() == record.id:
                return handle
            self._native.close_segment(handle)
            trouble = Unavailable(
                f"at {printable(address)} is another engine than the one that published {name}",
                operation="open",
                peer=address,
            )
        raise trouble


def _is_address(text: str) -> bool:
    try:
        return parse_address(text, "address").port > 0
    except ConfigError:
        return False
