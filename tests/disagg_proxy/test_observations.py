"""The records of the data plane, byte by byte."""

from __future__ import annotations

from moonpool.disagg_proxy.observations import RECORD, Observation, Outcome, Stage, read


def test_a_record_is_read_as_the_data_plane_writes_it() -> None:
    assert RECORD.size == 128
    given = Observation(
        7, -3, 1, 2, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 100, 64, 16, 32, 503,
        Outcome.BROKEN_OFF, 2, 1, 1, Stage.BEGUN, b"t" * 16, b"p" * 8, b"s" * 8,
    )  # fmt: skip
    assert list(read(RECORD.pack(*given) * 2)) == [given, given]
    assert list(read(b"")) == []
