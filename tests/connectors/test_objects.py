"""How KV is cut into objects: by heads, the same under every tensor-parallel size."""

from __future__ import annotations

import pytest

from moonpool.connectors.objects import (
    Refused,
    append_row,
    first_head,
    heads_of_objects,
    heads_per_object,
    holds_first_copy,
)


@pytest.mark.parametrize("kv_heads", range(1, 129))
def test_no_tensor_parallel_size_up_to_8_changes_an_object(kv_heads: int) -> None:
    heads = heads_per_object(kv_heads)
    assert 1 <= heads <= max(1, kv_heads // 8)
    for size in range(1, 9):
        if kv_heads % size == 0:
            assert (kv_heads // size) % heads == 0
    if kv_heads in (8, 16, 32, 64, 128):
        assert heads == kv_heads // 8


def test_replicated_heads_are_saved_once() -> None:
    assert [first_head(2, 1, rank, 8) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    saves = [holds_first_copy(2, 1, rank, 8) for rank in range(8)]
    assert saves == [True, False, False, False, True, False, False, False]
    assert [holds_first_copy(1, 1, rank, 4) for rank in range(4)] == [True, False, False, False]
    assert all(holds_first_copy(8, 2, rank, 4) for rank in range(4))
    with pytest.raises(Refused, match="do not make"):
        first_head(8, 3, 0, 2)


def test_larger_sizes_cut_smaller_objects() -> None:
    assert heads_of_objects(8, 32) == heads_per_object(32) == 4
    assert heads_of_objects(2, 32) == 2
    assert heads_of_objects(1, 16) == 1
    for kv_heads in range(1, 129):
        for size in range(1, kv_heads + 1):
            if kv_heads % size == 0:
                heads = heads_of_objects(kv_heads // size, kv_heads)
                assert (kv_heads // size) % heads == 0
                assert size > 8 or heads == heads_per_object(kv_heads)


def test_neighbours_are_one_row() -> None:
    rows: list[tuple[int, int, int]] = []
    for row in ((0, 100, 10), (10, 100, 5), (15, 90, 5), (30, 90, 5)):
        append_row(rows, row)
    assert rows == [(0, 100, 15), (15, 90, 5), (30, 90, 5)]
