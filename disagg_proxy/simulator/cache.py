"""Which of the simulated instances' prefix caches (``eviction``) holds what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.disagg_proxy.simulator.eviction.cache import Cache
from moonpool.disagg_proxy.simulator.eviction.recency import Lru
from moonpool.disagg_proxy.simulator.expected import Expected, drop

_FEW = 24  # bits that are walked one by one; more are written out at once


class Held:
    """What a prompt's blocks are to the caches: leading ones by place, times ``find``'s unit, and in all of
    them together.
    """

    __slots__ = ("anywhere", "by_place")

    def __init__(self, by_place: list[int], anywhere: int) -> None:
        self.by_place = by_place
        self.anywhere = anywhere

    @property
    def best(self) -> int:
        """The place that holds most of them."""
        return self.by_place.index(max(self.by_place))


class Caches:
    """One cache for each place. Who holds a block is a set of bits, so that one question for a prompt costs a
    few operations a block and not one for each cache.
    """

    def __init__(self, blocks_max: int, make: Callable[[int], Cache] = Lru, *, places: int = 0) -> None:
        self.caches: list[Cache] = []
        self._blocks_max = blocks_max
        self._make = make
        self._holders: dict[int, int] = {}
        self._bits: list[int] = []  # by place
        for _ in range(places):
            self.add()

    def add(self) -> None:
        """One more place."""
        self._bits.append(1 << len(self.caches))
        self.caches.append(self._make(self._blocks_max))

    def keep(self, place: int, blocks: Sequence[int], now_s: float) -> None:
        """This cache has, and used, these leading blocks of a prompt."""
        new, gone = self.caches[place].keep(blocks, now_s)
        holders, bit = self._holders, self._bits[place]
        for block in new:
            # Most blocks have one holder: all of its blocks share one number.
            held = holders.get(block)
            holders[block] = bit if held is None else held | bit
        drop(holders, gone, bit)

    def clear(self, place: int) -> None:
        """The cache is gone with all that it held."""
        drop(self._holders, self.caches[place].clear(), self._bits[place])

    def find(self, blocks: Sequence[int], *, expected: Expected | None = None, unit: int = 1) -> Held:
        """expected: by_place counts what is on its way there, too, as in a proxy's index. unit: what by_place
        counts a block as."""
        by_place = [0] * len(self.caches)
        holders = self._holders.get
        coming = expected.holders.get if expected is not None else None
        alive = (1 << len(by_place)) - 1
        count = anywhere = 0
        for count, block in enumerate(blocks):
            having = holders(block, 0)
            anywhere += having != 0 and anywhere == count
            if coming is not None:
                having |= coming(block, 0)
            if alive & ~having:
                _write(by_place, alive & ~having, count * unit)
                alive &= having
                if not alive and anywhere <= count:
                    break
        _write(by_place, alive, len(blocks) * unit)
        return Held(by_place, anywhere)

    def length(self, place: int, blocks: Sequence[int]) -> int:
        """How many leading blocks this cache holds."""
        cache = self.caches[place]
        return next((count for count, block in enumerate(blocks) if block not in cache), len(blocks))

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


def _write(values: list[int], places: int, value: int) -> None:
    """value to each of these places (a set of bits)."""
    if not value or not places:
        return
    if places.bit_count() > _FEW:
        for place, bit in enumerate(bin(places)[:1:-1]):
            if bit == "1":
                values[place] = value
        return
    while places:
        place = places.bit_length() - 1
        values[place] = value
        places ^= 1 << place
