"""The interface of a prefix cache in the simulator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any


class Cache(ABC):
    """blocks_max: the most blocks that it holds; 0: none."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._held: dict[int, Any] = {}  # by block, with what the rule keeps of it

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    @abstractmethod
    def keep(self, blocks: Sequence[int], now_s: float) -> tuple[list[int], list[int]]:
        """Uses the leading blocks of a prompt. Returns (blocks that are held now and were not before, blocks
        that were held and are evicted)."""

    def clear(self) -> list[int]:
        """Evicts everything, and returns it."""
        gone = list(self._held)
        self._held.clear()
        return gone


def changes(came: list[int], went: list[int]) -> tuple[list[int], list[int]]:
    """(new, gone) from insertions and evictions in sequence: a block may be in both."""
    if not went:
        return came, went
    balance = Counter(came)
    balance.subtract(went)
    return (
        [block for block, count in balance.items() if count > 0],
        [block for block, count in balance.items() if count < 0],
    )
