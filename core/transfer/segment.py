"""``Segment``: the registered memory of another engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from moonpool.core.errors import AuthError, Closed, InvalidArgument, ProtocolError, Timeout, Unavailable
from moonpool.core.transfer.types import RemoteRegion

if TYPE_CHECKING:
    from moonpool import _native


class Segment:
    """A peer or a file that was opened. Its fields are of the time of its opening or of the last
    ``refresh()``.

    handle:  names it in this engine; another one after a ``refresh()`` that found the peer elsewhere.
    name:    what the peer calls itself.
    id:      16 bytes, random for each engine: the same address with another id is another engine.
    host_id: of the peer's host; equal to ours when both can share memory.
    address: where it was reached, "ip:port" or "file:///path".
    regions: what it registered, by ascending address.
    """

    __slots__ = ("_closed", "_find", "_native", "address", "handle", "host_id", "id", "name", "regions")

    def __init__(self, native: _native.Engine, handle: int, find: Callable[[], int] | None = None) -> None:
        """find: opens the engine that has the peer's name now; None: it was opened by address."""
        self._native = native
        self._closed = False
        self._find = find
        self.handle = handle
        self.name: str = ""
        self.id: bytes = b""
        self.host_id: str = ""
        self.address: str = ""
        self.regions: tuple[RemoteRegion, ...] = ()
        self.refresh()

    def refresh(self) -> None:
        """Asks the peer again. One that was opened by name and is not there any more, or is another engine
        now, is looked up anew: its process may have restarted at another address. Raises Unavailable or
        Timeout."""
        if self._find is not None and self.id and not self._is_there():
            found = self._find()
            if self._is_there():  # it was slow: transfers under way keep their handle
                self._native.close_segment(found)
            else:
                self.handle, old = found, self.handle
                self._native.close_segment(old)
        self.name, self.id, self.host_id, self.address, rows, transports = self._native.segment(self.handle)
        self.regions = tuple(
            sorted(
                RemoteRegion(address, length, kind, location, transport)
                for (address, length, kind, location), transport in zip(rows, transports, strict=True)
            )
        )

    def _is_there(self) -> bool:
        try:
            return bool(self._native.segment(self.handle)[1] == self.id)
        except (Unavailable, Timeout, AuthError, ProtocolError):  # the last two: another process is there
            return False

    @property
    def transport(self) -> str:
        """The transport to and from its first region; "" when it registered nothing."""
        return self.regions[0].transport if self.regions else ""

    def at(self, offset: int, region: int = 0) -> int:
        """The address of a byte of one of its regions."""
        if not 0 <= region < len(self.regions):
            raise InvalidArgument(
                f"{self.name} at {self.address} has {len(self.regions)} regions and none of number {region}; "
                f"refresh() asks it again",
                peer=self.address,
            )
        return self.regions[region].at(offset)

    def close(self) -> None:
        """Closes the peer; calls with it are refused from then on. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            with suppress(Closed):
                self._native.close_segment(self.handle)

    def __repr__(self) -> str:
        return f"Segment({self.name!r} at {self.address}, {len(self.regions)} regions, {self.transport})"
