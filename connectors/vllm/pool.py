"""The pool as the two halves see it: operations that are handed over and polled for, and never block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint32]
Columns = npt.NDArray[np.uint16]
Rows = list[list[tuple[int, int, int]]]


class PartTable(Protocol):
    """The memory of objects in this process: object (index i, column c) is the concatenation, over the rows
    of column c, of ``length`` bytes at ``address + i * stride``."""


class PrefixAnswer(Protocol):
    """The answer to submit_prefix."""

    @property
    def blocks(self) -> int:
        """Leading blocks of which all objects are there and pinned."""

    @property
    def pin_id(self) -> int:
        """For ``release``; 0: nothing is pinned."""

    @property
    def holders(self) -> bytes:
        """The incarnation of each node that holds objects, 16 bytes each."""

    @property
    def descriptors(self) -> bytes:
        """Where the objects are, block by block; equally many bytes for each."""

    @property
    def error(self) -> str:
        """Why it is unknown, or ""."""


class LoadAnswer(Protocol):
    """The answer to submit_load."""

    @property
    def ok(self) -> bytes:
        """One byte per object, 1 where it was copied."""

    @property
    def bytes_loaded(self) -> int:
        """Bytes that were copied."""

    @property
    def error(self) -> str:
        """Why not all were copied, or ""."""


class SaveAnswer(Protocol):
    """The answer to submit_save."""

    @property
    def stored(self) -> int:
        """Objects that are new in the pool."""

    @property
    def existed(self) -> int:
        """Objects that were there before."""

    @property
    def refused(self) -> int:
        """Objects that were not stored."""

    @property
    def bytes_stored(self) -> int:
        """Bytes of the new objects."""

    @property
    def error(self) -> str:
        """Why some were refused, or ""."""


Answer = PrefixAnswer | LoadAnswer | SaveAnswer


class Pool(Protocol):
    """Operations on native threads. A submission returns a ticket at once; ``poll`` returns the answers.
    Every ticket is answered once, with an error when the node is gone or silent."""

    def part_table(self, rows: Rows) -> PartTable:
        """A table of the rows: (address of block 0, bytes from block to block, bytes) of each column."""

    def submit_prefix(self, names: bytes, name_size: int, width: int) -> int:
        """Asks for the longest prefix of blocks that are all there. Returns the ticket.

        names: of the objects, ``name_size`` bytes each, ``width`` per block.
        """

    def submit_load(
        self,
        holders: bytes,
        descriptors: bytes,
        parts: PartTable,
        indices: Indices,
        columns: Columns,
    ) -> int:
        """Copies pinned objects into memory. Returns the ticket.

        holders, descriptors: of a PrefixAnswer.
        parts: the memory, see PartTable.
        indices, columns: where each object goes in ``parts``.
        """

    def submit_save(
        self,
        names: bytes,
        name_size: int,
        parents: bytes,
        parts: PartTable,
        indices: Indices,
        columns: Columns,
    ) -> int:
        """Stores objects from memory. Returns the ticket.

        names: ``name_size`` bytes each.
        parents: for each object the name of the one before it, zeros for none.
        parts: the memory, see PartTable.
        indices, columns: where each object is in ``parts``.
        """

    def release(self, pin_id: int) -> None:
        """Ends a pin; 0 is no pin."""

    def poll(self) -> Sequence[tuple[int, Answer]]:
        """(ticket, answer) of operations that have ended, each once. Never waits."""

    def close(self) -> None:
        """Waits for the operations under way, then disconnects."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to a ticket that could not even be handed over. Reads as a miss, a failed load or a refused
    save."""

    error: str
    objects: int = 0
    blocks: int = 0
    pin_id: int = 0
    holders: bytes = b""
    descriptors: bytes = b""
    bytes_loaded: int = 0
    stored: int = 0
    existed: int = 0
    bytes_stored: int = 0

    @property
    def ok(self) -> bytes:
        """A zero for each object."""
        return bytes(self.objects)

    @property
    def refused(self) -> int:
        """All objects."""
        return self.objects
