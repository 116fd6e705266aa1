"""The prefix indexes of a proxy: one for each block size, created when the first event of an engine
has its block size. Thread safe."""

from __future__ import annotations

import threading

from moonpool import _native

HOLDERS_MAX = _native.HOLDERS_MAX  # maximum of engines and pool nodes; places are below it


class PrefixIndexes:
    """blocks_max: entries of each index (93 to 101 bytes each). indexes_max: maximum of indexes; ``refused``
    counts those beyond it. all: the indexes, more than one when engines have different block sizes; replaced
    whole, and read at each decision."""

    def __init__(self, *, blocks_max: int = 1 << 20, indexes_max: int = 16) -> None:
        self.all: tuple[_native.PrefixIndex, ...] = ()
        self.refused = 0
        self.kept: _native.PrefixIndex | None = None  # an index that stays without a stream
        self.wanting = 0  # number of new indexes that missed earlier events of the pool
        self._blocks_max = blocks_max
        self._indexes_max = indexes_max
        self._lock = threading.Lock()
        self._guessed: set[int] = set()  # block sizes

    def find(self, block_tokens: int) -> _native.PrefixIndex | None:
        """The index of this block size; None: there is none."""
        return next((each for each in self.all if each.block_tokens == block_tokens), None)

    def obtain(self, block_tokens: int, *, guessed: bool = False) -> _native.PrefixIndex | None:
        """The index of this block size, created on demand; None: too many, or an invalid block size.
        guessed: no stream has reported this block size, so the index need not know the pool's blocks if there
        is another one."""
        with self._lock:
            index = self.find(block_tokens)
            if index is None:
                if len(self.all) >= self._indexes_max or not 0 < block_tokens <= 65_536:
                    self.refused += 1
                    return None
                index = _native.PrefixIndex(block_tokens, blocks_max=self._blocks_max)
                if guessed and self.all:
                    self._guessed.add(block_tokens)
                else:
                    self.wanting += 1
                self.all += (index,)
            elif not guessed and block_tokens in self._guessed:
                self._guessed.discard(block_tokens)
                self.wanting += 1
            return index

    def drop(self, index: _native.PrefixIndex) -> None:
        """Removes an index, unless it is ``kept``."""
        with self._lock:
            if index is not self.kept:
                self.all = tuple(each for each in self.all if each is not index)
                self._guessed.discard(index.block_tokens)

    def expire(self, now_s: float) -> None:
        """Removes blocks that were expected and not confirmed in time."""
        for index in self.all:
            index.expire(now_s)
