from __future__ import annotations

import threading

import pytest

from moonpool.connectors.lmcache.parallel_chunks import CHUNK_BYTES_MIN, ParallelChunks


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([], [(0, 0)]),
        ([1, 1, 1], [(0, 3)]),
        ([CHUNK_BYTES_MIN] * 2, [(0, 1), (1, 2)]),
        ([CHUNK_BYTES_MIN] * 7, [(0, 2), (2, 4), (4, 7)]),
        ([9 * CHUNK_BYTES_MIN], [(0, 1)]),
    ],
)
def test_each_item_is_in_one_piece(sizes: list[int], wanted: list[tuple[int, int]]) -> None:
    pieces = ParallelChunks(3)
    assert pieces.run(sizes, lambda first, end: (first, end)) == wanted
    pieces.close()


def test_pieces_run_beside_each_other() -> None:
    pieces, all_there = ParallelChunks(3), threading.Barrier(3)
    pieces.run([CHUNK_BYTES_MIN] * 3, lambda first, end: all_there.wait(10))
    pieces.close()


def test_an_error_waits_for_the_others() -> None:
    pieces, ended, failed = ParallelChunks(2), [], threading.Event()

    def piece(first: int, end: int) -> None:
        if first == 0:
            failed.set()
            raise OSError("no")
        assert failed.wait(10)
        ended.append(first)

    with pytest.raises(OSError, match="no"):
        pieces.run([CHUNK_BYTES_MIN] * 2, piece)
    assert ended == [1]
    pieces.close()
