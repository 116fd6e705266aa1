"""The header before the bytes of a chunk. A chunk whose header is not exactly the expected one is a miss, so
bytes of another type, shape or layout are never read as the ones that were asked for.

    offset  size
    0       4     "MPLC"
    4       2     version, 1
    6       2     bytes of this header, a multiple of 64: the chunk's bytes begin aligned
    8       4     number of LMCache's MemoryFormat
    12      4     groups (tensors that lie one behind the other), at most 8
    16      8     bytes of the chunk
    24      32    of each group: name of its type (16, padded with zeros), four lengths (u32 each, 0: none)

All little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAGIC = b"MPLC"
VERSION = 1
ALIGNMENT = 64
GROUPS_MAX = 8
HEADER_BYTES_MAX = 320
_FIXED = struct.Struct("<4sHHIIQ")
_GROUP = struct.Struct("<16s4I")


@dataclass(frozen=True, slots=True)
class ChunkFormat:
    """The type and shape of a chunk's bytes.

    memory_format: LMCache's number of the format.
    groups: of each tensor the name of its type ("" for plain bytes) and its shape, at most four lengths.
    size: bytes of all groups.
    """

    memory_format: int
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    size: int

    @property
    def header_bytes(self) -> int:
        """Bytes of the header, a multiple of ALIGNMENT."""
        used = _FIXED.size + _GROUP.size * len(self.groups)
        return -(-used // ALIGNMENT) * ALIGNMENT

    def header(self) -> bytes:
        """Raises ValueError for what the header has no room for."""
        if not 1 <= len(self.groups) <= GROUPS_MAX:
            raise ValueError(f"a chunk has 1 to {GROUPS_MAX} groups, not {len(self.groups)}")
        out = _FIXED.pack(MAGIC, VERSION, self.header_bytes, self.memory_format, len(self.groups), self.size)
        for name, shape in self.groups:
            if len(name.encode()) > 16 or len(shape) > 4:
                raise ValueError(f"a group is a type of 16 letters and four lengths, not {name!r} {shape}")
            out += _GROUP.pack(name.encode(), *shape, *[0] * (4 - len(shape)))
        return out.ljust(self.header_bytes, b"\0")

    @classmethod
    def parse(cls, head: bytes | memoryview, object_bytes: int) -> ChunkFormat | None:
        """The format of an object.

        head: the first bytes of the object, HEADER_BYTES_MAX suffice.
        object_bytes: size of the object.

        Returns None for an object without a valid header.
        """
        if len(head) < _FIXED.size:
            return None
        magic, version, header, memory_format, groups, size = _FIXED.unpack_from(head)
        if (magic, version) != (MAGIC, VERSION) or not 1 <= groups <= GROUPS_MAX:
            return None
        if header + size != object_bytes or len(head) < _FIXED.size + groups * _GROUP.size:
            return None
        found = []
        for index in range(groups):
            raw, *shape = _GROUP.unpack_from(head, _FIXED.size + index * _GROUP.size)
            lengths = tuple(shape[: max((i + 1 for i, n in enumerate(shape) if n), default=1)])
            found.append((raw.rstrip(b"\0").decode("ascii", "replace"), lengths))
        form = cls(memory_format, tuple(found), size)
        return form if form.header_bytes == header else None


def chunk_format_of(
    memory_format: int, shapes: Sequence[Sequence[int]], dtypes: Sequence[object], size: int
) -> ChunkFormat:
    """The form of memory as LMCache describes it; trailing zeros of a shape mean nothing."""
    groups = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        lengths = [int(n) for n in shape]
        while len(lengths) > 1 and lengths[-1] == 0:
            lengths.pop()
        name = "" if dtype is None else str(dtype).removeprefix("torch.")
        groups.append((name, tuple(lengths)))
    return ChunkFormat(memory_format, tuple(groups), size)


def described(memory: Any) -> tuple[Sequence[Sequence[int]], Sequence[object]]:
    """The shapes and types of one of LMCache's memory objects. An object of one tensor may have them in the
    singular only."""
    meta = memory.metadata
    if meta.shapes is None or meta.dtypes is None:
        return [meta.shape], [meta.dtype]
    return meta.shapes, meta.dtypes
