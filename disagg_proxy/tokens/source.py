"""The interface of sources of token ids, and a cache of ids."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, Protocol, TypeVar

from moonpool import _native

Key = TypeVar("Key", str, bytes)


class TextPrompt(NamedTuple):
    """A request with text. kind: "chat", "completions" or "generate" (SGLang). body: the client's JSON."""

    kind: str
    model: str
    body: bytes


class TokenSource(Protocol):
    """Turns prompts of text into token ids."""

    async def ids(self, prompt: TextPrompt) -> bytes | None:
        """The ids of the whole prompt, packed u32 little-endian; None: not available. Returns within the
        source's deadline, and never raises for faults of clients or engines."""
        ...

    async def close(self) -> None:
        """Closes connections."""


class IdCache(Generic[Key]):
    """LRU cache of token ids, by text or digest. bytes_max: limit of ids and keys together, a character of a
    text being one."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._ids: OrderedDict[Key, bytes] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def find(self, key: Key) -> bytes | None:
        """The ids of this key; None: not cached. Counts hits and misses."""
        ids = self._ids.get(key)
        if ids is None:
            self.misses += 1
            return None
        self._ids.move_to_end(key)
        self.hits += 1
        return ids

    def keep(self, key: Key, ids: bytes) -> None:
        """Caches the ids of this key; evicts the least recently used beyond the maximum."""
        self._drop(key)
        self._ids[key] = ids
        self._bytes += len(ids) + len(key)
        while self._bytes > self._bytes_max:
            self._drop(next(iter(self._ids)))

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        total = sum(len(key) + len(ids) for key, ids in self._ids.items())
        if total != self._bytes or total > self._bytes_max:
            raise AssertionError(f"{total} bytes are kept, not {self._bytes}")

    def _drop(self, key: Key) -> None:
        ids = self._ids.pop(key, None)
        if ids is not None:
            self._bytes -= len(ids) + len(key)


def key_of(prompt: TextPrompt) -> bytes:
    """A digest of 16 bytes; a collision only makes two prompts share a route."""
    return _native.key_hash(prompt.kind, prompt.model, b"", prompt.body)
