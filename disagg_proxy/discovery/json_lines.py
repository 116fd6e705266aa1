"""The messages of a stream of JSON, one to a line, as etcd and Kubernetes send what they watch."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp


async def lines_of(stream: aiohttp.StreamReader, bytes_max: int) -> AsyncIterator[bytes]:
    """Each line that is not empty, until the stream ends; what is behind the last line's end is dropped.
    Raises ValueError for a line of more than bytes_max."""
    held = b""
    async for piece in stream.iter_any():
        held += piece
        *whole, held = held.split(b"\n")
        for line in whole:
            if line.strip():
                yield line
        if len(held) > bytes_max:
            raise ValueError(f"a message is longer than {bytes_max} bytes")
