"""KV cache groups whose blocks hold unlike numbers of tokens.

The connector counts in blocks of as many tokens as vLLM's scheduler block has, the least common multiple of
all groups': vLLM lets hits end at its multiples only. Such a block consists of *parts*, each of them one of a
group's own blocks:

    tokens               0       32      64
    blocks               |   0   |   1   |
    group 0, 32 tokens   |   0   |   1   |       part 0: its blocks 0, 1
    group 1, 16 tokens   | 0 | 1 | 2 | 3 |       part 1: its blocks 0, 2    part 2: its blocks 1, 3

Where all groups are alike each has one part, and its blocks are the connector's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from moonpool.connectors.vllm.reach import NULL_BLOCK
from moonpool.core.store.keys import Ranges

BlockIds = tuple[tuple[int, ...], ...]


def by_part(
    block_ids: Sequence[Sequence[int]], splits: Sequence[int], first: int, last: int, *, pad: bool = False
) -> BlockIds:
    """The ids of the blocks [first, last), one list per part.

    block_ids: of a request, one list per group, from its first token on.
    splits: of each group the parts of a block; (): one of each.
    pad: NULL_BLOCK stands where a group of several parts has no block, as behind the last token of a request.
    """
    if not splits:
        return tuple(tuple(ids[first:last]) for ids in block_ids)
    parts = []
    for ids, split in zip(block_ids, splits, strict=True):
        for part in range(split):
            found = tuple(ids[first * split + part : last * split : split])
            missing = last - first - len(found) if pad and split > 1 else 0
            parts.append(found + (NULL_BLOCK,) * missing)
    return tuple(parts)


def objects_of(columns: Sequence[Ranges], splits: Sequence[int]) -> list[tuple[int, int, int]]:
    """The objects of a block in their order: (place in ``columns``, which of its group's parts, of how
    many)."""
    counts = [splits[ranges.group] if splits else 1 for ranges in columns]
    return [(place, part, count) for place, count in enumerate(counts) for part in range(count)]


def part_numbers(columns: Sequence[Ranges], splits: Sequence[int]) -> list[int]:
    """Of each object of a block the part that it is of, counted over all groups as in ``by_part``."""
    starts = [0, *itertools.accumulate(splits)] if splits else []
    return [
        (starts[columns[place].group] if splits else columns[place].group) + part
        for place, part, _ in objects_of(columns, splits)
    ]


def part_columns(columns: Sequence[Ranges], splits: Sequence[int]) -> list[Ranges]:
    """The objects of a block with the number of their part in the place of their group's."""
    objects = zip(objects_of(columns, splits), part_numbers(columns, splits), strict=True)
    return [replace(columns[place], group=number) for (place, _, _), number in objects]
