"""Splits a stream into lines of JSON, the form of the watches of etcd and Kubernetes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp


async def lines_of(stream: aiohttp.StreamReader, bytes_max: int) -> AsyncIterator[bytes]:
    """Yields each non-empty line until the stream ends; drops an unfinished last line. Raises ValueError for
    a line longer than ``bytes_max``."""
    held = b""
    async for piece in stream.iter_any():
        held += piece
        *whole, held = held.split(b"\n")
        for line in whole:
            if line.strip():
                yield line
        if len(held) > bytes_max:
            raise ValueError(f"a message is longer than {bytes_max} bytes")
