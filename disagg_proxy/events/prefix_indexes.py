"""The prefix indexes of a proxy: one for each model and block size, created when the first event of an engine
has its block size. Thread safe."""

from __future__ import annotations

import threading

from moonpool import _native

MODEL_ANY = ""
HOLDERS_MAX = _native.HOLDERS_MAX  # maximum of engines and pool nodes; places are below it


class PrefixIndexes:
    """blocks_max: entries of each index (93 to 101 bytes each). indexes_max: maximum of indexes; ``refused``
    counts those beyond it."""

    def __init__(self, *, blocks_max: int = 1 << 20, indexes_max: int = 16) -> None:
        self.refused = 0
        self.kept: _native.PrefixIndex | None = None  # an index that stays without a stream
        self.wanting = 0  # number of new indexes that missed earlier events of the pool
        self._blocks_max = blocks_max
        self._indexes_max = indexes_max
        self._lock = threading.Lock()
        self._indexes: dict[tuple[str, int], _native.PrefixIndex] = {}
        self._of: dict[str, tuple[_native.PrefixIndex, ...]] = {}  # the same by model, read at each decision
        self._guessed: set[tuple[str, int]] = set()

    def obtain(self, model: str, block_tokens: int, *, guessed: bool = False) -> _native.PrefixIndex | None:
        """The index of this model and block size, created on demand; None: too many, or an invalid block
        size. guessed: no stream has reported this block size, so the index need not know the pool's blocks if
        there is another one."""
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
        """Removes an index, unless it is ``kept``."""
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
        """All indexes, by model and block size."""
        with self._lock:
            return dict(self._indexes)

    def expire(self, now_s: float) -> None:
        """Removes blocks that were expected and not confirmed in time."""
        for index in self.all().values():
            index.expire(now_s)
