"""The bytes of an encoder output, and what is no output."""

from __future__ import annotations

import struct

import pytest

from moonpool.connectors.vllm.encoder.objects import HEADER_BYTES, NoOutput, Shape, header, shape_of

NAME = bytes(range(32))
SHAPE = Shape("bfloat16", rows=3, width=8, item_bytes=2)
CONTENT = header(NAME, SHAPE) + bytes(SHAPE.bytes)


def read(content: bytes, name: bytes = NAME, **changes: object) -> Shape:
    expected: dict[str, object] = {"dtype": "bfloat16", "item_bytes": 2, "rows": 3, "unit": 4} | changes
    return shape_of(memoryview(content), name, **expected)  # type: ignore[arg-type]


def test_the_header_is_that_of_the_page() -> None:
    """docs/keys.md has the table."""
    assert HEADER_BYTES == 64
    assert CONTENT[:8] == b"mp-enc-1"
    assert CONTENT[8:40] == NAME
    assert CONTENT[40:56] == b"bfloat16" + bytes(8)
    assert struct.unpack("<II", CONTENT[56:64]) == (3, 8)


def test_an_output_is_read_as_it_was_written() -> None:
    assert read(CONTENT) == SHAPE
    assert read(CONTENT, unit=8) == SHAPE
    assert read(CONTENT, width=8) == SHAPE


@pytest.mark.parametrize(
    ("content", "changes"),
    [
        (b"", {}),
        (CONTENT[:63], {}),
        (CONTENT[:-1], {}),
        (CONTENT + b"\0", {}),
        (b"another!" + CONTENT[8:], {}),
        (CONTENT, {"name": bytes(32)}),
        (CONTENT, {"dtype": "float16"}),
        (CONTENT, {"rows": 4}),
        (CONTENT, {"unit": 3}),
        (CONTENT, {"width": 4}),
        (header(NAME, Shape("bfloat16", 3, 0, 2)), {}),
        (CONTENT[:40] + b"\xff" * 16 + CONTENT[56:], {}),
    ],
)
def test_anything_else_is_no_output(content: bytes, changes: dict[str, object]) -> None:
    with pytest.raises(NoOutput):
        read(content, **changes)  # type: ignore[arg-type]
