"""The pool of the three plug points, without LMCache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool.connectors import seeker
from moonpool.connectors.lmcache.pool import Pool
from moonpool.core.errors import Error, InvalidArgument, Timeout, Unavailable
from tests.core.store_bed import until

LOG = logging.getLogger("test of the pool")
HUNG = Timeout("it did not answer in time")


class Client:
    def __init__(self, world: World) -> None:
        self.world = world
        self.closed = False

    def exists(self, names: list[str]) -> bytes:
        self.world.asked += 1
        if self.world.trouble is not None:
            raise self.world.trouble
        return b"\0"

    def close(self) -> None:
        self.closed = True


class World:
    """What is there to connect to. ``joining``: what ``joined`` raises."""

    def __init__(self) -> None:
        self.trouble: Exception | None = None
        self.joining: Exception | None = None
        self.clients: list[Client] = []
        self.asked = self.joined = self.left = 0
        self.pool: Pool | None = None

    def connect(self) -> Any:
        if self.trouble is not None:
            raise self.trouble
        self.clients.append(Client(self))
        return self.clients[-1]

    def join(self, client: Any) -> None:
        if self.joining is not None:
            raise self.joining
        self.joined += 1

    def leave(self) -> None:
        self.left += 1

    def start(self, **options: Any) -> Pool:
        self.pool = Pool(self.connect, self.join, address="here", log=LOG, left=self.leave, **options)
        return self.pool


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(seeker, "REST_S", 0.005)
    monkeypatch.setattr(seeker, "REST_MAX_S", 0.005)
    world = World()
    yield world
    if world.pool is not None:
        world.pool.close()
        assert all(client.closed for client in world.clients)


def test_who_does_not_answer_is_left_alone_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(seeker, "REST_S", 600.0)
    pool = world.start()
    assert pool.client is world.clients[0]
    for _ in range(3):
        pool.heard(HUNG)
    assert pool.client is None
    assert (world.joined, world.left, world.asked) == (1, 1, 0)
    assert caplog.text.count("does not answer") == 1


def test_it_is_used_again_when_it_answers(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pool = world.start()
    world.trouble = HUNG
    pool.heard(HUNG)
    until(lambda: world.asked > 3)
    assert pool.client is None
    world.trouble = None
    assert until(lambda: pool.client) is world.clients[0]
    assert (world.joined, world.left) == (2, 1)
    assert caplog.text.count("answers again") == 1


def test_an_error_about_the_call_is_not_silence(world: World) -> None:
    pool = world.start()
    pool.heard(InvalidArgument("a key of no bytes"))
    assert pool.client is world.clients[0]


def test_no_node_at_start_and_later(world: World) -> None:
    world.trouble = Unavailable("nobody there")
    pool = world.start()
    assert pool.client is None
    world.trouble = None
    assert until(lambda: pool.client) is world.clients[0]
    assert world.joined == 1


def test_a_pool_that_is_required(world: World) -> None:
    world.trouble = Unavailable("nobody there")
    with pytest.raises(Error, match="nobody there"):
        world.start(required=True)


@pytest.mark.parametrize("trouble", [HUNG, KeyError("arena_bytes")], ids=["error", "unexpected"])
def test_a_join_that_fails_keeps_no_connection(
    trouble: Exception, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.trouble = Unavailable("nobody there")
    pool = world.start()
    world.joining, world.trouble = trouble, None
    until(lambda: len(world.clients) > 3)
    world.joining = None
    client = until(lambda: pool.client)
    assert [each for each in world.clients if not each.closed] == [client]
    assert caplog.text.count("still no pool") == 1
