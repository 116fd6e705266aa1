"""Evicts by how soon the chat that a chain of blocks belongs to will continue, learnt from other chats.

    prompt  -> its chain of blocks -> does it continue an earlier one? then a turn was observed, at some age
    no room -> the chain with the least index (reuse_curves.py) loses blocks from its end, and never a block
               that another held block stands on

A chain whose end is another prompt's beginning is observed only if no chain had that block before: a system
prompt is no chat. Chains are observed after their blocks were evicted, too, WATCHED_MAX at most; otherwise
those that were evicted too soon would never count.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from moonpool.disagg_proxy.tools.simulator.eviction.cache import Cache, changes
from moonpool.disagg_proxy.tools.simulator.eviction.reuse_curves import CLASSES, SLOT_S, SLOTS, ReuseCurves

WATCHED_MAX = 20_000
LEARN_EVERY = 200  # prompts


class _Watched(NamedTuple):
    turns: int
    slot: int


class _Chain:
    """blocks[first:last] are its own: those before belong to a chain that used them later, those behind were
    evicted."""

    __slots__ = ("blocks", "first", "last")

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = blocks
        self.first = 0
        self.last = len(blocks)


class ReuseIndex(Cache):
    """A ``Cache`` that evicts by the index of the chain that owns a block. Not thread safe. A prompt costs
    O(its blocks); the chains are sorted once in each slot in which something is evicted."""

    _held: dict[int, _Chain]

    def __init__(self, blocks_max: int) -> None:
        super().__init__(blocks_max)
        self._behind: dict[int, int] = {}  # how many held blocks stand on this one
        self._groups: dict[_Watched, deque[_Chain]] = {}  # by class and time: all of one index
        self._order: list[_Watched] | None = None  # of the groups, the least index first
        self._watched: OrderedDict[int, _Watched] = OrderedDict()  # by a chain's last block
        self._curves = ReuseCurves()
        self._slot = 0
        self._prompts = 0

    def keep(self, blocks: Sequence[int], now_s: float) -> tuple[list[int], list[int]]:
        """now_s: not before that of the last call."""
        self._tick(int(now_s / SLOT_S))
        if not blocks or not self.blocks_max:
            return [], []
        came = self._own(blocks, self._watch(blocks))
        went: list[int] = []
        if len(self._held) > self.blocks_max:
            self._evict(went)
        return changes(came, went)

    def clear(self) -> list[int]:
        """Everything that was held. What was learnt stays."""
        gone = super().clear()
        self._behind.clear()
        self._groups.clear()
        self._order = None
        return gone

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert len(self._held) <= self.blocks_max
        behind: dict[int, int] = {}
        for block, chain in self._held.items():
            place = list(chain.blocks).index(block)
            assert chain.first <= place < chain.last
            if place:
                before = chain.blocks[place - 1]
                assert before in self._held
                behind[before] = behind.get(before, 0) + 1
        assert behind == {block: count for block, count in self._behind.items() if count}

    def _tick(self, slot: int) -> None:
        if slot != self._slot:
            self._slot = slot
            self._order = None
        self._prompts += 1
        if self._prompts % LEARN_EVERY == 0:
            self._curves.learn((each.turns, slot - each.slot) for each in self._watched.values())
            self._order = None

    def _watch(self, blocks: Sequence[int]) -> _Watched:
        """Learns which earlier chains this prompt continues, and observes it as a chain."""
        known = blocks[-1] in self._held and blocks[-1] not in self._watched
        turns = 0
        for block in blocks:
            seen = self._watched.pop(block, None)
            if seen is not None:
                self._curves.went_on(seen.turns, self._slot - seen.slot)
                turns = min(seen.turns + 1, CLASSES - 1)
        now = _Watched(turns, self._slot)
        if not known:
            self._watched[blocks[-1]] = now
            if len(self._watched) > WATCHED_MAX:
                _, lost = self._watched.popitem(last=False)
                self._curves.lost(lost.turns, self._slot - lost.slot)
        return now

    def _own(self, blocks: Sequence[int], group: _Watched) -> list[int]:
        """Returns the blocks that are new here."""
        chain = _Chain(blocks)
        came = []
        for place, block in enumerate(blocks):
            owner = self._held.get(block)
            if owner is not None:
                owner.first = max(owner.first, place + 1)
            else:
                came.append(block)
                if place:
                    self._behind[blocks[place - 1]] = self._behind.get(blocks[place - 1], 0) + 1
            self._held[block] = chain
        if group not in self._groups:
            self._groups[group] = deque()
            self._order = None
        self._groups[group].append(chain)
        return came

    def _evict(self, went: list[int]) -> None:
        """Evicts until the rest fits. One pass over all chains may not be enough: a block can only be evicted
        after those that stand on it."""
        while len(self._held) > self.blocks_max:
            if self._order is None:
                self._order = sorted(self._groups, key=self._index)
            empty = [group for group in self._order if self._shrink(self._groups[group], went)]
            if empty:
                for group in empty:
                    del self._groups[group]
                self._order = [group for group in self._order if group in self._groups]

    def _index(self, group: _Watched) -> tuple[float, int]:
        return self._curves.index[group.turns][min(self._slot - group.slot, SLOTS - 1)], group.slot

    def _shrink(self, chains: deque[_Chain], went: list[int]) -> bool:
        """Evicts blocks from these chains' ends until the rest fits. Returns whether none of them has any
        left."""
        stuck = []
        while chains and len(self._held) > self.blocks_max:
            chain = chains.popleft()
            self._shorten(chain, went)
            if chain.first < chain.last:
                stuck.append(chain)
        chains.extendleft(reversed(stuck))
        return not chains

    def _shorten(self, chain: _Chain, went: list[int]) -> None:
        blocks = chain.blocks
        while chain.first < chain.last and len(self._held) > self.blocks_max:
            block = blocks[chain.last - 1]
            if self._behind.get(block):
                return
            del self._held[block]
            self._behind.pop(block, None)
            went.append(block)
            chain.last -= 1
            if chain.last:
                self._behind[blocks[chain.last - 1]] -= 1
