"""``Region``: memory of this process that its engine may move bytes from and into, and peers may reach."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from moonpool.core.errors import Closed, InvalidArgument, Timeout
from moonpool.core.store.buffers import memory_of, range_of
from moonpool.core.store.device_memory import device_memory_of
from moonpool.core.transfer.types import offset_in

if TYPE_CHECKING:
    from moonpool import _native

_log = logging.getLogger(__name__)
_unfinished: set[RegionTable] = set()  # of engines that were closed too early for their peers


def check_text(text: str, what: str) -> None:
    """Raises InvalidArgument for text that peers could not read: a str may hold half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} must be UTF-8, and {text!r} is not", operation="engine") from None


class Region:
    """Registered from construction to ``close()``; also a context manager.

    address, length: of the memory, bytes.
    location:        a label, shown to peers; no transport reads it.

    Until then the engine keeps the memory's object alive, and a bytearray from being resized, also when the
    caller drops its reference to the region.
    """

    __slots__ = ("_closing", "_held", "_table", "address", "length", "location")

    def __init__(self, table: RegionTable, address: int, length: int, held: object, location: str) -> None:
        self.address = address
        self.length = length
        self.location = location
        self._closing = threading.Lock()
        self._held: object | None = held  # keeps the memory there; None: closed
        self._table = table

    def close(self) -> None:
        """Deregisters; when it returns, no transfer of this process or of a peer touches the memory any more.

        Slices that need it fail. Does nothing the second time, and after the engine's close. Raises Timeout
        when a stopped peer is accessing it: no new access begins, but the memory must not be freed yet. A
        further close() waits again; where the engine's close() returned False, a further one of that.
        """
        self._table.close(self)

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        state = "" if self._held is not None else ", closed"
        return f"Region({self.address:#x}, {self.length} bytes, {self.location}{state})"

    def at(self, offset: int) -> int:
        """The address of a byte of it. Raises InvalidArgument outside of it."""
        return offset_in(self.address, self.length, offset)

    @property
    def view(self) -> memoryview:
        """Its bytes, writable where the memory is. Raises Closed after close(), and InvalidArgument for a
        region made of an (address, length) or a tensor: look at those through their owner.
        """
        if self._held is None:
            raise Closed("this region is closed")
        if not isinstance(self._held, memoryview):
            raise InvalidArgument("a region made of an address or a tensor has no view")
        return self._held.cast("B")


class RegionTable:
    """The regions of one engine. On any thread."""

    def __init__(self, native: _native.Engine) -> None:
        self._native = native
        self._regions: set[Region] = set()
        self._kept: dict[Region, object] = {}  # after a close() of the engine that was not the end

    def register(self, memory: Any, location: str) -> Region:
        """See TransferEngine.register."""
        check_text(location, "a location")
        if type(memory) is tuple:  # tens of thousands of ranges are registered
            address, length = range_of(memory)
            return self._keep(address, length, memory, self._native.register(address, length, location))
        on_card = device_memory_of(memory)
        found = on_card or memory_of(memory)
        if not found.writable:
            raise InvalidArgument(
                f"a {type(memory).__name__} is read-only, and peers may write to what is registered; give a "
                f"bytearray or a writable array",
                operation="register",
            )
        # Of another vendor's card, for example.
        if on_card and self._native.describe(found.address, found.length)[0] != "device":
            raise InvalidArgument(
                f"a {type(memory).__name__} says that it is on a CUDA card, and the CUDA driver of this "
                f"process does not know its address",
                operation="register",
            )
        label = self._native.register(found.address, found.length, location)
        return self._keep(found.address, found.length, found.held, label)

    def allocate(self, nbytes: int, location: str) -> Region:
        """See TransferEngine.allocate."""
        if not 0 < nbytes < 1 << 62:
            raise InvalidArgument(f"cannot allocate {nbytes} bytes", operation="allocate")
        check_text(location, "a location")
        memory = memory_of(memoryview(self._native.allocate(nbytes, location)))
        return self._keep(memory.address, memory.length, memory.held, location)

    def close(self, region: Region) -> None:
        """See Region.close."""
        with region._closing:  # of two closes the second waits, too, for the end of all access
            if region in self._kept:
                raise Timeout(
                    "the engine of this region is closed, and a peer or a device may still access the "
                    "memory: close the engine again to wait for that",
                    operation="deregister",
                )
            if region in self._regions:
                self._native.deregister(region.address)
                self._regions.discard(region)  # unless the engine was closed meanwhile
            region._held = None

    def close_all(self, *, may_free: bool) -> bool:
        """After the native engine's close, each time: drops the references to all memory -> may_free.

        may_free: what that close returned. Without it the memory stays alive until a later one returns True,
        since a peer that was stopped in the middle of a copy, or a device, may still access it.
        """
        regions = list(self._regions)  # other threads may close their regions meanwhile
        if not may_free:
            _log.warning(
                "an engine was closed while something still accessed its memory; its regions stay in memory "
                "until a further close() of it returns True, or this process ends"
            )
            self._kept.update((region, region._held) for region in regions if region._held is not None)
            _unfinished.add(self)
        for region in regions:
            region._held = None
        self._regions.clear()
        if may_free:
            self._kept.clear()
            _unfinished.discard(self)
        return may_free

    def _keep(self, address: int, length: int, held: object, location: str) -> Region:
        region = Region(self, address, length, held, location)
        self._regions.add(region)
        return region
