"""The byte ranges to read, from the layouts of two engines.

An object of a block is, in each engine, the concatenation of some rows (see ``layout``). Its bytes are the
same in both engines, its rows may differ. Cut at every border of either side, the rows pair up:

    theirs   |------ row 0 ------|-- row 1 --|
    mine     |-- row 0 --|------ row 1 ------|
    pairs    |-----------|-------|-----------|

Ranges that touch on both sides become one pair again. So two engines of one layout read one range per layer
and block, and one per run of blocks where whole blocks touch on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm.pd.kv_transfer_params import BlockIds
from moonpool.connectors.vllm.pd.rank_pairs import Share
from moonpool.connectors.vllm.pool import Rows
from moonpool.connectors.vllm.reach import NULL_BLOCK
from moonpool.core.store.keys import Ranges

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Pair:
    """``length`` bytes of block 0 in both engines, and the strides to other blocks.

    group: KV cache group of the block ids.
    """

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


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker holds of a block.

    columns, rows: its objects, and where their bytes are (see Pool.submit_load).
    layers: of each column, the number and the bytes of each layer in it, in order; (): not known.
    """

    columns: Sequence[Ranges]
    rows: Rows
    layers: Sequence[Sequence[tuple[int, int]]] = ()


class Table:
    """Pairs of one group that are all dense, or all not, by column: each is an array of shape (pairs, 1)."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.group, self.is_dense = pairs[0].group, pairs[0].is_dense
        self.here = _column(pair.here for pair in pairs)
        self.here_stride = _column(pair.here_stride for pair in pairs)
        self.there = _column(pair.there for pair in pairs)
        self.there_stride = _column(pair.there_stride for pair in pairs)
        self.length = _column(pair.length for pair in pairs)


def pair_columns(share: Share, here: Held, there: Held, *, cuts_layers: bool = False) -> tuple[Pair, ...]:
    """The pairs of what is read from one prefill worker. Raises Refused when it does not hold that.

    share: what this worker reads from that one.
    here, there: what these two workers hold.
    cuts_layers: whether one of them holds the layers of one pipeline stage, and the other all layers.
    """
    chosen = share.columns_of(here.columns)
    if cuts_layers:
        return tuple(_merge([pair for place in chosen for pair in _pair_layers(here, place, there)]))
    theirs = dict(zip(there.columns, there.rows, strict=False))
    if not all(here.columns[place] in theirs for place in chosen):
        raise Refused(
            "the prefill engine's worker holds other heads or layers than this one takes from it; a hand-over"
            " needs equal pipeline-parallel sizes, and tensor-parallel sizes of which one divides the other"
        )
    wanted = [here.columns[place] for place in chosen]
    return pair_rows(wanted, [here.rows[place] for place in chosen], [theirs[one] for one in wanted])


def pair_rows(columns: Sequence[Ranges], here: Rows, there: Rows) -> tuple[Pair, ...]:
    """The pairs of the same columns in both engines. Raises Refused when their objects differ in size."""
    pairs: list[Pair] = []
    for ranges, ours, theirs in zip(columns, here, there, strict=True):
        if sum(row[2] for row in ours) != sum(row[2] for row in theirs):
            raise Refused("the two engines' blocks differ in size")
        for pair in _cut(ranges.group, ours, theirs):
            _append(pairs, pair)
    return tuple(_merge(pairs))


def tables_of(pairs: Sequence[Pair]) -> tuple[Table, ...]:
    """Made once for two engines, so that what follows is a few operations on arrays."""
    alike: dict[tuple[int, bool], list[Pair]] = {}
    for pair in pairs:
        alike.setdefault((pair.group, pair.is_dense), []).append(pair)
    return tuple(map(Table, alike.values()))


def bytes_of_groups(tables: Sequence[Table], groups: int) -> tuple[int, ...]:
    """The bytes that are read of a block, per KV cache group."""
    read = [0] * groups
    for table in tables:
        read[table.group] += int(table.length.sum())
    return tuple(read)


def needed_blocks(here: BlockIds, there: BlockIds) -> tuple[BlockIds, BlockIds]:
    """The blocks of each group without those that a sliding window here does not need. Raises Refused when
    the other engine does not have one that is needed."""
    ours, theirs = [], []
    for local, remote in zip(here, there, strict=True):
        wanted = [place for place, block_id in enumerate(local) if block_id != NULL_BLOCK]
        ours.append(tuple(local[place] for place in wanted))
        theirs.append(tuple(remote[place] for place in wanted))
        if NULL_BLOCK in theirs[-1]:
            raise Refused("the prefill engine has no longer all blocks of a sliding window")
    return tuple(ours), tuple(theirs)


def ranges_of(
    tables: Sequence[Table], here: Sequence[Sequence[int]], there: Sequence[Sequence[int]]
) -> tuple[Addresses, Addresses, Addresses]:
    """(addresses here, addresses there, lengths) of blocks, whose ids are given per group.

    One block after the other: with tokens before heads, the ranges of a block follow one another on one side,
    and the transfer engine moves them as one.
    """
    columns: list[tuple[Addresses, Addresses, Addresses]] = []
    for table in tables:
        ours, theirs = here[table.group], there[table.group]
        if not ours:
            continue
        counts: Sequence[int] = [1] * len(ours)
        if table.is_dense:
            ours, theirs, counts = _runs(ours, theirs)
        columns.append(
            (
                (table.here + _u64(ours) * table.here_stride).T.ravel(),
                (table.there + _u64(theirs) * table.there_stride).T.ravel(),
                (_u64(counts) * table.length).T.ravel(),
            )
        )
    if len(columns) == 1:
        return columns[0]
    local, remote, lengths = (np.concatenate(column) for column in zip(*columns, strict=True))
    return local, remote, lengths


def _pair_layers(here: Held, place: int, there: Held) -> list[Pair]:
    """The pairs of the layers that a column here and one there have in common: all that one of them has.
    Raises Refused."""
    mine, heads = here.columns[place], _heads(here.columns[place])
    found = [number for number, one in enumerate(there.columns) if _heads(one) == heads]
    if len(found) != 1 or len(there.layers) != len(there.columns):
        raise Refused("the prefill engine's worker does not tell the layers of the heads that this one takes")
    ours = _places_of_layers(here.layers[place])
    theirs = _places_of_layers(there.layers[found[0]])
    common = [layer for layer in ours if layer in theirs]
    if len(common) != min(len(ours), len(theirs)):
        raise Refused("the prefill engine's pipeline stages hold other layers than those of this one")
    pairs: list[Pair] = []
    for layer in common:
        rows = [_part_of(here.rows[place], *ours[layer])], [_part_of(there.rows[found[0]], *theirs[layer])]
        pairs += pair_rows([mine], *rows)
    return pairs


def _heads(column: Ranges) -> tuple[int, int, int]:
    return column.group, column.first_head, column.heads


def _places_of_layers(layers: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[int, int]]:
    """(number of a layer, how many of that number came before) -> (where its bytes begin in the object,
    bytes)."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    seen: Counter[int] = Counter()
    start = 0
    for number, length in layers:
        places[number, seen[number]] = (start, length)
        seen[number] += 1
        start += length
    return places


