"""What a prefix cache is to the simulator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any


class Cache(ABC):
    """blocks_max: what it holds; 0 keeps nothing."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._held: dict[int, Any] = {}  # by block, with what the rule keeps of it

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    @abstractmethod
    def keep(self, blocks: Sequence[int], now_s: float) -> tuple[list[int], list[int]]:
        """The leading blocks of a prompt, now used. Returns those that are held now and were not before, and
        those that were and are not."""

    def clear(self) -> list[int]:
        """All that was there."""
        gone = list(self._held)
        self._held.clear()
        return gone


def changes(came: list[int], went: list[int]) -> tuple[list[int], list[int]]:
    """(new, gone) of what came and went one after the other: a block may have done both."""
    if not went:
        return came, went
    balance = Counter(came)
    balance.subtract(went)
    return (
        [block for block, count in balance.items() if count > 0],
        [block for block, count in balance.items() if count < 0],
    )
