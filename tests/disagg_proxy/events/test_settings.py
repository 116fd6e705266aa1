from __future__ import annotations

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.events.indexes import Indexes
from moonpool.disagg_proxy.events.settings import EventSource, parse_event_sources


def test_streams_with_and_without_a_replay() -> None:
    assert parse_event_sources(["a=tcp://h:5557,tcp://h:5558", "b=ipc:///run/b"]) == (
        EventSource("a", "tcp://h:5557", "tcp://h:5558"),
        EventSource("b", "ipc:///run/b"),
    )
    assert parse_event_sources(["n=tcp://h:1"], pool=True)[0].pool


@pytest.mark.parametrize(
    "texts", [["tcp://h:1"], ["a="], ["a=http://h:1"], ["a=tcp://h:1,h:2"], ["a=tcp://h:1", "a=tcp://h:2"]]
)
def test_what_is_no_stream(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="events"):
        parse_event_sources(texts)


def test_one_index_of_each_model_and_block_size_and_no_more_than_the_maximum() -> None:
    indexes = Indexes(blocks_max=100, indexes_max=2)
    first = indexes.obtain("m", 16)
    assert first is indexes.obtain("m", 16)
    second = indexes.obtain("m", 64)
    assert indexes.of("m") == (first, second)
    assert indexes.of("other") == ()
    assert indexes.obtain("other", 16) is None
    assert indexes.obtain("m", 0) is None
    assert indexes.refused == 2
