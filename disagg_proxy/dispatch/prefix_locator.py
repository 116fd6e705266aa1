"""Where the blocks of a prompt lie: in which engines' own caches, and how far in the pool.

One index for each block size (docs/events.md); what an engine or a node holds under one model's tokens cannot
be mistaken for another's, because requests only go to engines of their model. An engine without an event
stream is known by what was sent to it.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from moonpool import _native
from moonpool.core.store.keys import chain_seed
from moonpool.disagg_proxy.events.prefix_indexes import PrefixIndexes

BLOCK_TOKENS = 64  # of the index of engines whose events have not told yet
KEY_BYTES = 16  # of a block in the indexes
TELLING_BLOCKS = 8  # of a prompt: an engine that computes so many tells of some, whatever its block size is
CONFIRMED_WITHIN_S = 60.0  # what was dispatched counts as held for so long, unless an event says so


class PrefixMatch(NamedTuple):
    """own: tokens by the place of an engine; pool: tokens in the pool. keys: for ``sent``."""

    own: Sequence[int]
    pool: int
    keys: tuple[tuple[_native.PrefixIndex, bytes], ...]


class PrefixLocator:
    """Engines join and leave; the pool's nodes have holders of their own in the indexes. Thread safe.

    An engine is known by its events while its stream is live (``hears``), and by what was sent to it before
    that, afterwards, and where it has no stream: a stream that says nothing is not worse than none.
    """

    def __init__(self, indexes: PrefixIndexes) -> None:
        self._indexes = indexes
        self._engines = 0  # all places are below
        self._lock = threading.Lock()  # of what changes below; read without it, for it is replaced whole
        self._there: frozenset[int] = frozenset()  # places of engines
        self._live: Mapping[int, _native.PrefixIndex] = {}  # of engines whose events are heard: their index
        # Of the engines that are not heard; the indexes of other block sizes come with the first event.
        self._guessed: _native.PrefixIndex | None = None
        self.telling_prompts = 0  # prompts of TELLING_BLOCKS or more that were sent to any engine
        self._unheard_s: dict[int, float] = {}  # when an engine that is not heard was first sent a prompt

    def join(self, engine: int) -> None:
        """There is one more engine."""
        with self._lock:
            self._there |= {engine}
            self._engines = max(self._engines, engine + 1)
            self._look_at_guessed()

    def leave(self, engine: int) -> None:
        """The engine is no more: its place may become another's."""
        with self._lock:
            self._there -= {engine}
            self._live = {place: index for place, index in self._live.items() if place != engine}
            self._unheard_s.pop(engine, None)
            self._look_at_guessed()
        self.forget(engine)

    def hears(self, engine: int, index: _native.PrefixIndex | None) -> None:
        """The engine's stream is live, and this index follows it; None: it is not. On the thread of the
        subscriber, which alone obtains indexes for streams."""
        with self._lock:
            before, guessed = self._live.get(engine), self._guessed
            if before is index or engine not in self._there:
                return
            others = {place: other for place, other in self._live.items() if place != engine}
            self._live = others if index is None else {**others, engine: index}
            self._unheard_s.pop(engine, None)
            self._look_at_guessed()
        if index is not None and guessed is not None and guessed is not index:
            guessed.forget(engine)  # what was guessed; its events have told what is true

    def is_heard(self, engine: int) -> bool:
        """Whether its events say what it holds."""
        return engine in self._live

    def unheard_since(self, engine: int) -> float | None:
        """When the engine was first sent a prompt of some length, of one that is not heard; None: never."""
        return self._unheard_s.get(engine)

    def find(self, ids: bytes, seed: bytes) -> PrefixMatch:
        """ids: u32 little-endian; seed: of the chain (``seed_of``)."""
        own, most, keys, engines = b"", 0, [], self._engines
        for index in self._indexes.all:
            own, pool, chain = index.look(ids, seed, engines, own)
            most = max(most, pool)
            keys.append((index, chain))
        return PrefixMatch(array("I", own), most, tuple(keys))

    def sent(self, match: PrefixMatch, engine: int, now_s: float) -> None:
        """The prompt goes to this engine, which will hold it."""
        live = self._live.get(engine)
        tells = any(len(chain) >= TELLING_BLOCKS * KEY_BYTES for _, chain in match.keys)
        self.telling_prompts += tells
        if tells and live is None:
            self._unheard_s.setdefault(engine, now_s)
        for index, chain in match.keys:
            if live is not None and live is not index and index is self._guessed:
                continue  # its blocks have another size
            index.dispatched(engine, chain, now_s, CONFIRMED_WITHIN_S)

    def heard(self, engine: int, block_tokens: int, keys: bytes, now_s: float) -> None:
        """Another proxy has sent a prompt with these blocks to this engine."""
        index = self._indexes.obtain(block_tokens, guessed=True)
        if index is not None:
            index.dispatched(engine, keys, now_s, CONFIRMED_WITHIN_S)

    def forget(self, engine: int) -> None:
        """The engine is gone for now. One that is heard is forgotten by its stream, when it must be."""
        if engine in self._live:
            return
        for index in self._indexes.all:
            index.forget(engine)

    def expire(self, now_s: float) -> None:
        """Drops guessed blocks that no event has confirmed within CONFIRMED_WITHIN_S. Seconds of the proxy's
        clock."""
        self._indexes.expire(now_s)

    def stats(self) -> dict[str, float]:
        """Sums over the indexes: counters (*_total) and gauges by name."""
        total: dict[str, float] = {}
        for index in self._indexes.all:
            for name, value in index.stats().items():
                total[name] = total.get(name, 0) + value
        return total

    def _look_at_guessed(self) -> None:
        """With the lock. The index of what is guessed is there while an engine is not heard: each index costs
        a prompt its hashes. One that follows a stream, too, stays."""
        if self._there - self._live.keys():
            if self._guessed is None:
                self._guessed = self._indexes.obtain(BLOCK_TOKENS, guessed=True)
            self._indexes.kept = self._guessed
        elif self._guessed is not None:
            guessed, self._guessed, self._indexes.kept = self._guessed, None, None
            if guessed not in self._live.values():
                self._indexes.drop(guessed)


class _Model(msgspec.Struct):
    parent: str | None = None


_model = msgspec.json.Decoder(_Model)


def seed_of(salt: str | None, model: str, models: Mapping[str, bytes] | None) -> bytes:
    """What a chain begins with: the LoRA's name, when the model's row has a parent, and the cache salt."""
    row = (models or {}).get(model)
    lora = None
    try:
        if row is not None and b'"parent"' in row and _model.decode(row).parent is not None:
            lora = model
        return chain_seed(lora, salt)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return b""  # no text, or nested without end: the engine will say so
