"""What is done to every store: a cell is one size of object, a pass does each verb once to its working set.

A pass over a cell: put every object, get every object into the caller's buffer, get every object in the
store's own form (a view, a bytes object), then remove all. Bytes are compared after each of them, outside
the timed part. All keys are new in every pass, and every object's bytes differ from those of the pass
before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KIB, MIB = 1 << 10, 1 << 20
WORKING_SET = (
    64 * MIB
)  # of objects, and as much again in the caller's buffer: twice to four times a last-level cache
BATCH = 256

Kind = Literal["single", "batch", "exists"]


@dataclass(frozen=True)
class Cell:
    """kind: one object a call, BATCH objects a call, or questions only."""

    name: str
    kind: Kind
    object_bytes: int
    objects: int

    @property
    def batch(self) -> int:
        return BATCH if self.kind == "batch" else 1

    @property
    def described(self) -> str:
        """The working set; the caller's buffer has the same size."""
        if self.kind == "exists":
            return f"{self.objects:,} objects of {human(self.object_bytes)}"
        return f"{self.objects:,} objects = {human(self.object_bytes * self.objects)}"


def human(size: int) -> str:
    """65536 -> 64 KiB"""
    return f"{size // MIB} MiB" if size >= MIB else f"{size >> 10} KiB"


CELLS = (
    Cell("64 KiB", "single", 64 << 10, WORKING_SET // (64 << 10)),
    Cell("1 MiB", "single", MIB, WORKING_SET // MIB),
    Cell("16 MiB", "single", 16 * MIB, WORKING_SET // (16 * MIB)),
    Cell("256 x 64 KiB", "batch", 64 << 10, WORKING_SET // (64 << 10)),
    Cell("exists", "exists", 4 << 10, 1000),
)
