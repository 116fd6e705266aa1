"""Eviction by how often a block is used: LFU, and two that approximate it with queues, SIEVE and S3-FIFO."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from moonpool.disagg_proxy.tools.simulator.eviction.cache import Cache, changes


class Lfu(Cache):
    """Least frequently used since its insertion; of equals the least recently used."""

    _held: dict[int, tuple[int, int]]  # (number of uses, last use)

    def __init__(self, blocks_max: int) -> None:
        super().__init__(blocks_max)
        self._heap: list[tuple[int, int, int]] = []  # (number of uses, last use, block); old ones are void
        self._now = 0

    def keep(self, blocks: Sequence[int], now_s: float = 0.0) -> tuple[list[int], list[int]]:
        """As ``Cache.keep``. Counts last as long as a block is held; each use costs a heap's push."""
        uses, heap = self._held, self._heap
        came, went = [], []
        for block in reversed(blocks):
            self._now += 1
            often, _ = uses.get(block, (0, 0))
            if not often:
                came.append(block)
            uses[block] = (often + 1, self._now)
            heapq.heappush(heap, (often + 1, self._now, block))
        while len(uses) > self.blocks_max:
            often, when, block = heapq.heappop(heap)
            if uses.get(block) == (often, when):
                del uses[block]
                went.append(block)
        if len(heap) > 4 * len(uses) + 64:
            heap[:] = [(*use, block) for block, use in uses.items()]
            heapq.heapify(heap)
        return changes(came, went)

    def clear(self) -> list[int]:
        """Everything that was held. All counts are lost."""
        gone = super().clear()
        self._heap.clear()
        return gone


class Sieve(Cache):
    """SIEVE (Zhang et al., NSDI '24): a queue in which a use only sets a mark, and a hand that moves from the
    oldest to the newest, clears marks, and evicts the first block without one."""

    _held: dict[int, bool]  # whether it is marked

    def __init__(self, blocks_max: int) -> None:
        super().__init__(blocks_max)
        self._newer: dict[int, int | None] = {}
        self._older: dict[int, int | None] = {}
        self._newest: int | None = None
        self._oldest: int | None = None
        self._hand: int | None = None

    def keep(self, blocks: Sequence[int], now_s: float = 0.0) -> tuple[list[int], list[int]]:
        """As ``Cache.keep``. O(1) for a block that is held; for another, the marks that the hand clears."""
        came, went = [], []
        for block in reversed(blocks if self.blocks_max else ()):
            if block in self._held:
                self._held[block] = True
                continue
            if len(self._held) >= self.blocks_max:
                went.append(self._evict())
            came.append(block)
            self._push(block)
        return changes(came, went)

    def clear(self) -> list[int]:
        """Everything that was held. Marks and hand are reset."""
        gone = list(self._held)
        self.__init__(self.blocks_max)  # type: ignore[misc]
        return gone

    def _push(self, block: int) -> None:
        self._held[block] = False
        self._older[block], self._newer[block] = self._newest, None
        if self._newest is not None:
            self._newer[self._newest] = block
        else:
            self._oldest = block
        self._newest = block

    def _evict(self) -> int:
        at = self._hand if self._hand is not None else self._oldest
        assert at is not None
        while self._held[at]:
            self._held[at] = False
            newer = self._newer[at]
            at = newer if newer is not None else self._oldest
            assert at is not None
        older, newer = self._older.pop(at), self._newer.pop(at)
        self._hand = newer
        if older is not None:
            self._newer[older] = newer
        else:
            self._oldest = newer
        if newer is not None:
            self._older[newer] = older
        else:
            self._newest = older
        del self._held[at]
        return at


class S3Fifo(Cache):
    """S3-FIFO (Yang et al., SOSP '23): a small queue of a tenth of the room for new blocks, a main one for
    those that were used again, and the ids of blocks evicted from the small one, as many as the cache holds,
    which go into the main one when they return.
    """

    SMALL = 0.1
    USES_MAX = 3
    _held: dict[int, int]  # since it came into its queue

    def __init__(self, blocks_max: int) -> None:
        super().__init__(blocks_max)
        self._small_max = max(int(blocks_max * self.SMALL), 1)
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def keep(self, blocks: Sequence[int], now_s: float = 0.0) -> tuple[list[int], list[int]]:
        """As ``Cache.keep``. A use counts up to USES_MAX and moves nothing; queues change when a block must
        go."""
        uses = self._held
        came, went = [], []
        for block in reversed(blocks if self.blocks_max else ()):
            if block in uses:
                uses[block] = min(uses[block] + 1, self.USES_MAX)
                continue
            while len(uses) >= self.blocks_max:
                went.append(self._evict())
            came.append(block)
            uses[block] = 0
            if block in self._ghosts:
                del self._ghosts[block]
                self._main[block] = None
            else:
                self._small[block] = None
        return changes(came, went)

    def clear(self) -> list[int]:
        """Everything that was held. The remembered ids are lost."""
        gone = list(self._held)
        for each in (self._held, self._small, self._main, self._ghosts):
            each.clear()
        return gone

    def _evict(self) -> int:
        uses = self._held
        if len(self._small) >= self._small_max:
            while self._small:
                block, _ = self._small.popitem(last=False)
                if uses[block]:
                    uses[block] = 0
                    self._main[block] = None
                    continue
                del uses[block]
                self._ghosts[block] = None
                if len(self._ghosts) > self.blocks_max:
                    self._ghosts.popitem(last=False)
                return block
        while True:
            if not self._main:  # all held blocks are new
                block, _ = self._small.popitem(last=False)
                break
            block, _ = self._main.popitem(last=False)
            if not uses[block]:
                break
            uses[block] -= 1
            self._main[block] = None
        del uses[block]
        return block
