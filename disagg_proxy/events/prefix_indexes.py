"""The prefix indexes of a proxy: one of each model and block size, made when an engine's first event tells
its block size. Any thread may call anything."""

from __future__ import annotations

import threading

from moonpool import _native

MODEL_ANY = ""
HOLDERS_MAX = _native.HOLDERS_MAX  # engines and nodes of the pool, whose places are below it


class PrefixIndexes:
    """blocks_max: entries of each index (93 to 101 bytes each); indexes_max: beyond it a new model is not
    indexed, and ``refused`` counts it."""

    def __init__(self, *, blocks_max: int = 1 << 20, indexes_max: int = 16) -> None:
        self.refused = 0
        self.kept: _native.PrefixIndex | None = None  # that no stream has to follow
        self.wanting = 0  # indexes that were made, and had missed what the pool's streams told before
        self._blocks_max = blocks_max
        self._indexes_max = indexes_max
        self._lock = threading.Lock()
        self._indexes: dict[tuple[str, int], _native.PrefixIndex] = {}
        self._of: dict[str, tuple[_native.PrefixIndex, ...]] = {}  # the same, for every decision to ask
        self._guessed: set[tuple[str, int]] = set()

    def obtain(self, model: str, block_tokens: int, *, guessed: bool = False) -> _native.PrefixIndex | None:
        """The index of this model and block size, made when there is none; None when there are too many, or
        the size is none of a block. guessed: no stream has told this size, so beside another index it need
        not know what the pool holds."""
        with self._lock:
            key = model, block_tokens
            index = self._indexes.get(key)
            if index is None:
                if len(self._indexes) >= self._indexes_max or not 0 < block_tokens <= 65_536:
                    self.refused += 1
                    return None
                index = _native.PrefixIndex(block_tokens, blocks_max=self._blocks_max)
                if guessed and self._indexes:
                    self._guessed.add(key)
                else:
                    self.wanting += 1
                self._indexes[key] = index
                self._of[model] = (*self._of.get(model, ()), index)
            elif not guessed and key in self._guessed:
                self._guessed.discard(key)
                self.wanting += 1
            return index

    def drop(self, index: _native.PrefixIndex) -> None:
        """No caller is to ask it any more. Does nothing when it is kept."""
        with self._lock:
            if index is self.kept:
                return
            self._indexes = {key: each for key, each in self._indexes.items() if each is not index}
            self._guessed &= self._indexes.keys()
            self._of = {
                model: kept
                for model, there in self._of.items()
                if (kept := tuple(each for each in there if each is not index))
            }

    def of(self, model: str) -> tuple[_native.PrefixIndex, ...]:
        """The indexes of a model; more than one when its engines have different block sizes."""
        return self._of.get(model, ())

    def all(self) -> dict[tuple[str, int], _native.PrefixIndex]:
        """By model and block size."""
        with self._lock:
            return dict(self._indexes)

    def expire(self, now_s: float) -> None:
        """Ends what was dispatched and not confirmed in time."""
        for index in self.all().values():
            index.expire(now_s)
