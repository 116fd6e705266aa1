"""The longest prefix from which every KV cache group of an engine with sliding windows can go on.

Groups that look at everything need all blocks of a prefix, the others only its last ones; a group with states
is one with a window of one block. A query of a length names what that length needs, object by object, and the
pool pins the objects before the first that it lacks:

    names     block 0 .. block n-1 of the full groups | last block, the one before it, ... of the windows
    answer    all of them: a hit of n blocks
              all before one of a full group's block b: the prefix ends there, the next query is of b blocks
              all before one of a window's block b: no length from b+1 on whose windows have it

The first time that a window lacks a block one more query tells which blocks the windows have at all (of each
group one object stands for the block), and the next lengths are chosen by it. Pure: names out, answers in.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.connectors.vllm.group_blocks import objects_of
from moonpool.connectors.vllm.reach import Counts, Reach
from moonpool.connectors.vllm.requests.chain import Chain
from moonpool.core.store.keys import Ranges

PRESENCE_OBJECTS_MAX = 4096  # blocks of windows farther back than so many objects count as not there
QUERIES_MAX = 8  # for one request
DESCRIPTOR_BYTES = 32

Positions = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Window:
    """A group that does not need all blocks.

    split: how many of its own blocks are parts of a block.
    tokens: of one of its own blocks.
    columns: its objects of a block.
    parts: for each of ``columns`` which part it is of.
    """

    reach: Reach
    split: int
    tokens: int
    columns: Positions
    parts: Positions

    def first_block(self, lengths: Counts) -> Counts:
        """For each prefix of so many blocks the first of the group's own blocks that it needs."""
        return self.reach.first_block(lengths * self.split, self.tokens)


class Needs:
    """Which objects of its blocks a prefix needs, in an engine with sliding windows.

    full: the columns of groups that look at everything.
    windows: each other group.
    """

    def __init__(
        self,
        columns: Sequence[Ranges],
        reaches: Sequence[Reach],
        block_tokens: int,
        splits: Sequence[int] = (),
    ) -> None:
        """columns: what ranks hold of a block, an object of each part.
        splits: of each group how many of its blocks are parts of a block; (): one.
        """
        objects = objects_of(columns, splits)
        self.width = len(objects)
        groups = np.array([columns[place].group for place, _, _ in objects], np.intp)
        parts = np.array([part for _, part, _ in objects], np.intp)
        full = [group for group, reach in enumerate(reaches) if reach.is_full]
        self.full: Positions = np.flatnonzero(np.isin(groups, full))
        self.windows: list[Window] = []
        for group, reach in enumerate(reaches):
            if not reach.is_full:
                own, split = np.flatnonzero(groups == group), splits[group] if splits else 1
                self.windows.append(Window(reach, split, block_tokens // split, own, parts[own]))

    def objects(self, blocks: int) -> tuple[Positions, Positions]:
        """(block, column) of each object that a prefix of so many blocks needs, in the order of a query."""
        wanted = np.zeros((blocks, self.width), np.bool_)
        for window in self.windows:
            first = int(window.first_block(np.array(blocks)))
            own_blocks = np.arange(blocks)[:, None] * window.split + window.parts
            wanted[:, window.columns] = own_blocks >= first
        backwards, columns = np.nonzero(wanted[::-1])
        of_full = np.repeat(np.arange(blocks), len(self.full)), np.tile(self.full, blocks)
        return np.concatenate([of_full[0], blocks - 1 - backwards]), np.concatenate([of_full[1], columns])


class Want(enum.Enum):
    """What a search needs next."""

    PREFIX = "the leading objects of names()"
    PRESENCE = "which of presence_names() are there"
    NOTHING = "nothing: it is over"


class PrefixSearch:
    """The search for one request. ``blocks`` is the length that is asked for; with NOTHING, the hit's."""

    def __init__(self, needs: Needs, chain: Chain, blocks: int) -> None:
        """blocks: of the chain, from the first on, that may be loaded."""
        self._needs = needs
        self._chain = chain
        self.blocks = blocks
        self._there: list[npt.NDArray[np.bool_]] | None = None  # of each window group: [its own block]
        self._asked_first = 0
        self._queries = 0
        self._at: tuple[Positions, Positions] = needs.objects(blocks)
        self.want = Want.PREFIX if len(self._at[0]) else self._end()

    def names(self) -> bytes:
        """What a prefix of ``blocks`` blocks needs."""
        return self._chain.names_at(*self._at)

    def found(self, objects: int) -> bool:
        """So many leading objects of ``names`` are pinned. Returns whether that is a hit."""
        self._queries += 1
        blocks, columns = self._at
        if objects >= len(blocks):
            self.want = Want.NOTHING
            return True
        if self._queries >= QUERIES_MAX:
            self._end()
            return False
        lacking = int(blocks[objects])
        if objects < self.blocks * len(self._needs.full):
            self._next(lacking)
            return False
        if self._there is None:
            parts = sum(window.split for window in self._needs.windows)
            self._asked_first = max(0, self.blocks - PRESENCE_OBJECTS_MAX // max(parts, 1))
            self.want = Want.PRESENCE
            return False
        for window, there in zip(self._needs.windows, self._there, strict=True):
            own = np.flatnonzero(window.columns == columns[objects])
            if len(own):  # another object of the block than the one that stood for it
                there[lacking * window.split + int(window.parts[own[0]])] = False
        self._next(self.blocks)
        return False

    def presence_names(self) -> list[bytes]:
        """One object of each block of each window's group."""
        first = self._asked_first
        return [
            name
            for window in self._needs.windows
            for start in [int(window.columns[0])]
            for name in self._chain.each_name(first, self.blocks, slice(start, start + window.split))
        ]

    def present(self, flags: bytes) -> None:
        """For each of ``presence_names`` whether it is there: 1."""
        seen, asked = np.frombuffer(flags, np.uint8) == 1, self.blocks - self._asked_first
        self._there = []
        for window in self._needs.windows:
            there = np.zeros(self.blocks * window.split, np.bool_)
            there[self._asked_first * window.split :] = seen[: asked * window.split]
            seen = seen[asked * window.split :]
            self._there.append(there)
        self._next(self.blocks)

    def descriptors(self, found: bytes) -> bytes:
        """The descriptors of a hit block by block, ``Needs.width`` each; zeros for what is not needed."""
        table = np.zeros((self.blocks, self._needs.width, DESCRIPTOR_BYTES), np.uint8)
        table[self._at] = np.frombuffer(found, np.uint8).reshape(-1, DESCRIPTOR_BYTES)
        return table.tobytes()

    def _next(self, limit: int) -> None:
        """The longest length up to ``limit`` that may be there is asked for next."""
        self.blocks = limit if self._there is None else self._longest(self._there, limit)
        self._at = self._needs.objects(self.blocks)
        self.want = Want.PREFIX if self.blocks and len(self._at[0]) else self._end()

    def _longest(self, there: Sequence[npt.NDArray[np.bool_]], limit: int) -> int:
        """The longest prefix of up to ``limit`` blocks whose windows are all there."""
        lengths = np.arange(limit + 1)
        good = np.ones(len(lengths), np.bool_)
        for window, has in zip(self._needs.windows, there, strict=True):
            gaps = np.where(has, -1, np.arange(len(has)))
            last_gap = np.concatenate([[-1], np.maximum.accumulate(gaps)])  # before each of its own blocks
            good &= last_gap[lengths * window.split] < window.first_block(lengths)
        return int(np.flatnonzero(good)[-1])

    def _end(self) -> Want:
        self.blocks = 0
        self.want = Want.NOTHING
        return self.want
