"""The names of all objects of a request's blocks, made once for the prompt and grown for answers when those
are saved.

    names of block i:   digest(i) + suffix of column 0, digest(i) + suffix of column 1, ...      width x 42
    bytes

They are kept as one array, so that the names of any run of blocks are one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from moonpool.connectors.objects import object_names
from moonpool.core.store.keys import BLOCK_NAME_BYTES, DIGEST_BYTES

# (token ids as u32, block_tokens, seed, previous digest) -> 32 bytes per full block
Digests = Callable[[npt.NDArray[np.uint32], int, bytes, bytes], bytes]


class Chain:
    """The object names of the full blocks of one request, in order."""

    __slots__ = ("_block_tokens", "_digest", "_last", "_names", "_seed", "_suffixes")

    def __init__(self, block_tokens: int, suffixes: bytes, seed: bytes, digest: Digests) -> None:
        """suffixes: of all columns, 10 bytes each."""
        self._block_tokens = block_tokens
        self._digest = digest
        self._seed = seed
        self._suffixes = np.frombuffer(suffixes, np.uint8).reshape(-1, BLOCK_NAME_BYTES - DIGEST_BYTES)
        self._names = np.empty((0, len(self._suffixes), BLOCK_NAME_BYTES), np.uint8)
        self._last = b""

    @property
    def blocks(self) -> int:
        """How many blocks have names."""
        return len(self._names)

    @property
    def width(self) -> int:
        """Objects per block."""
        return len(self._suffixes)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Names the full blocks of ``token_ids``, the ids of the whole request, that have no names yet."""
        start = self.blocks * self._block_tokens
        stop = len(token_ids) // self._block_tokens * self._block_tokens
        if stop <= start:
            return
        ids = np.fromiter(token_ids[start:stop], np.uint32, stop - start)
        digests = self._digest(ids, self._block_tokens, self._seed, self._last)
        self._last = digests[-DIGEST_BYTES:]
        names = object_names(digests, self._suffixes)
        self._names = names if start == 0 else np.concatenate([self._names, names])

    def names(self, first: int, last: int) -> bytes:
        """The names of the objects of the blocks [first, last)."""
        return self._names[first:last].tobytes()

    def parents(self, first: int, last: int) -> bytes:
        """The names of the same columns one block earlier; zeros for the first block, which has none."""
        if first > 0:
            return self.names(first - 1, last - 1)
        return bytes(self.width * BLOCK_NAME_BYTES) + self.names(0, max(last - 1, 0))
