"""Token ids of prompts that come as text: kept from before, of a tokenizer here, or asked of an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.tokens.local_source import LocalSource
from moonpool.disagg_proxy.tokens.source import IdCache, TextPrompt, TokenSource, key_of

TEXT_BYTES_MAX = 4 << 20  # of a body whose text is tokenised: about a million tokens
KNOWN_BYTES_MAX = 64 << 20  # ids of prompts, and their digests
ASKED_MAX = 1024  # prompts that are being tokenised; beyond it a request is routed without its prefix


class PromptIds:
    """Thread safe. source: None where ids of text are not to be had. arrived: called on the event loop with a
    request and its ids, None when they were not to be had in time."""

    def __init__(
        self,
        source: TokenSource | LocalSource | None,
        loop: asyncio.AbstractEventLoop,
        arrived: Callable[[ProxyRequest, bytes | None], None],
    ) -> None:
        self.known: IdCache[bytes] = IdCache(KNOWN_BYTES_MAX)
        self._source = source
        self._loop = loop
        self._arrived = arrived
        self._lock = threading.Lock()  # of ``known``
        self._asking: set[asyncio.Task[None]] = set()

    def find(self, request: ProxyRequest) -> tuple[bytes | None, bool]:
        """(the ids, whether they come later by ``arrived``). Never blocks."""
        if len(request.body) > TEXT_BYTES_MAX:  # to copy and to tokenise it would hold up all others
            return None, False
        prompt = _prompt(request)
        key = key_of(prompt)
        with self._lock:
            ids = self.known.find(key)
        source = self._source
        if ids is not None or source is None or isinstance(source, LocalSource):
            return ids, False
        if len(self._asking) >= ASKED_MAX:
            return None, False
        self._loop.call_soon_threadsafe(self._ask, source, request, prompt, key)
        return None, True

    def tokenise(self, request: ProxyRequest) -> bytes | None:
        """With the tokenizer here; None when it has none for the model. Blocks."""
        assert isinstance(self._source, LocalSource)
        prompt = _prompt(request)
        key = key_of(prompt)
        with self._lock:
            ids = self.known.find(key)
        if ids is None:
            ids = self._source.ids(prompt)
            self._keep(key, ids)
        return ids

    async def close(self) -> None:
        """Cancels what is being asked, and closes the source."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        if self._source is not None and not isinstance(self._source, LocalSource):
            await self._source.close()

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        with self._lock:
            self.known.check_integrity()

    def _ask(self, source: TokenSource, request: ProxyRequest, prompt: TextPrompt, key: bytes) -> None:
        task = self._loop.create_task(self._ids_of(source, request, prompt, key))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ids_of(
        self, source: TokenSource, request: ProxyRequest, prompt: TextPrompt, key: bytes
    ) -> None:
        ids = await source.ids(prompt)
        self._keep(key, ids)
        self._arrived(request, ids)

    def _keep(self, key: bytes, ids: bytes | None) -> None:
        if ids is not None:
            with self._lock:
                self.known.keep(key, ids)


def _prompt(request: ProxyRequest) -> TextPrompt:
    return TextPrompt(request.kind, request.model, bytes(request.body))
