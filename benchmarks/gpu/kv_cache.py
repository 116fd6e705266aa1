"""A paged KV cache of the 8B shape on a card: its rows, its bytes, and what blocks of it have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.card import Bytes, Card

LAYERS, HEADS, BLOCK_TOKENS, CONTENT = 32, 8, 16, 512  # CONTENT: K and V of a token of a head, bf16, in bytes
BLOCK_BYTES = HEADS * BLOCK_TOKENS * CONTENT  # of one layer
OBJECT_BYTES = LAYERS * BLOCK_TOKENS * CONTENT  # one head of one block
ORDERS = ("tokens first", "heads first")

Rows = list[list[tuple[int, int, int]]]


@dataclass(frozen=True)
class KvCache:
    """layer | block | token | head | content ("tokens first"), or layer | block | head | token | content."""

    address: int
    blocks: int

    @property
    def size(self) -> int:
        return LAYERS * self.blocks * BLOCK_BYTES

    def rows(self, order: str) -> Rows:
        """Of each head: (address in block 0, bytes to the next block, length)."""
        layer_bytes = self.blocks * BLOCK_BYTES
        columns: Rows = []
        for head in range(HEADS):
            rows = []
            for layer in range(LAYERS):
                begin = self.address + layer * layer_bytes
                if order == "heads first":
                    length = BLOCK_TOKENS * CONTENT
                    rows.append((begin + head * length, BLOCK_BYTES, length))
                    continue
                rows += [
                    (begin + (token * HEADS + head) * CONTENT, BLOCK_BYTES, CONTENT)
                    for token in range(BLOCK_TOKENS)
                ]
            columns.append(rows)
        return columns

    def fill(self, card: Card, scratch: Bytes, seed: int) -> None:
        """Random bytes, by way of pinned memory; no two places of ``scratch.size`` bytes are alike."""
        source = np.random.default_rng(seed)
        scratch[:] = source.integers(0, 256, scratch.size, np.uint8)
        words = scratch.view(np.uint64)
        for at in range(0, self.size, scratch.size):
            words += np.uint64(0x9E3779B97F4A7C15)
            card.queue(self.address + at, scratch.ctypes.data, min(scratch.size, self.size - at))
            card.finish()


def same_blocks(
    card: Card, one: KvCache, other: KvCache, ids: npt.NDArray[np.uint32], moved: npt.NDArray[np.uint32]
) -> bool:
    """Whether each block ``ids[i]`` of ``one`` has the bytes of block ``moved[i]`` of ``other``. Reads all of
    both."""
    here, there = (card.pinned(cache.blocks * BLOCK_BYTES, n) for n, cache in enumerate((one, other)))
    for layer in range(LAYERS):
        card.queue(here.ctypes.data, one.address + layer * here.size, here.size)
        card.queue(there.ctypes.data, other.address + layer * there.size, there.size)
        card.finish()
        if not np.array_equal(here.reshape(-1, BLOCK_BYTES)[ids], there.reshape(-1, BLOCK_BYTES)[moved]):
            return False
    return True
