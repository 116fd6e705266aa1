"""Where the blocks of a prompt lie: in which engines' own caches, and how far in the pool.

One index for each block size (docs/events.md); what an engine or a node holds under one model's tokens cannot
be mistaken for another's, because requests only go to engines of their model. An engine without an event
stream is known by what was sent to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from moonpool import _native
from moonpool.core.keys import chain_seed
from moonpool.disagg_proxy.events.indexes import MODEL_ANY, Indexes

BLOCK_TOKENS = 64  # of the index of engines whose events have not told yet
CONFIRMED_WITHIN_S = 60.0  # what was dispatched counts as held for so long, unless an event says so


class Place(NamedTuple):
    """own: tokens by the place of an engine; pool: tokens in the pool. keys: for ``sent``."""

    own: Sequence[int]
    pool: int
    keys: tuple[tuple[_native.PrefixIndex, bytes], ...]


class Locality:
    """Engines join and leave; the pool's nodes have holders of their own in the indexes. Thread safe."""

    def __init__(self, indexes: Indexes) -> None:
        self._indexes = indexes
        self._engines = 0  # all places are below
        # Places of engines that have an event stream, which says itself when its engine must be forgotten.
        self._told: frozenset[int] = frozenset()
        # Of the engines that do not tell; those of other block sizes come with the first event.
        self._guessed: _native.PrefixIndex | None = None

    def join(self, engine: int, *, told: bool) -> None:
        """There is one more engine. told: it has an event stream."""
        self._told = self._told | {engine} if told else self._told - {engine}
        self._engines = max(self._engines, engine + 1)
        if not told and self._guessed is None:
            self._guessed = self._indexes.obtain(MODEL_ANY, BLOCK_TOKENS)

    def leave(self, engine: int) -> None:
        """The engine is no more: its place may become another's."""
        self._told -= {engine}
        self.forget(engine)

    def is_told(self, engine: int) -> bool:
        """Whether the engine has an event stream."""
        return engine in self._told

    def find(self, ids: bytes, seed: bytes) -> Place:
        """ids: u32 little-endian; seed: of the chain (``seed_of``)."""
        own, most, keys, engines = b"", 0, [], self._engines
        for index in self._indexes.of(MODEL_ANY):
            own, pool, chain = index.look(ids, seed, engines, own)
            most = max(most, pool)
            keys.append((index, chain))
        return Place(array("I", own), most, tuple(keys))

    def sent(self, place: Place, engine: int, now_s: float) -> None:
        """The prompt goes to this engine, which will hold it."""
        for index, chain in place.keys:
            if index is self._guessed and engine in self._told and not index.entries(engine):
                continue  # its blocks have another size
            index.dispatched(engine, chain, now_s, CONFIRMED_WITHIN_S)

    def heard(self, engine: int, block_tokens: int, keys: bytes, now_s: float) -> None:
        """Another proxy has sent a prompt with these blocks to this engine."""
        index = self._indexes.obtain(MODEL_ANY, block_tokens)
        if index is not None:
            index.dispatched(engine, keys, now_s, CONFIRMED_WITHIN_S)

    def forget(self, engine: int) -> None:
        """The engine is gone for now. One that tells is forgotten by its stream, when it must be."""
        if engine in self._told:
            return
        for index in self._indexes.all().values():
            index.forget(engine)

    def expire(self, now_s: float) -> None:
        self._indexes.expire(now_s)

    def stats(self) -> dict[str, float]:
        """Sums over the indexes: counters (*_total) and gauges by name."""
        total: dict[str, float] = {}
        for index in self._indexes.all().values():
            for name, value in index.stats().items():
                total[name] = total.get(name, 0) + value
        return total


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
