"""Blocks on their way to instances' caches, as far as one proxy knows."""

from __future__ import annotations

from collections.abc import Sequence


class Expected:
    """holders: by block, the places that will hold it, as a set of bits (``Caches``)."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self._counts: dict[int, dict[int, int]] = {}  # by place and block, of prompts

    def __len__(self) -> int:
        return len(self.holders)

    def expect(self, place: int, blocks: Sequence[int]) -> None:
        """A prompt of these blocks is on its way there, until ``arrived``."""
        bit, holders, counts = 1 << place, self.holders, self._counts.setdefault(place, {})
        for block in blocks:
            if block in counts:
                counts[block] += 1
            else:
                counts[block] = 1
                held = holders.get(block)
                holders[block] = bit if held is None else held | bit

    def arrived(self, place: int, blocks: Sequence[int]) -> None:
        """The prompt's blocks have arrived, or will not. An unknown or forgotten prompt is ignored."""
        counts = self._counts.get(place, {})
        over = []
        for block in blocks:
            if block not in counts:
                continue
            count = counts[block]
            if count > 1:
                counts[block] = count - 1
            else:
                del counts[block]
                over.append(block)
        drop(self.holders, over, 1 << place)

    def forget(self, place: int) -> None:
        """Forgets all blocks on their way to this place."""
        drop(self.holders, list(self._counts.pop(place, ())), 1 << place)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        holders: dict[int, int] = {}
        for place, counts in self._counts.items():
            assert all(count > 0 for count in counts.values())
            for block in counts:
                holders[block] = holders.get(block, 0) | 1 << place
        assert holders == self.holders


def drop(holders: dict[int, int], blocks: Sequence[int], bit: int) -> None:
    """Removes the place's bit from the sets of these blocks."""
    for block in blocks:
        held = holders[block]
        if held == bit:
            del holders[block]
        else:
            holders[block] = held ^ bit
