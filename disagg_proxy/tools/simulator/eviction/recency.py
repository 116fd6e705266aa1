"""Eviction by age: least recently used, first in first out, and batches as in Mooncake's master."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from itertools import islice

from moonpool.disagg_proxy.tools.simulator.eviction.cache import Cache


class Lru(Cache):
    """Least recently used. Of a prompt larger than the cache, the front is kept."""

    touches = True
    _held: dict[int, None]  # the next one to be evicted first

    def keep(self, blocks: Sequence[int], now_s: float = 0.0) -> tuple[list[int], list[int]]:
        """As ``Cache.keep``, O(1) for each block. Without ``touches`` a use moves nothing."""
        kept = self._held
        new = []
        for block in reversed(blocks[: self.blocks_max]):
            if block not in kept:
                new.append(block)
            elif self.touches:
                del kept[block]
            kept[block] = None
        if len(kept) <= self.blocks_max:
            return new, []
        gone = list(islice(kept, len(kept) - self.blocks_max))
        for block in gone:
            del kept[block]
        return new, gone


class Fifo(Lru):
    """First in, first out: a use changes nothing."""

    touches = False


class Batches(Cache):
    """As Mooncake's master evicts: above HIGH of the room, SHARE of the room at once, least recently used
    first. A prompt's blocks have the same last use, so that chance decides between them."""

    HIGH = 0.9
    SHARE = 0.05
    _held: dict[int, int]  # the number of its last use

    def __init__(self, blocks_max: int) -> None:
        super().__init__(blocks_max)
        self._uses = 0
        self._random = random.Random(blocks_max)

    def keep(self, blocks: Sequence[int], now_s: float = 0.0) -> tuple[list[int], list[int]]:
        """As ``Cache.keep``. A prompt that is longer than HIGH of the room keeps that much of its front; what
        is evicted may be of the same prompt."""
        used = self._held
        blocks = blocks[: int(self.blocks_max * self.HIGH)]
        self._uses += 1
        new = [block for block in blocks if block not in used]
        for block in blocks:
            used[block] = self._uses
        gone: set[int] = set()
        while len(used) > self.blocks_max * self.HIGH:
            chance = self._random.random
            oldest = heapq.nsmallest(
                max(int(self.SHARE * self.blocks_max), 1),
                ((use, chance(), block) for block, use in used.items()),
            )
            for _, _, block in oldest:
                del used[block]
                gone.add(block)
        if gone:
            new, fresh = [block for block in new if block not in gone], set(new)
            gone -= fresh
        return new, list(gone)
