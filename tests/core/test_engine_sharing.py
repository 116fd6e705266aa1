"""Callers that share the TCP connections to a peer in another process: the foreground beside long background
transfers, and deadlines of neighbours."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from moonpool import Priority, Slice, Transfer, TransferEngine, TransferError, TransferState

from .engine_bed import Peer, Relay
from .store_bed import MIB, TOKEN, until

LONG_MIB = 64
MARGIN_S = 30  # real processes on a busy machine; what is promised is far less


@pytest.fixture
def peer() -> Iterator[Peer]:
    with closing(Peer("host_arena", LONG_MIB * MIB)) as made:
        yield made


@pytest.mark.parametrize("submitted", [False, True])
def test_the_foreground_comes_through_beside_long_background_transfers(peer: Peer, submitted: bool) -> None:
    """On a slow line, with both connections in use for far longer than the foreground's deadline."""
    with (
        Relay(peer.address) as relay,
        TransferEngine(token=TOKEN, transports=["tcp"]) as engine,
    ):
        segment, region = engine.open(relay.address), engine.allocate((LONG_MIB + 1) * MIB)
        engine.read(segment, region, segment.at(0), 1)
        relay.pace(4 * MIB)
        long = [Slice("read", segment, region, segment.at(0), LONG_MIB * MIB)]
        ended: list[int] = []

        def block() -> None:
            ended.append(engine.transfer(long, priority=Priority.BACKGROUND))

        threads = [threading.Thread(target=block) for _ in range(2)]
        if submitted:
            transfers = [engine.submit(long, priority=Priority.BACKGROUND) for _ in range(2)]
        else:
            for thread in threads:
                thread.start()
        until(lambda: relay.carried > MIB)
        small = region.at(LONG_MIB * MIB)
        peer.poke(b"front")
        for _ in range(3):
            assert engine.read(segment, small, segment.at(0), 4096, deadline_s=5) == 4096
            soon = engine.submit([Slice("read", segment, small, segment.at(0), 4096)], deadline_s=5)
            assert soon.result(MARGIN_S) == 4096
            engine.notify(segment, b"between")
        assert bytes(region.view[LONG_MIB * MIB : LONG_MIB * MIB + 5]) == b"front"
        relay.pace(0)
        if submitted:
            assert not any(transfer.done for transfer in transfers)
            assert [transfer.result(MARGIN_S) for transfer in transfers] == [LONG_MIB * MIB] * 2
        else:
            assert ended == []
            for thread in threads:
                thread.join(MARGIN_S)
            assert ended == [LONG_MIB * MIB] * 2


@pytest.mark.parametrize("short_first", [True, False])
def test_a_deadline_is_of_its_own_transfer(peer: Peer, short_first: bool) -> None:
    with TransferEngine(token=TOKEN, transports=["tcp"]) as engine:
        segment, region = engine.open(peer.address), engine.allocate(2 * MIB)
        engine.read(segment, region, segment.at(0), 1)
        peer.stop()

        def submit(offset: int, deadline_s: float) -> Transfer:
            return engine.submit(
                [Slice("read", segment, region.at(offset), segment.at(0), MIB)], deadline_s=deadline_s
            )

        if short_first:
            short, patient = submit(0, 1), submit(MIB, 600)
        else:
            patient, short = submit(MIB, 600), submit(0, 1)
        assert short.wait(MARGIN_S)
        assert isinstance(short.error, TransferError)
        assert patient.state is TransferState.WAITING
        peer.resume()
        assert patient.result(MARGIN_S) == MIB
