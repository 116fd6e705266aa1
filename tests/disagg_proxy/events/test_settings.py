from __future__ import annotations

import asyncio

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.events.prefix_indexes import HOLDERS_MAX, PrefixIndexes
from moonpool.disagg_proxy.events.settings import EventSource, parse_event_sources
from moonpool.disagg_proxy.server import Proxy
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings


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


def test_a_fleet_that_is_larger_than_an_index_is_refused_by_policies_that_need_one() -> None:
    engines = tuple(EngineSpec(f"e{n}", f"http://10.0.{n >> 8}.{n & 255}:1") for n in range(HOLDERS_MAX))
    node = EventSource("node", "tcp://10.1.0.0:1", pool=True)

    async def make(policy: str, *nodes: EventSource) -> None:
        await Proxy(ProxySettings(port=0, engines=engines, policy=policy, events=nodes)).close()

    asyncio.run(make("conductor"))
    asyncio.run(make("round_robin", node))
    with pytest.raises(ConfigError, match=r"2,048 engines and 1 nodes .* at 2,048 at most"):
        asyncio.run(make("conductor", node))


def test_one_index_of_each_block_size_and_no_more_than_the_maximum() -> None:
    indexes = PrefixIndexes(blocks_max=100, indexes_max=2)
    first = indexes.obtain(16)
    assert first is indexes.obtain(16) is indexes.find(16)
    second = indexes.obtain(64)
    assert indexes.all == (first, second)
    assert indexes.find(32) is None
    assert indexes.obtain(32) is None
    assert indexes.obtain(0) is None
    assert indexes.refused == 2
