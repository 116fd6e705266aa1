"""Which of the simulated instances' prefix caches (``eviction``) holds which blocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from moonpool.disagg_proxy.tools.simulator.eviction.cache import Cache
from moonpool.disagg_proxy.tools.simulator.eviction.recency import Lru
from moonpool.disagg_proxy.tools.simulator.expected import Expected, drop

_FEW = 24  # bits that are visited one by one; more are expanded at once


class Held(NamedTuple):
    """Which caches hold a prompt's blocks: leading blocks by place, times ``find``'s unit, and in all of them
    together. best: the first place that holds most of them.
    """

    by_place: array[int]
    anywhere: int
    best: int


class Caches:
    """One cache for each place. The holders of a block are a set of bits, so that one question for a prompt
    costs a few operations a block and not one for each cache.
    """

    def __init__(self, blocks_max: int, make: Callable[[int], Cache] = Lru, *, places: int = 0) -> None:
        self.caches: list[Cache] = []
        self._blocks_max = blocks_max
        self._make = make
        self._holders: dict[int, int] = {}
        self._bits: list[int] = []  # by place
        self._zeros = b""  # a zero for each place
        for _ in range(places):
            self.add()

    def add(self) -> None:
        """Adds a place."""
        self._bits.append(1 << len(self.caches))
        self._zeros += bytes(4)
        self.caches.append(self._make(self._blocks_max))

    def keep(self, place: int, blocks: Sequence[int], now_s: float) -> None:
        """The cache at this place now holds, and has just used, these leading blocks of a prompt."""
        new, gone = self.caches[place].keep(blocks, now_s)
        holders, bit = self._holders, self._bits[place]
        for block in new:
            # Most blocks have one holder: all of its blocks share one number.
            held = holders.get(block)
            holders[block] = bit if held is None else held | bit
        drop(holders, gone, bit)

    def clear(self, place: int) -> None:
        """Removes the cache at this place with all its blocks."""
        drop(self._holders, self.caches[place].clear(), self._bits[place])

    def find(self, blocks: Sequence[int], *, expected: Expected | None = None, unit: int = 1) -> Held:
        """expected: by_place includes blocks that are on their way there, as in a proxy's index. unit: the
        number that by_place counts for a block."""
        by_place = array("I", self._zeros)
        holders = self._holders.get
        coming = expected.holders.get if expected is not None else None
        alive = most = (1 << len(by_place)) - 1
        count = anywhere = 0
        for count, block in enumerate(blocks):
            having = holders(block, 0)
            if having and anywhere == count:
                anywhere += 1
            if coming is not None:
                having |= coming(block, 0)
            left = alive & having
            if left != alive:
                _write(by_place, alive ^ left, count * unit)
                alive = left
                if alive:
                    most = alive
                elif anywhere <= count:
                    break
        _write(by_place, alive, len(blocks) * unit)
        return Held(by_place, anywhere, (most & -most).bit_length() - 1)

    def length(self, place: int, blocks: Sequence[int]) -> int:
        """How many leading blocks this cache holds."""
        holders, bit = self._holders.get, self._bits[place]
        for count, block in enumerate(blocks):
            if not holders(block, 0) & bit:
                return count
        return len(blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        for cache in self.caches:
            assert len(cache) <= cache.blocks_max
        for block, places in self._holders.items():
            assert places
            assert all(
                (block in cache) == bool(places >> place & 1) for place, cache in enumerate(self.caches)
            )
        assert sum(map(len, self.caches)) == sum(places.bit_count() for places in self._holders.values())


def _write(values: array[int], places: int, value: int) -> None:
    """value to each of these places (a set of bits)."""
    if not value or not places:
        return
    if places.bit_count() > _FEW:
        size = len(values)
        bits = np.frombuffer(places.to_bytes((size + 7) // 8, "little"), np.uint8)
        chosen = np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)
        np.frombuffer(values, np.uint32)[chosen] = value
        return
    while places:
        place = places.bit_length() - 1
        values[place] = value
        places ^= 1 << place
