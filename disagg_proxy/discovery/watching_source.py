"""What the sources that watch a server over HTTP (etcd, Kubernetes) have in common: they connect again after
each failure, and read answers and lines of JSON of bounded size."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from itertools import cycle

import aiohttp
import msgspec

from moonpool.core.service.backoff import Backoff
from moonpool.disagg_proxy.discovery.source import SourceListener

ANSWER_BYTES_MAX = 64 << 20


class Lost(Exception):
    """The source cannot go on; the text is the reason."""


class WatchingSource(ABC):
    """name: of the source. roots: URLs of servers, tried in turn. tls: for https; None: the system's
    certificates. retry_s: pause after the first failure."""

    def __init__(
        self, name: str, roots: Iterable[str], tls: ssl.SSLContext | None, *, retry_s: float
    ) -> None:
        self.name = name
        self._roots = cycle(roots)
        self._tls = tls
        self._backoff = Backoff(initial_s=retry_s, max_s=10.0, reset_s=30.0)
        self._odd: dict[str, str] = {}  # what was logged as no engine, by key

    async def run(self, listener: SourceListener) -> None:
        """See ``Source.run``."""
        clock = asyncio.get_running_loop().time
        for root in self._roots:
            self._backoff.started(clock())
            try:
                connector = aiohttp.TCPConnector(ssl=True if self._tls is None else self._tls)
                async with aiohttp.ClientSession(root, connector=connector) as session:
                    await self._follow(session, listener)
            except (Lost, OSError, aiohttp.ClientError, msgspec.MsgspecError, ValueError) as error:
                listener.failed(f"{root}: {error or type(error).__name__}")
            await asyncio.sleep(self._backoff.died(clock()) - clock())

    @abstractmethod
    async def _follow(self, session: aiohttp.ClientSession, listener: SourceListener) -> None:
        """Lists and watches until it raises: Lost, or errors of aiohttp and msgspec."""


async def content_of(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer. Raises Lost for one longer than ANSWER_BYTES_MAX."""
    content = b""
    async for piece in answer.content.iter_any():
        content += piece
        if len(content) > ANSWER_BYTES_MAX:
            raise Lost(f"the answer of {answer.url.path} is longer than {ANSWER_BYTES_MAX} bytes")
    return content


async def lines_of(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields each non-empty line of a watch until it ends; drops an unfinished last line. Raises Lost for a
    line longer than ANSWER_BYTES_MAX."""
    held = b""
    async for piece in answer.content.iter_any():
        held += piece
        *whole, held = held.split(b"\n")
        for line in whole:
            if line.strip():
                yield line
        if len(held) > ANSWER_BYTES_MAX:
            raise Lost(f"a message is longer than {ANSWER_BYTES_MAX} bytes")
