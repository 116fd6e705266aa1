"""The bytes of one encoder output in the pool: a header of 64 bytes, then the numbers, row by row.
docs/keys.md has the header as a table.

The header repeats the item's name, so that an object which stands under the name of another one is no output.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from moonpool.core.store.keys import DIGEST_BYTES

MAGIC = b"mp-enc-1"
TYPE_BYTES = 16
_HEADER = struct.Struct(f"<8s{DIGEST_BYTES}s{TYPE_BYTES}sII")
HEADER_BYTES = _HEADER.size


class NoOutput(Exception):
    """The object is not the output that it should be; the message says why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of an output: ``rows`` embeddings of ``width`` numbers of ``dtype``, such as "bfloat16", ``item_bytes``
    each."""

    dtype: str
    rows: int
    width: int
    item_bytes: int

    @property
    def bytes(self) -> int:
        """Of the numbers."""
        return self.rows * self.width * self.item_bytes


def header(name: bytes, shape: Shape) -> bytes:
    """What stands before the numbers.

    name: of the item, 32 bytes.
    """
    return _HEADER.pack(MAGIC, name, shape.dtype.encode(), shape.rows, shape.width)


def shape_of(
    content: memoryview,
    name: bytes,
    *,
    dtype: str,
    item_bytes: int,
    rows: int,
    unit: int,
    width: int | None = None,
) -> Shape:
    """The shape of the output in ``content``.

    name: of the item.
    dtype, item_bytes: the type of numbers that the engine uses, and its bytes.
    rows: embeddings that the engine expects.
    unit: numbers of one embedding of the language model, of which a row has one or more.
    width: numbers of a row; None: not known yet.

    Raises NoOutput for anything else than that.
    """
    if len(content) < HEADER_BYTES:
        raise NoOutput(f"it has {len(content)} bytes")
    magic, named, written, found_rows, found_width = _HEADER.unpack_from(content)
    if magic != MAGIC or named != name:
        raise NoOutput("it is another object")
    found = Shape(written.rstrip(b"\0").decode("ascii", "replace"), found_rows, found_width, item_bytes)
    is_wide = found.width == width if width else found.width and found.width % unit == 0
    if (found.dtype, found.rows) != (dtype, rows) or not is_wide:
        raise NoOutput(
            f"it has {found.rows} rows of {found.width} {found.dtype}, "
            f"and {rows} of {width or unit} {dtype} are expected"
        )
    if len(content) - HEADER_BYTES != found.bytes:
        raise NoOutput(f"it has {len(content) - HEADER_BYTES} bytes of numbers in place of {found.bytes}")
    return found
