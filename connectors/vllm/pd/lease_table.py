"""The lease table of a worker: memory that other engines read one-sidedly, so that a worker in the middle of
a forward need not answer.

    offset 0     magic (8 bytes) | u32 length of the description | u32 zero
    offset 16    the description: the layout of the KV memory (wire.Description)
    ...          slots, u64 each: the lease that is valid there, or 0
    ...          scratch, u64 each: where this worker's own threads read others' slots to

A reader copies blocks first and reads the slot last. The owner clears the slot first and reuses the blocks
later. So if the slot still holds the lease, the copy is of the leased blocks.
"""

from __future__ import annotations

import struct

from msgspec import structs

from moonpool.connectors.vllm.pd import wire
from moonpool.connectors.vllm.pd.wire import Description
from moonpool.core.errors import ProtocolError
from moonpool.core.transfer.engine import TransferEngine
from moonpool.core.transfer.segment import Segment

LOCATION = "moonpool-handover"
MAGIC = b"MPKVPD1\0"
HEAD = struct.Struct("<8sII")
DESCRIPTION_MAX = 1 << 22
SCRATCH = 257  # a word for each connection, and one for the worker's own thread
PAGE_ALIGN = 4096


class LeaseTable:
    """This worker's lease table."""

    def __init__(self, engine: TransferEngine, description: Description) -> None:
        """engine: allocates and offers the memory.
        description: of this worker; the address of the slots is filled in here.

        Raises TooLarge without memory.
        """
        slots = description.slot_count
        room = len(wire.encode(structs.replace(description, slots=1 << 62)))
        slots_at = -(-(HEAD.size + room) // PAGE_ALIGN) * PAGE_ALIGN
        self._region = engine.allocate(slots_at + 8 * (slots + SCRATCH), LOCATION)
        text = wire.encode(structs.replace(description, slots=self._region.address + slots_at))
        view = self._region.view
        view[: HEAD.size + len(text)] = HEAD.pack(MAGIC, len(text), 0) + text
        words = view[slots_at:].cast("Q")
        self._slots = words[:slots]
        self._scratch = words[slots:]
        self._scratch_address = self._region.address + slots_at + 8 * slots

    def set(self, slot: int, lease: int) -> None:
        """Makes ``lease`` valid in the slot; 0: none."""
        self._slots[slot] = lease

    def slot(self, slot: int) -> int:
        """The lease that is valid in the slot; 0: none."""
        return self._slots[slot]

    def scratch_address(self, number: int) -> int:
        """Where thread ``number`` may read 8 bytes to."""
        return self._scratch_address + 8 * number

    def scratch(self, number: int) -> int:
        """What thread ``number`` read last."""
        return self._scratch[number]


def read_description(engine: TransferEngine, segment: Segment) -> Description:
    """The memory layout of another worker. Raises ProtocolError when it offers none, and what
    ``TransferEngine.read`` raises."""
    pages = [region for region in segment.regions if region.location == LOCATION]
    if not pages:
        raise ProtocolError(
            f"{segment.address} is no worker of an engine that hands KV over", peer=segment.address
        )
    size = min(pages[0].length, HEAD.size + DESCRIPTION_MAX)
    with engine.allocate(size) as here:
        engine.read(segment, here, pages[0].address, size)
        magic, length, _ = HEAD.unpack_from(here.view)
        text = bytes(here.view[HEAD.size : HEAD.size + length])
    if magic != MAGIC or len(text) != length:
        raise ProtocolError(f"{segment.address} offers a page of another version", peer=segment.address)
    try:
        return wire.decode_description(text)
    except wire.Malformed as error:
        raise ProtocolError(
            f"{segment.address} describes its memory in a way that cannot be read: {error}",
            peer=segment.address,
            cause=error,
        ) from error
