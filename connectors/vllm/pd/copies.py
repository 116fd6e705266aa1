"""From two engines' layouts to the ranges to read.

An object of a block is, in each engine, the concatenation of some rows (see ``layout``); its bytes are the
same, the rows need not be. Cut at every border of either side, they pair up:

    theirs   |------ row 0 ------|-- row 1 --|
    mine     |-- row 0 --|------ row 1 ------|
    pairs    |-----------|-------|-----------|

Neighbours that are neighbours on both sides are one pair again, so that two engines of one layout read one
range per layer and block; and where whole blocks lie side by side on both sides, one per run of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.connectors.vllm.layout import Refused
from moonpool.connectors.vllm.pool import Rows
from moonpool.core.keys import Ranges

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Pair:
    """``length`` bytes of block 0 and the way to other blocks, here and there. group: of the block ids."""

    group: int
    here: int
    here_stride: int
    there: int
    there_stride: int
    length: int

    @property
    def is_dense(self) -> bool:
        """Whether runs of blocks are runs of bytes on both sides."""
        return self.here_stride == self.length == self.there_stride


def pair_rows(columns: Sequence[Ranges], here: Rows, there: Rows) -> tuple[Pair, ...]:
    """Of the same columns, here and there. Raises Refused when their objects differ in size."""
    pairs: list[Pair] = []
    for ranges, ours, theirs in zip(columns, here, there, strict=True):
        if sum(row[2] for row in ours) != sum(row[2] for row in theirs):
            raise Refused("the two engines' blocks differ in size")
        for pair in _cut(ranges.group, ours, theirs):
            _append(pairs, pair)
    return tuple(_merge(pairs))


def ranges_of(
    pairs: Sequence[Pair], here: Sequence[Sequence[int]], there: Sequence[Sequence[int]]
) -> tuple[Addresses, Addresses, Addresses]:
    """(addresses here, addresses there, lengths) of blocks, whose ids are given per group."""
    columns: list[tuple[Addresses, Addresses, Addresses]] = []
    runs = [_runs(ours, theirs) for ours, theirs in zip(here, there, strict=True)]
    for pair in pairs:
        if pair.is_dense:
            ours, theirs, counts = runs[pair.group]
        else:
            ours, theirs = _u64(here[pair.group]), _u64(there[pair.group])
            counts = np.ones(len(ours), np.uint64)
        columns.append(
            (
                np.uint64(pair.here) + ours * np.uint64(pair.here_stride),
                np.uint64(pair.there) + theirs * np.uint64(pair.there_stride),
                counts * np.uint64(pair.length),
            )
        )
    local, remote, lengths = (np.concatenate(column) for column in zip(*columns, strict=True))
    return local, remote, lengths


def _cut(
    group: int, ours: Sequence[tuple[int, int, int]], theirs: Sequence[tuple[int, int, int]]
) -> list[Pair]:
    pairs: list[Pair] = []
    mine, other = list(reversed(ours)), list(reversed(theirs))
    while mine and other:
        (here, here_stride, room), (there, there_stride, left) = mine.pop(), other.pop()
        length = min(room, left)
        pairs.append(Pair(group, here, here_stride, there, there_stride, length))
        if room > length:
            mine.append((here + length, here_stride, room - length))
        if left > length:
            other.append((there + length, there_stride, left - length))
    return pairs


def _append(pairs: list[Pair], pair: Pair) -> None:
    """Adds a pair, to its neighbour where that ends where this begins, on both sides."""
    last = pairs[-1] if pairs else None
    if (
        last is not None
        and (last.group, last.here_stride, last.there_stride)
        == (pair.group, pair.here_stride, pair.there_stride)
        and last.here + last.length == pair.here
        and last.there + last.length == pair.there
    ):
        pairs[-1] = Pair(
            last.group, last.here, last.here_stride, last.there, last.there_stride, last.length + pair.length
        )
    else:
        pairs.append(pair)


def _merge(pairs: list[Pair]) -> list[Pair]:
    """Columns are cut head by head: what lies side by side in memory is read as one."""
    merged: list[Pair] = []
    for pair in sorted(pairs, key=lambda pair: (pair.group, pair.here)):
        _append(merged, pair)
    return merged


def _runs(ours: Sequence[int], theirs: Sequence[int]) -> tuple[Addresses, Addresses, Addresses]:
    """(first block here, first block there, blocks) of each run that goes up by one on both sides."""
    here, there = np.asarray(ours, np.int64), np.asarray(theirs, np.int64)
    breaks = np.flatnonzero((np.diff(here) != 1) | (np.diff(there) != 1)) + 1
    starts = np.concatenate((np.zeros(1, np.int64), breaks))
    counts = np.diff(np.concatenate((starts, np.asarray([len(here)], np.int64))))
    return here[starts].astype(np.uint64), there[starts].astype(np.uint64), counts.astype(np.uint64)


def _u64(ids: Sequence[int]) -> Addresses:
    return np.asarray(ids, np.uint64)
