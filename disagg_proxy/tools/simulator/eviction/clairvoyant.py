"""The upper bound: evicts the block whose next use is furthest away (Belady 1966), and keeps none that is
never used again."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from moonpool.disagg_proxy.tools.simulator.eviction.cache import Cache

_NEVER = 1 << 62


class Clairvoyant(Cache):
    """future: the prompts' blocks, in the order in which ``keep`` will be called. Of blocks of one prompt
    with the same next use, the last is evicted first.
    """

    _held: dict[int, int]  # of what is held, its next

    def __init__(self, blocks_max: int, future: Sequence[Sequence[int]]) -> None:
        super().__init__(blocks_max)
        self._next = _next_uses(future)
        self._heap: list[tuple[int, int, int]] = []  # (-next use, -place in the prompt, block); old are void
        self._calls = 0

    def keep(self, blocks: Sequence[int], now_s: float = 0.0) -> tuple[list[int], list[int]]:
        """As ``Cache.keep``; raises ValueError when ``blocks`` is not as long as the next prompt of
        ``future``. Blocks without a next use go at once."""
        uses = self._held
        before = {block for block in blocks if block in uses}
        gone = set()
        for place, (block, next_use) in enumerate(zip(blocks, self._next[self._calls], strict=True)):
            if next_use == _NEVER:
                uses.pop(block, None)
            else:
                uses[block] = next_use
                heapq.heappush(self._heap, (-next_use, -place, block))
        self._calls += 1
        while len(uses) > self.blocks_max:
            next_use, _, block = heapq.heappop(self._heap)
            if uses.get(block) == -next_use:
                del uses[block]
                gone.add(block)
        gone -= set(blocks)
        gone |= {block for block in before if block not in uses}
        return [block for block in blocks if block in uses and block not in before], list(gone)

    def clear(self) -> list[int]:
        """Everything that was held. The position in ``future`` stays."""
        gone = super().clear()
        self._heap.clear()
        return gone


def _next_uses(future: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each block of each prompt, the index of the next prompt that has it."""
    coming: dict[int, int] = {}
    found = []
    for number in range(len(future) - 1, -1, -1):
        found.append([coming.get(block, _NEVER) for block in future[number]])
        coming.update(dict.fromkeys(future[number], number))
    found.reverse()
    return found
