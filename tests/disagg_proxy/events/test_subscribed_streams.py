"""Holders of streams that belong to no engine."""

from __future__ import annotations

from typing import cast

from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.events.subscribed_streams import SubscribedStreams
from moonpool.disagg_proxy.events.subscriber import Subscriber

SOURCE = EventSource("n", "tcp://h:1", pool=True)


class Followed:
    """A subscriber that follows nothing."""

    def follow(self, source: EventSource, place: int) -> None:
        pass

    def drop(self, name: str, place: int) -> None:
        pass


def test_a_part_leaves_room_for_the_others_and_takes_no_holder_twice() -> None:
    streams = SubscribedStreams(cast(Subscriber, Followed()), 10, 4)
    part = streams.part(2)
    taken = [part.follow("n", SOURCE) for _ in range(3)]
    assert taken == [10, 11, None]
    assert [streams.follow("n", SOURCE) for _ in range(3)] == [12, 13, None]
    assert streams.free == part.free == 0
    part.drop("n", 11)
    assert part.follow("n", SOURCE) == 11
    assert part.follow("n", SOURCE) is None
