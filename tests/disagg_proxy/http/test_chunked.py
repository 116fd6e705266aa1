"""The chunked coding, taken off strictly."""

from __future__ import annotations

import pytest

from moonpool.disagg_proxy.http.chunked import ChunkDecoder, ChunkError

GOOD = b"5\r\nhello\r\n1;name=value\r\n,\r\n00A\r\n 123456789\r\n0\r\nTrailer: x\r\n\r\n"


def test_every_way_to_cut_it_in_two_gives_the_same() -> None:
    for cut in range(len(GOOD) + 1):
        decoder, content = ChunkDecoder(), bytearray()
        rest = decoder.feed(GOOD[:cut], content)
        if not decoder.done:
            assert rest == b""
            rest = decoder.feed(GOOD[cut:] + b"next", content)
            assert rest == b"next"
        assert decoder.done
        assert content == b"hello, 123456789"


def test_byte_by_byte() -> None:
    decoder, content = ChunkDecoder(), bytearray()
    for at in range(len(GOOD)):
        assert not decoder.done
        decoder.feed(GOOD[at : at + 1], content)
    assert decoder.done
    assert content == b"hello, 123456789"


@pytest.mark.parametrize(
    "bad",
    [
        b"\r\n",
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\na",
        b"0x1\r\na",
        b" 1\r\na",
        b"1 \r\na",
        b"1\na\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n0\r\n",
        b"1234567890abcdef\r\n",
        b"1;" + b"x" * 2000,
        b"0\r\n" + b"a: b\r\n" * 3000,
    ],
)
def test_malformed(bad: bytes) -> None:
    with pytest.raises(ChunkError):
        ChunkDecoder().feed(bad, bytearray())
