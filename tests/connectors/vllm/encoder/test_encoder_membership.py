"""A half's place in the pool: joined when the weights are known, left when they are replaced."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonpool.connectors.vllm.encoder.membership import Membership
from moonpool.connectors.weights import Pending
from moonpool.core.errors import ConfigError
from tests.connectors.vllm.fakes import LOG

MARK = b"f" * 32


class FakeNode:
    """A NodeConnection with a node."""

    def __init__(self, fingerprint: bytes) -> None:
        self.client: Any = f"pool of {fingerprint!r}"
        self.closed = False

    def close(self) -> None:
        self.closed = True


class World:
    """What a membership asks for. ``trouble``: raised for the fingerprint."""

    def __init__(self, trouble: Exception | None = None, refusal: str = "") -> None:
        self.trouble, self.asked = trouble, 0
        self.nodes: list[FakeNode] = []
        self.membership = Membership(
            fingerprint=self._fingerprint, open_node=cast(Any, self._open), log=LOG, refusal=refusal
        )

    def _fingerprint(self) -> bytes:
        self.asked += 1
        if self.trouble is not None:
            raise self.trouble
        return MARK

    def _open(self, fingerprint: bytes) -> FakeNode:
        self.nodes.append(FakeNode(fingerprint))
        return self.nodes[-1]


def test_joins_with_the_first_question() -> None:
    world = World()
    assert world.membership.pool() == world.nodes[0].client
    assert world.membership.pool() == world.nodes[0].client
    assert (world.asked, len(world.nodes)) == (1, 1)
    assert world.membership.fingerprint == MARK


def test_weights_that_are_being_read_are_asked_for_when_that_is_over() -> None:
    over = threading.Event()
    reading = SimpleNamespace(over=over, progress=lambda: "a half")
    world = World(Pending("the weights", cast(Any, reading)))
    assert world.membership.pool() is None
    assert world.membership.pool() is None
    assert world.asked == 1
    over.set()
    world.trouble = None
    assert world.membership.pool() == world.nodes[0].client


def test_weights_without_a_name_are_refused_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World(ConfigError("no such weights", operation="fingerprint"))
    for _ in range(2):
        assert world.membership.pool() is None
    assert world.asked == 1
    assert "no such weights" in world.membership.refusal
    assert caplog.text.count("encoder outputs are not shared") == 1
    assert World(refusal="no images").membership.pool() is None


def test_leaves_and_joins_again() -> None:
    world = World()
    world.membership.pool()
    world.membership.leave()
    assert world.nodes[0].closed
    assert world.membership.pool() is None
    assert world.membership.fingerprint == b""
    world.membership.join(b"n" * 32)
    assert world.membership.pool() == world.nodes[1].client
    assert world.membership.fingerprint == b"n" * 32
    assert world.asked == 1


def test_a_half_that_left_before_it_joined_stays_away() -> None:
    """The weights were replaced before the first image came."""
    world = World()
    world.membership.leave()
    assert world.membership.pool() is None
    world.membership.join()
    assert world.membership.pool() == world.nodes[0].client


def test_a_half_comes_back_when_the_new_weights_are_read() -> None:
    world = World()
    world.membership.pool()
    over = threading.Event()
    reading = SimpleNamespace(over=over, progress=lambda: "a half")
    world.trouble = Pending("the weights", cast(Any, reading))
    world.membership.come_back()
    assert world.nodes[0].closed
    assert (world.membership.pool(), world.membership.fingerprint, world.membership.refusal) == (
        None,
        b"",
        "",
    )
    over.set()
    world.trouble = None
    assert world.membership.pool() == world.nodes[1].client
    world.trouble = ConfigError("no such weights", operation="fingerprint")
    world.membership.come_back()
    assert "no such weights" in world.membership.refusal


def test_weights_that_are_replaced_again_while_they_are_read_are_not_joined() -> None:
    over = threading.Event()
    world = World(Pending("the weights", cast(Any, SimpleNamespace(over=over, progress=lambda: "a half"))))
    world.membership.come_back()
    world.membership.leave()
    over.set()
    world.trouble = None
    assert world.membership.pool() is None
