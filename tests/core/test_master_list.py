"""Where the masters are, as one of them tells it on the wire: to those that ask, when it changes, and in the
refusal of a standby."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from moonpool import _native
from moonpool.core.config.native_settings import master_settings
from moonpool.core.service.cluster import read_masters

from . import master_wire as m
from . import wire_client as w
from .master_wire import connect
from .store_bed import TOKEN, until

HEAD = 11  # bytes of a list before its addresses


def masters_in(body: bytes) -> tuple[int, int, list[str]]:
    """flags, own, addresses"""
    _, flags, own, n = struct.unpack_from("<QBBB", body)
    at, addresses = HEAD, []
    for _ in range(n):
        (length,) = struct.unpack_from("<H", body, at)
        addresses.append(body[at + 2 : at + 2 + length].decode())
        at += 2 + length
    assert at == len(body)
    return flags, own, addresses


@pytest.fixture
def pair() -> Iterator[tuple[_native.MasterServer, _native.MasterServer]]:
    owner = _native.MasterServer(["127.0.0.1:0"], TOKEN, master_settings())
    owner.start()
    standby = _native.MasterServer(["127.0.0.1:0"], TOKEN, master_settings(), standby_of=owner.addresses[0])
    yield owner, standby
    standby.stop()
    owner.stop()


@pytest.mark.parametrize("purpose", [b"member", b"directory"])
def test_a_caller_that_asks_hears_of_the_standby_when_it_comes(
    pair: tuple[_native.MasterServer, _native.MasterServer], purpose: bytes
) -> None:
    owner, standby = pair
    wire = connect(owner.addresses[0], TOKEN, purpose)
    wire.send(m.MASTERS, b"", flags=w.ONE_WAY)
    first = wire.receive()
    assert (first.kind, masters_in(first.body)) == (m.MASTERS, (1, 1, [owner.addresses[0]]))
    standby.start()
    told = wire.receive()
    while len(masters_in(told.body)[2]) == 1:  # once a second it says the same
        told = wire.receive()
    assert (told.kind, masters_in(told.body)) == (
        m.MASTERS,
        (1, 1, [owner.addresses[0], standby.addresses[0]]),
    )


def test_a_caller_of_the_release_before_is_not_told(
    pair: tuple[_native.MasterServer, _native.MasterServer],
) -> None:
    owner, standby = pair
    silent = connect(owner.addresses[0], TOKEN, b"directory")
    asking = connect(owner.addresses[0], TOKEN, b"directory")
    asking.send(m.MASTERS, b"", flags=w.ONE_WAY)
    standby.start()
    while len(masters_in(asking.receive().body)[2]) == 1:
        pass
    silent.send(m.MEMBERS, struct.pack("<Q", 0), request_id=1)
    assert silent.receive().kind == m.MEMBERS


def test_a_standby_whose_address_is_unknown_is_not_named(
    pair: tuple[_native.MasterServer, _native.MasterServer],
) -> None:
    """One of the release before says its name alone."""
    owner, _ = pair
    wire = connect(owner.addresses[0], TOKEN, b"standby")
    wire.send(m.MIRROR, w.text16(b"a standby"), flags=w.ONE_WAY)
    assert wire.receive().kind == m.MIRROR
    until(lambda: owner.standby()[0] == "a standby")
    asking = connect(owner.addresses[0], TOKEN, b"member")
    asking.send(m.MASTERS, b"", flags=w.ONE_WAY)
    assert masters_in(asking.receive().body)[2] == [owner.addresses[0]]


def test_status_shows_a_master_that_is_not_in_the_list_as_learned(
    pair: tuple[_native.MasterServer, _native.MasterServer],
) -> None:
    owner, standby = pair
    (alone,) = read_masters(owner.addresses[0], TOKEN)
    assert not alone.learned
    standby.start()
    until(lambda: len(read_masters(owner.addresses[0], TOKEN)) == 2)
    listed, learned = read_masters(owner.addresses[0], TOKEN)
    assert (listed.address, listed.role, listed.learned) == (owner.addresses[0], "owner", False)
    assert (learned.address, learned.role, learned.learned) == (standby.addresses[0], "standby", True)
    assert [
        row.learned for row in read_masters(",".join([owner.addresses[0], standby.addresses[0]]), TOKEN)
    ] == [
        False,
        False,
    ]
    # Its state is that of its last tick.
    until(lambda: len(read_masters(standby.addresses[0], TOKEN)) == 2)
    by_the_standby = read_masters(standby.addresses[0], TOKEN)
    assert [(row.role, row.learned) for row in by_the_standby] == [("standby", False), ("owner", True)]


def test_a_master_by_two_names_is_one(pair: tuple[_native.MasterServer, _native.MasterServer]) -> None:
    owner, _ = pair
    port = owner.addresses[0].rpartition(":")[2]
    assert len(read_masters(f"localhost:{port}", TOKEN)) == 1
