"""The provider of libfabric that engines name for "efa". Bytes go by it, both engines need the same, and for
a name that is none the engine says which there are. Skipped, with the reason, on a host without libfabric."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from moonpool import TransferEngine
from moonpool.core.errors import InvalidArgument, Unavailable

from .store_bed import MIB, TOKEN

SEED = 2506


@pytest.fixture
def engine() -> Iterator[Callable[..., TransferEngine]]:
    with ExitStack() as stack:

        def make(name: str, provider: str, *transports: str, devices: tuple[str, ...] = ()) -> TransferEngine:
            options = {"token": TOKEN, "metadata": "", "transports": transports or ("efa",)}
            options |= {"efa_provider": provider, "efa_devices": devices}
            made = stack.enter_context(TransferEngine(name, **options))
            why = made.transports()["efa"]
            if why.startswith("there is no libfabric"):
                pytest.skip(why)
            return made

        yield make


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_bytes_go_by_the_provider_that_is_named(provider: str, engine: Callable[..., TransferEngine]) -> None:
    here = engine("here", provider)
    if provider != "tcp" and here.transports()["efa"]:
        pytest.skip(here.transports()["efa"])  # a libfabric without it
    there = engine("there", provider)
    assert here.transports()["efa"] == there.transports()["efa"] == ""
    mine, theirs = here.allocate(MIB), there.allocate(MIB)
    data = random.Random(SEED).randbytes(MIB)
    mine.view[:] = data
    peer = here.open(there.addresses[0])
    here.write(peer, mine, theirs.address, MIB)
    assert bytes(theirs.view) == data
    mine.view[:] = bytes(MIB)
    here.read(peer, mine, theirs.address, MIB)
    assert bytes(mine.view) == data
    moved = {way: here.metrics()[f"efa_{way}_bytes_total"] for way in ("write", "read")}
    assert moved == {"write": MIB, "read": MIB}
    (row,) = [row for row in here.paths(peer) if row.transport == "efa"]
    assert row.path.startswith(f"efa {provider}"), row.path
    (rail,) = row.rails
    assert (rail.state, rail.bytes, rail.faults) == ("up", 2 * MIB, 0)
    counted = here.metrics()
    assert counted[f'efa_rail_bytes_total{{port="{rail.port}"}}'] == 2 * MIB


def test_the_device_that_is_named_is_used_and_another_is_refused(
    engine: Callable[..., TransferEngine],
) -> None:
    here, there = engine("here", "tcp"), engine("there", "tcp")
    (row,) = [row for row in here.paths(here.open(there.addresses[0])) if row.transport == "efa"]
    port = row.rails[0].port
    named = engine("named", "tcp", devices=(port,))
    (row,) = [row for row in named.paths(named.open(there.addresses[0])) if row.transport == "efa"]
    assert [rail.port for rail in row.rails] == [port]
    with pytest.raises(InvalidArgument, match=f'on this host is called "rdmap0s6"; it has {port}'):
        engine("refused", "tcp", devices=("rdmap0s6",))
    with pytest.raises(InvalidArgument, match="was given the EFA device rdmap0s6, and cannot use it: it is"):
        engine("without", "tcp", "tcp", devices=("rdmap0s6",))


def test_a_provider_that_is_none_is_refused_with_those_that_there_are(
    engine: Callable[..., TransferEngine],
) -> None:
    here = engine("here", "no-such", "efa", "tcp")
    why = here.transports()["efa"]
    assert why.startswith('libfabric\'s provider "no-such" has no reliable datagrams here ('), why
    assert '"tcp"' in why.partition("efa_provider may name one of: ")[2], why
    # The engine works all the same, by what is left.
    there = engine("there", "tcp", "efa", "tcp")
    mine, theirs = here.allocate(4096), there.allocate(4096)
    theirs.view[:] = b"x" * 4096
    here.read(here.open(there.addresses[0]), mine, theirs.address, 4096)
    assert bytes(mine.view) == b"x" * 4096
    assert here.metrics()["tcp_read_bytes_total"] == 4096


def test_engines_with_different_providers_say_so(engine: Callable[..., TransferEngine]) -> None:
    here, there = engine("here", "tcp"), engine("there", "sockets")
    if why := there.transports()["efa"]:
        pytest.skip(why)
    with pytest.raises(Unavailable, match=r'provider of libfabric is "sockets", and the one here "tcp"'):
        here.open(there.addresses[0])
