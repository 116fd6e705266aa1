"""The records of the data plane, byte by byte."""

from __future__ import annotations

import numpy as np

from moonpool.disagg_proxy.data_plane.observations import (
    COLUMNS,
    RECORD,
    Observation,
    Outcome,
    Stage,
    read,
    read_kept,
    read_last,
)


def test_a_record_is_read_as_the_data_plane_writes_it() -> None:
    assert RECORD.size == 128
    given = Observation(
        7, -3, 1, 2, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 100, 64, 16, 32, 503,
        Outcome.BROKEN_OFF, 2, 1, 1, Stage.BEGUN, 1, b"t" * 16, b"p" * 8, b"s" * 8,
    )  # fmt: skip
    assert list(read(RECORD.pack(*given) * 2)) == [given, given]
    assert list(read(b"")) == []


def test_columns_are_those_of_the_record() -> None:
    assert COLUMNS.itemsize == RECORD.size
    assert COLUMNS.names == Observation._fields
    given = Observation(
        7, -3, 1, 2, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 100, 64, 16, 32, 503,
        Outcome.BROKEN_OFF, 2, 1, 1, Stage.BEGUN, 1, b"t" * 16, b"p" * 8, b"s" * 8,
    )  # fmt: skip
    assert np.frombuffer(RECORD.pack(*given), COLUMNS)[0].item() == given
    records = b"".join(RECORD.pack(*given._replace(request=number)) for number in range(5))
    assert [each.request for each in read_last(records, 2)] == [3, 4]
    assert [each.request for each in read_last(records, 9)] == [0, 1, 2, 3, 4]


def test_records_without_a_note_and_a_handover_are_passed_over() -> None:
    def record(request: int, tracked: int, handed_over: int) -> bytes:
        return RECORD.pack(
            *(request, tracked, -1, 0),
            *(1.0,) * 6,
            *(-1,) * 4,
            *(200, 0, 1, handed_over, 1, 0, 1),
            b"t",
            b"p",
            b"s",
        )

    records = record(1, 0, 0) + record(2, -1, 0) + record(3, 0, 2) + record(4, 0, 0) + record(5, 7, 1)
    assert [each.request for each in read_kept(records)] == [2, 3, 5]
    assert list(read_kept(records)) == [each for each in read(records) if each.tracked or each.handed_over]
