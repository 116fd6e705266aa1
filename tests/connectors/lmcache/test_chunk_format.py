from __future__ import annotations

import random

import pytest

from moonpool.connectors.lmcache.chunk_format import ALIGNMENT, HEADER_BYTES_MAX, ChunkFormat, chunk_format_of

KV_2LTD = 1
FULL = chunk_format_of(KV_2LTD, [(2, 8, 256, 1024)], ["torch.bfloat16"], 8 << 20)


def test_a_header_is_read_back() -> None:
    header = FULL.header()
    assert len(header) == FULL.header_bytes == ALIGNMENT
    assert ChunkFormat.parse(header, len(header) + FULL.size) == FULL
    assert header[:4] == b"MPLC"
    assert header[24:40] == b"bfloat16".ljust(16, b"\0")


def test_several_groups_and_plain_bytes() -> None:
    many = chunk_format_of(KV_2LTD, [(2, 1, 16, 8)] * 8, ["torch.float16"] * 8, 8 * 512)
    assert many.header_bytes == HEADER_BYTES_MAX
    assert ChunkFormat.parse(many.header(), many.header_bytes + many.size) == many
    plain = chunk_format_of(4, [(1234, 0, 0, 0)], [None], 1234)
    assert plain.groups == (("", (1234,)),)
    assert ChunkFormat.parse(plain.header(), plain.header_bytes + 1234) == plain


@pytest.mark.parametrize(
    "other",
    [
        chunk_format_of(KV_2LTD, [(2, 8, 256, 1024)], ["torch.float16"], 8 << 20),
        chunk_format_of(KV_2LTD, [(2, 8, 128, 2048)], ["torch.bfloat16"], 8 << 20),
        chunk_format_of(6, [(2, 8, 256, 1024)], ["torch.bfloat16"], 8 << 20),
        chunk_format_of(KV_2LTD, [(2, 8, 256, 1024)], ["torch.bfloat16"], 4 << 20),
    ],
)
def test_what_differs_has_another_header(other: ChunkFormat) -> None:
    assert other.header() != FULL.header()


def test_what_is_no_header_is_none() -> None:
    header = FULL.header()
    size = len(header) + FULL.size
    assert ChunkFormat.parse(b"", 0) is None
    assert ChunkFormat.parse(header[:40], size) is None
    assert ChunkFormat.parse(header, size + 1) is None
    assert ChunkFormat.parse(b"X" + header[1:], size) is None
    seed = 13
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(2000):
        at = source.randrange(24)
        damaged = bytearray(header)
        damaged[at] ^= 1 << source.randrange(8)
        form = ChunkFormat.parse(bytes(damaged), size)
        assert form is None or form.header() == bytes(damaged)  # another format's number is still a form


def test_what_the_header_has_no_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 8 groups"):
        chunk_format_of(KV_2LTD, [(1,)] * 9, ["a"] * 9, 1).header()
    with pytest.raises(ValueError, match="four lengths"):
        chunk_format_of(KV_2LTD, [(1, 2, 3, 4, 5)], ["a"], 1).header()
