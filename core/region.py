"""``Region``: memory of this process that its engine may move bytes from and into, and peers may reach."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from moonpool.core.buffers import Memory, memory_of
from moonpool.core.engine_types import offset_in
from moonpool.core.errors import Closed, InvalidArgument

if TYPE_CHECKING:
    from moonpool import _native


class Region:
    """Registered from its making to ``close()``; also a context manager.

    address, length: where it lies, bytes.
    location:        what peers are told of it, such as "cpu:0".

    The region keeps the object that it was made of alive, and a bytearray from being resized. Peers that
    still move bytes when it is closed see their slices fail, or reach memory that serves something else by
    then: tell them first.
    """

    __slots__ = ("_memory", "_native", "address", "length", "location")

    def __init__(self, native: _native.Engine, memory: Memory, location: str, *, registered: bool) -> None:
        self.address = memory.address
        self.length = memory.length
        self.location = location
        self._memory: Memory | None = memory
        self._native = native
        if not registered:
            native.register(memory.address, memory.length, location)

    def close(self) -> None:
        """Deregisters. Does nothing the second time; after the engine's close it only lets the memory go."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        with suppress(Closed):
            self._native.deregister(self.address)

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        state = "" if self._memory is not None else ", closed"
        return f"Region({self.address:#x}, {self.length} bytes, {self.location}{state})"

    def at(self, offset: int) -> int:
        """The address of a byte of it. Raises InvalidArgument outside of it."""
        return offset_in(self.address, self.length, offset)

    @property
    def view(self) -> memoryview:
        """Its bytes, writable where the memory is. Raises Closed after close(), and InvalidArgument for a
        region made of an (address, length) or a tensor: look at those through their owner.
        """
        if self._memory is None:
            raise Closed("this region is closed")
        if not isinstance(self._memory.held, memoryview):
            raise InvalidArgument("a region made of an address or a tensor has no view")
        return self._memory.held.cast("B")


def register(native: _native.Engine, memory: Any, location: str) -> Region:
    """See TransferEngine.register."""
    found = memory_of(memory)
    if not found.writable:
        raise InvalidArgument(
            f"a {type(memory).__name__} is read-only, and peers may write to what is registered; give a "
            f"bytearray or a writable array",
            operation="register",
        )
    return Region(native, found, location, registered=False)


def allocate(native: _native.Engine, nbytes: int, location: str) -> Region:
    """See TransferEngine.allocate."""
    if not 0 < nbytes < 1 << 62:
        raise InvalidArgument(f"cannot allocate {nbytes} bytes", operation="allocate")
    view = memoryview(native.allocate(nbytes, location))
    return Region(native, memory_of(view), location, registered=True)
