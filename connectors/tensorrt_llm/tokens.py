"""A request in the scheduler's half: the digests of its blocks, its pages, and what is saved."""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonpool import _native
from moonpool.connectors.tensorrt_llm.messages import Pages
from moonpool.core.store.keys import DIGEST_BYTES

KNOWN_MAX = 1 << 18
KNOWN_S = 60.0


@dataclass(slots=True)
class Chain:
    """saved: blocks that were saved, or are known to be in the pool. saves: whether any were saved from the
    pages of this request. pages: by layer group, of all blocks. offer: what was promised, held until it is
    loaded on every rank."""

    seed: bytes
    block_tokens: int
    digests: list[bytes] = field(default_factory=list)
    saved: int = 0
    saves: bool = False
    pages: list[list[int]] = field(default_factory=list)
    offer: Any = None
    tail: list[int] = field(default_factory=list)  # tokens of the block that is not full

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens; hashes each block that is full now."""
        self.tail.extend(tokens)
        full = len(self.tail) - len(self.tail) % self.block_tokens
        if full:
            ids = array("I", self.tail[:full])
            previous = self.digests[-1] if self.digests else b""
            raw = _native.block_digests(ids, self.block_tokens, b"" if previous else self.seed, previous)
            self.digests += split(raw)
            del self.tail[:full]

    def add_pages(self, new: Sequence[Sequence[int]]) -> None:
        """Adds pages, one sequence per layer group."""
        self.pages += [[] for _ in range(len(new) - len(self.pages))]
        for pages, more in zip(self.pages, new, strict=False):
            pages += more

    def blocks(self, first: int, last: int) -> tuple[bytes, Pages]:
        """Digests and pages of the blocks [first, last)."""
        return b"".join(self.digests[first:last]), tuple(tuple(ids[first:last]) for ids in self.pages)

    def previous(self, first: int) -> bytes:
        """The digest of the block before block ``first``, 32 bytes; empty for the first."""
        return self.digests[first - 1] if first else b""


class Known:
    """Digests that the pool had at the last answer, so that a repeated prompt is not copied out of the engine
    again. A lookup's miss and a failed save remove digests; another node removes all. A digest older than
    KNOWN_S is doubtful: no engine reads from the pool what every engine has on its device, so the pool may
    have evicted it. Any thread may call."""

    def __init__(self, limit: int = KNOWN_MAX, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._heard_s: OrderedDict[bytes, float] = OrderedDict()
        self._incarnation = b""
        self._lock = threading.Lock()

    def add(self, digests: Iterable[bytes]) -> None:
        """The pool has these blocks now."""
        now_s = self._clock()
        with self._lock:
            for digest in digests:
                self._heard_s[digest] = now_s
                self._heard_s.move_to_end(digest)
            while len(self._heard_s) > self._limit:
                self._heard_s.popitem(last=False)

    def forget(self, digests: Iterable[bytes]) -> None:
        """The pool may have lost these blocks."""
        with self._lock:
            for digest in digests:
                self._heard_s.pop(digest, None)

    def seen_at(self, incarnation: bytes) -> None:
        """Forgets all digests when the node is another one.

        incarnation: 16 bytes of the node; b"" when there is no node now.
        """
        with self._lock:
            if incarnation and incarnation != self._incarnation:
                self._incarnation = incarnation
                self._heard_s.clear()

    def doubtful(self, digests: Iterable[bytes]) -> list[bytes]:
        """Those of the digests that were added KNOWN_S ago or earlier."""
        latest_s = self._clock() - KNOWN_S
        with self._lock:
            return [digest for digest in digests if self._heard_s.get(digest, latest_s + 1) <= latest_s]

    def leading(self, digests: Sequence[bytes]) -> int:
        """How many of them, from the first on, are known."""
        with self._lock:
            return next((at for at, one in enumerate(digests) if one not in self._heard_s), len(digests))


def split(digests: bytes) -> list[bytes]:
    """Digests of 32 bytes each, from their concatenation."""
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
