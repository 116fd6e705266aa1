"""The names of all objects of a request's blocks, made once for the prompt and grown for answers when those
are saved.

    names of block i:   digest(i) + suffix of column 0, digest(i) + suffix of column 1, ...      width x 42
    bytes

They are kept as one array, so that the names of any run of blocks are one slice.

Where blocks consist of parts (group_blocks.py), digests are of runs of tokens that end at the end of each
part, and the object of a part is named by the digest at its end: it stands for all tokens up to there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from moonpool.connectors.vllm.requests.media import TEXT_ALONE, Media
from moonpool.core.store.keys import BLOCK_NAME_BYTES, DIGEST_BYTES, with_items

# (token ids as u32, block_tokens, seed, previous digest) -> 32 bytes per full block
Digests = Callable[[npt.NDArray[np.uint32], int, bytes, bytes], bytes]


class Chain:
    """The object names of the full blocks of one request, in order."""

    __slots__ = (
        *("_block_tokens", "_digest", "_digest_tokens", "_ends", "_first_parts", "_last", "_last_parts"),
        *("_media", "_names", "_roots", "_seed", "_suffixes"),
    )

    def __init__(
        self,
        block_tokens: int,
        suffixes: bytes,
        seed: bytes,
        digest: Digests,
        roots: Sequence[int] = (),
        media: Media = TEXT_ALONE,
        parts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """suffixes: of all columns, 10 bytes each.
        roots: columns whose objects have no parent, so that each is evicted by its own last use.
        media: what stands among the tokens; blocks from its first item without a name on have none either.
        parts: of each column which of its group's parts of a block it is, and of how many; (): the only one.
        """
        counts = [count for _, count in parts] or [1]
        digests = math.lcm(*counts)  # of a block
        self._digest_tokens = block_tokens // digests
        # Which of a block's digests names the object of each column.
        ends = [(part + 1) * digests // count - 1 for part, count in parts]
        self._ends = np.array(ends or [0], np.intp)
        self._first_parts = np.array([part == 0 for part, _ in parts] or [True], np.bool_)
        self._roots = list(roots)
        self._block_tokens = block_tokens
        self._digest = digest
        self._media = media
        self._seed = seed
        self._suffixes = np.frombuffer(suffixes, np.uint8).reshape(-1, BLOCK_NAME_BYTES - DIGEST_BYTES)
        # Of each column the one of its group's last part, which precedes the first part of the next block.
        places = np.arange(len(self._suffixes))
        self._last_parts = places + np.array([count - 1 - part for part, count in parts] or [0], np.intp)
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
        stop = min(len(token_ids), self._media.named_tokens) // self._block_tokens * self._block_tokens
        if stop <= start:
            return
        ids = np.fromiter(token_ids[start:stop], np.uint32, stop - start)
        size = self._digest_tokens
        digests = np.frombuffer(self._digests(ids, start // size, stop // size), np.uint8)
        by_block = digests.reshape(-1, self._block_tokens // size, DIGEST_BYTES)
        names = np.empty((len(by_block), self.width, BLOCK_NAME_BYTES), np.uint8)
        names[:, :, :DIGEST_BYTES] = by_block[:, self._ends]
        names[:, :, DIGEST_BYTES:] = self._suffixes
        self._names = names if start == 0 else np.concatenate([self._names, names])

    def _digests(self, ids: npt.NDArray[np.uint32], first: int, last: int) -> bytes:
        """The digests [first, last), whose tokens are ``ids``, by runs: items begin only in the tokens of the
        first digest of a run."""
        parts, tokens = [], self._digest_tokens
        edges = sorted({first, last} | self._media.blocks_with_begins(tokens, first, last))
        for start, stop in itertools.pairwise(edges):
            begun = self._media.begun(start * tokens, (start + 1) * tokens)
            previous = with_items(self._last or self._seed, begun) if begun else self._last
            run = ids[(start - first) * tokens : (stop - first) * tokens]
            parts.append(self._digest(run, tokens, self._seed, previous))
            self._last = parts[-1][-DIGEST_BYTES:]
        return b"".join(parts)

    def names(self, first: int, last: int) -> bytes:
        """The names of the objects of the blocks [first, last)."""
        return self._names[first:last].tobytes()

    def names_at(self, blocks: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]) -> bytes:
        """The name of the object of each (block, column)."""
        return self._names[blocks, columns].tobytes()

    def each_name(self, first: int, last: int, columns: slice) -> list[bytes]:
        """The names of the objects of some columns of the blocks [first, last), block by block."""
        joined = self._names[first:last, columns].tobytes()
        return [joined[at : at + BLOCK_NAME_BYTES] for at in range(0, len(joined), BLOCK_NAME_BYTES)]

    def parents(self, first: int, last: int) -> bytes:
        """The names of the same columns one block, or part of one, earlier; zeros where there is none: in the
        first block, and for roots."""
        parents = np.zeros((last - first, self.width, BLOCK_NAME_BYTES), np.uint8)
        start = max(first - 1, 0)
        parents[start + 1 - first :] = self._names[start : max(last - 1, start)][:, self._last_parts]
        if not self._first_parts.all():
            parents[:, ~self._first_parts] = self._names[first:last, np.flatnonzero(~self._first_parts) - 1]
        parents[:, self._roots] = 0
        return parents.tobytes()