def _part_of(rows: Sequence[tuple[int, int, int]], start: int, length: int) -> list[tuple[int, int, int]]:
    """The rows of ``length`` bytes of an object from ``start`` on."""
    part = []
    for address, stride, nbytes in rows:
        first, last = max(start, 0), min(start + length, nbytes)
        if first < last:
            part.append((address + first, stride, last - first))
        start -= nbytes
    return part


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
    """Joins ranges that touch in memory: columns are cut head by head."""
    merged: list[Pair] = []
    for pair in sorted(pairs, key=lambda pair: (pair.group, pair.here)):
        _append(merged, pair)
    return merged


def _runs(ours: Sequence[int], theirs: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """(first block here, first block there, blocks) of each run that goes up by one on both sides."""
    starts = [
        place
        for place in range(len(ours))
        if not place or ours[place] != ours[place - 1] + 1 or theirs[place] != theirs[place - 1] + 1
    ]
    stops = [*starts[1:], len(ours)]
    return (
        [ours[start] for start in starts],
        [theirs[start] for start in starts],
        [stop - start for start, stop in zip(starts, stops, strict=True)],
    )


def _column(numbers: Iterable[int]) -> Addresses:
    return _u64(list(numbers)).reshape(-1, 1)


def _u64(numbers: Sequence[int]) -> Addresses:
    return np.array(numbers, np.uint64)
