"""The connection to the node: there at start, later, silent for a while, or required."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool.connectors import node_connection
from moonpool.connectors.node_connection import NodeConnection, State
from moonpool.core.errors import AuthError, Error, InvalidArgument, Timeout, Unavailable
from tests.core.store_bed import until

LOG = logging.getLogger("test of the connection")
HUNG = Timeout("it did not answer in time")
NO_NODE = Unavailable("no node there")


class Client:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class World:
    """What there is to connect to. trouble: what ``dial`` and ``probe`` raise; joining: what ``on_joined``
    raises; gate: what ``dial`` waits for."""

    def __init__(self) -> None:
        self.trouble: Exception | None = None
        self.joining: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.clients: list[Client] = []
        self.dialled = self.probed = self.joined = self.left = 0
        self.node: NodeConnection[Client] | None = None

    def dial(self) -> Client:
        self.dialled += 1
        self.gate.wait()
        if self.trouble is not None:
            raise self.trouble
        self.clients.append(Client())
        return self.clients[-1]

    def probe(self, client: Client) -> None:
        self.probed += 1
        if self.trouble is not None:
            raise self.trouble

    def join(self, client: Client) -> None:
        if self.joining is not None:
            raise self.joining
        self.joined += 1

    def leave(self) -> None:
        self.left += 1

    def made(self, **options: Any) -> NodeConnection[Client]:
        self.node = NodeConnection(
            self.dial,
            address="/run/x.sock",
            log=LOG,
            probe=self.probe,
            on_joined=self.join,
            on_left=self.leave,
            log_retry=LOG.warning,
            **options,
        )
        return self.node

    def opened(
        self, *, required: bool = False, quiet: bool = False, **options: Any
    ) -> NodeConnection[Client]:
        node = self.made(**options)
        node.open(required=required, quiet=quiet)
        return node


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[World]:
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 0.005)
    monkeypatch.setattr(node_connection, "RETRY_MAX_S", 0.005)
    caplog.set_level(logging.INFO)
    world = World()
    yield world
    world.gate.set()
    if world.node is not None:
        world.node.close()
        assert world.node.client is None
        assert all(client.closed for client in world.clients)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOG.name]


def test_a_node_at_start(world: World, caplog: pytest.LogCaptureFixture) -> None:
    node = world.opened(required=True)
    assert node.client is world.clients[0]
    assert (node.state, world.joined, said(caplog)) == (State.JOINED, 1, [])


def test_a_node_that_appears_later(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.trouble = NO_NODE
    node = world.opened()
    assert node.client is None
    until(lambda: world.dialled > 3)
    world.trouble = None
    assert until(lambda: node.client) is world.clients[0]
    assert world.joined == 1
    until(lambda: len(said(caplog)) == 2)
    warning, joined = said(caplog)
    assert warning == (
        "moonpool: no pool at /run/x.sock (no node there); this engine serves without it and joins when a "
        "node appears there"
    )
    assert joined == "moonpool: joined the pool at /run/x.sock"


def test_a_quiet_start(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.trouble = NO_NODE
    world.opened(quiet=True, retry_s=3600)
    assert said(caplog) == []


@pytest.mark.parametrize("error", [NO_NODE, AuthError("wrong token")])
def test_a_required_node(world: World, error: Error) -> None:
    world.trouble = error
    with pytest.raises(type(error)):
        world.opened(required=True)


def test_only_the_named_failures_mean_no_node(world: World) -> None:
    world.trouble = OSError("the token cannot be read")
    with pytest.raises(OSError, match="the token"):
        world.opened()
    assert world.opened(failures=(Error, OSError)).client is None


def test_a_node_that_does_not_answer_is_left_alone_at_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    node = world.opened(retry_s=600)
    for _ in range(3):
        node.heard(HUNG)
    assert (node.client, node.state) == (None, State.SILENT)
    assert (world.joined, world.left, world.probed) == (1, 1, 0)
    assert "\n".join(said(caplog)).count("does not answer") == 1


def test_one_thread_asks_until_it_answers(world: World, caplog: pytest.LogCaptureFixture) -> None:
    node = world.opened()
    before = set(threading.enumerate())  # of which some, of other tests, may end at any time
    world.trouble = HUNG
    for _ in range(20):
        node.failed(HUNG)
    assert len(set(threading.enumerate()) - before) == 1
    until(lambda: world.probed > 3)
    assert node.client is None
    world.trouble = None
    assert until(lambda: node.client) is world.clients[0]
    assert (world.dialled, world.joined, world.left) == (1, 2, 1)
    until(lambda: said(caplog)[-1] == "moonpool: the pool at /run/x.sock answers again")
    world.trouble = HUNG
    node.failed(HUNG)
    assert (node.client, world.left) == (None, 2)


def test_an_error_about_the_call_is_not_silence(world: World) -> None:
    node = world.opened()
    node.heard(InvalidArgument("a key of no bytes"))
    assert node.client is world.clients[0]


@pytest.mark.parametrize("trouble", [HUNG, KeyError("arena_bytes")], ids=["error", "unexpected"])
def test_a_join_that_fails_keeps_no_connection(
    trouble: Exception, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.trouble = NO_NODE
    node = world.opened()
    world.joining, world.trouble = trouble, None
    until(lambda: len(world.clients) > 3)
    world.joining = None
    client = until(lambda: node.client)
    assert [each for each in world.clients if not each.closed] == [client]
    assert "\n".join(said(caplog)).count("still no pool") == 1


def test_it_is_asked_ever_more_seldom(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 1.0)
    monkeypatch.setattr(node_connection, "RETRY_MAX_S", 30.0)
    for retry_s, waits in (None, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]), (0.5, [0.5] * 8):
        seen: list[float] = []

        class Closed(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                assert timeout is not None
                seen.append(timeout)  # noqa: B023  read before the next round
                return len(seen) == 8  # noqa: B023

        world.trouble = NO_NODE
        node = world.made(retry_s=retry_s)
        node._closing = Closed()
        node.open(required=False)
        node.close()
        assert seen == waits


def test_reach_dials_once_for_all_and_takes_a_silent_client(world: World) -> None:
    world.gate.clear()
    node, reached = world.made(retry_s=600), []
    threads = [threading.Thread(target=lambda: reached.append(node.reach())) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: node.state is State.CONNECTING)
    assert node.client is None
    world.gate.set()
    for thread in threads:
        thread.join()
    assert reached == world.clients * 3
    assert (world.dialled, world.joined) == (1, 1)
    world.trouble = HUNG
    node.failed(HUNG)
    assert node.reach() is world.clients[0]
    node.close()
    with pytest.raises(Unavailable, match="has ended"):
        node.reach()


def test_a_caller_that_overtakes_the_thread_makes_no_second_one(world: World) -> None:
    world.trouble = NO_NODE
    node = world.opened(retry_s=600)
    waiting = node._thread
    world.trouble = None
    assert node.reach() is node.client is world.clients[0]
    node.failed(HUNG)
    assert (node.client, node._thread) == (None, waiting)


def test_closing_ends_the_thread_and_waits_for_an_attempt(world: World) -> None:
    world.trouble = NO_NODE
    node = world.opened()
    world.gate.clear()
    until(lambda: node.state is State.CONNECTING)
    thread = node._thread
    assert thread is not None
    closing = threading.Thread(target=node.close)
    closing.start()
    world.trouble = None
    world.gate.set()
    closing.join()
    assert not thread.is_alive()
    assert (node.state, node.client) == (State.CLOSED, None)
    node.failed(HUNG)
    assert node.state is State.CLOSED
