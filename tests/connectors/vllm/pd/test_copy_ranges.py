"""Ranges to read, against numpy: whatever the two layouts, the model's view of the blocks is equal
afterwards."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm.pd.copy_ranges import needed_blocks, pair_rows, ranges_of, tables_of
from moonpool.core.store.keys import Ranges

ONE = (Ranges(0, 0, 1, 0, 2),)


def test_equal_layouts_read_runs_of_blocks_at_once() -> None:
    rows = [[(1000, 64, 32), (2000, 64, 32)], [(1032, 64, 32), (2032, 64, 32)]]
    there = [[(row[0] + 50000, *row[1:]) for row in column] for column in rows]
    columns = (Ranges(0, 0, 1, 0, 2), Ranges(0, 1, 1, 0, 2))
    pairs = pair_rows(columns, rows, there)
    assert len(pairs) == 2  # a layer each: its heads lie side by side
    here, remote, lengths = ranges_of(tables_of(pairs), [[3, 4, 5, 9]], [[7, 8, 9, 1]])
    assert here.tolist() == [1192, 2192, 1576, 2576]
    assert remote.tolist() == [51448, 52448, 51064, 52064]
    assert lengths.tolist() == [192, 192, 64, 64]


def test_ranges_of_a_block_follow_one_another() -> None:
    # Two tokens of two heads each; the other engine's worker has one of the heads.
    tokens = [(0, 32, 8), (16, 32, 8)]
    pairs = pair_rows(ONE, [tokens], [[(100, 16, 16)]])
    here, there, lengths = ranges_of(tables_of(pairs), [[1, 2]], [[1, 2]])
    assert here.tolist() == [32, 48, 64, 80]
    assert there.tolist() == [116, 124, 132, 140]
    assert lengths.tolist() == [8, 8, 8, 8]


def test_a_run_must_be_one_on_both_sides() -> None:
    pairs = pair_rows(ONE, [[(0, 8, 8)]], [[(100, 8, 8)]])
    _, _, lengths = ranges_of(tables_of(pairs), [[1, 2, 3, 4]], [[1, 2, 4, 5]])
    assert lengths.tolist() == [16, 16]
    pairs = pair_rows(ONE, [[(0, 8, 8)]], [[(100, 24, 8)]])  # gaps between blocks over there
    _, _, lengths = ranges_of(tables_of(pairs), [[1, 2, 3]], [[1, 2, 3]])
    assert lengths.tolist() == [8, 8, 8]


def test_groups_have_blocks_of_their_own() -> None:
    columns = (Ranges(0, 0, 1, 0, 1), Ranges(1, 0, 1, 1, 1))
    pairs = pair_rows(columns, [[(0, 8, 8)], [(1000, 8, 8)]], [[(0, 8, 8)], [(1000, 8, 8)]])
    here, there, _ = ranges_of(tables_of(pairs), [[1], [2]], [[3], [4]])
    assert here.tolist() == [8, 1016]
    assert there.tolist() == [24, 1032]


def test_objects_of_other_sizes_are_refused() -> None:
    with pytest.raises(Refused, match="differ in size"):
        pair_rows(ONE, [[(0, 8, 8)]], [[(0, 8, 4)]])


@pytest.mark.parametrize("_round", range(50))
def test_random_layouts(_round: int, rng: random.Random) -> None:
    """Objects cut at random places, scattered over two memories."""
    total, blocks = rng.randrange(1, 60), 12
    memories = [np.random.default_rng(rng.randrange(1 << 30)).integers(0, 255, 20000, np.uint8) for _ in "ab"]
    sides = []
    for memory in memories:
        rows, left, at = [], total, rng.randrange(100)
        while left:
            length = rng.randrange(1, left + 1)
            stride = length + rng.choice([0, 0, rng.randrange(9)])
            rows.append((at, stride, length))
            left -= length
            at += stride * blocks + rng.randrange(3)
        assert at < len(memory)
        sides.append(rows)
    count = rng.randrange(1, blocks + 1)
    here, there = rng.sample(range(blocks), count), rng.sample(range(blocks), count)
    if rng.random() < 0.5:
        here, there = list(range(count)), list(range(blocks - count, blocks))

    pairs = pair_rows(ONE, [sides[0]], [sides[1]])
    for local, remote, length in zip(
        *map(np.ndarray.tolist, ranges_of(tables_of(pairs), [here], [there])), strict=True
    ):
        memories[0][local : local + length] = memories[1][remote : remote + length]

    def content(side: int, block: int) -> bytes:
        return b"".join(
            memories[side][a + block * s : a + block * s + n].tobytes() for a, s, n in sides[side]
        )

    for mine, theirs in zip(here, there, strict=True):
        assert content(0, mine) == content(1, theirs)


def test_blocks_that_a_window_does_not_need_are_not_read() -> None:
    here, there = ((1, 2, 3), (0, 0, 6)), ((11, 12, 13), (0, 15, 16))
    assert needed_blocks(here, there) == (((1, 2, 3), (6,)), ((11, 12, 13), (16,)))
    with pytest.raises(Refused, match="no longer all blocks of a sliding window"):
        needed_blocks(((1,), (5,)), ((11,), (0,)))
    columns = (Ranges(0, 0, 1, 0, 1), Ranges(1, 0, 1, 1, 1))
    pairs = pair_rows(columns, [[(0, 8, 8)], [(1000, 8, 8)]], [[(0, 8, 8)], [(1000, 8, 8)]])
    here_at, _, lengths = ranges_of(tables_of(pairs), [[1, 2], []], [[3, 4], []])
    assert (here_at.tolist(), lengths.tolist()) == ([8], [16])
