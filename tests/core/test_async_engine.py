"""AsyncTransferEngine: the verbs without blocking the event loop; cancelled calls, closing, a lost peer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from moonpool import (
    AsyncTransferEngine,
    Batch,
    Priority,
    Slice,
    SliceState,
    TransferError,
    TransferState,
)
from moonpool.core.errors import AuthError, Closed, InvalidArgument, Unavailable

from .engine_bed import Peer, Relay
from .store_bed import MIB, TOKEN


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


def make(**options: Any) -> AsyncTransferEngine:
    return AsyncTransferEngine(**({"token": TOKEN} | options))


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    made = Peer("host_arena", MIB)
    yield made
    made.close()


@pytest.mark.parametrize("transports", [None, ["tcp"]], ids=["any", "tcp"])
def test_the_verbs(peer: Peer, transports: list[str] | None) -> None:
    async def main() -> None:
        async with make(name="async", transports=transports) as engine:
            assert engine.name == "async"
            assert len(engine.segment_id) == 16
            assert engine.transports()["tcp"] == ""
            segment = await engine.open(peer.address)
            await engine.refresh(segment)
            region = await engine.allocate(MIB)
            array = np.arange(1000, dtype=np.uint64)
            own = await engine.register(array)
            assert await engine.write(segment, array, segment.at(0)) == 8000
            assert await engine.read(segment, region, segment.at(0), 8000) == 8000
            assert np.array_equal(np.frombuffer(region.view, np.uint64, 1000), array)
            local, remote = [region.at(0), region.at(8)], [segment.at(8), segment.at(0)]
            assert await engine.read(segment, local, remote, 8) == 16
            assert np.frombuffer(region.view, np.uint64, 2).tolist() == [1, 0]
            slices = [
                Slice("write", segment, region.at(0), segment.at(4096), 8),
                Slice("read", segment, region.at(16), segment.at(0), 8),
            ]
            assert await engine.transfer(slices) == 16
            transfer = engine.submit(Batch("read", segment, local, remote, 8), priority=Priority.BACKGROUND)
            assert await transfer == 16
            assert await transfer == 16  # again
            assert transfer.state is TransferState.DONE
            assert transfer.slices == [SliceState.DONE] * 2
            moved = sum(value for name, value in engine.metrics().items() if name.endswith("_bytes_total"))
            assert moved >= 8000 + 8000 + 16 + 16 + 16
            own.close()

    run(main)


def test_messages_are_awaited() -> None:
    async def main() -> None:
        async with make(name="left") as left, make(name="right") as right:
            region = await left.allocate(4096)
            await right.allocate(4096)
            segment = await left.open(right.addresses[0])
            assert await right.notifications() == []
            assert await right.notifications(0.01) == []
            waiting = asyncio.create_task(right.notifications(10))
            await asyncio.sleep(0)
            await left.write(segment, region, segment.at(0), notify=b"with data")
            assert await waiting == [("left", b"with data")]
            await left.notify(segment, b"alone")
            assert await right.notifications(10) == [("left", b"alone")]

    run(main)


def test_many_transfers_at_once_end_in_their_own_futures(peer: Peer) -> None:
    async def main() -> None:
        async with make() as engine:
            segment = await engine.open(peer.address)
            region = await engine.allocate(MIB)
            region.view[:] = b"".join(number.to_bytes(4, "little") * 128 for number in range(2048))
            assert sum(
                await asyncio.gather(
                    *(engine.write(segment, region.at(at), segment.at(at), 512) for at in range(0, MIB, 512))
                )
            )
            expected = bytes(region.view)
            region.view[:] = bytes(MIB)
            sizes = await asyncio.gather(
                *(
                    engine.read(segment, region.at(at), segment.at(at), 1 + at % 512 or 512)
                    for at in range(0, 512 * 1000, 512)
                )
            )
            assert sizes == [1] * 1000
            await engine.read(segment, region, segment.at(0))
            assert region.view == expected

    run(main)


def test_errors_are_raised_where_the_call_waits(peer: Peer, free_port: int) -> None:
    async def main() -> None:
        async with make() as engine:
            segment = await engine.open(peer.address)
            region = await engine.allocate(4096)
            with pytest.raises(TransferError) as caught:
                await engine.read(segment, region.at(0), segment.at(0) + MIB, 10)
            assert caught.value.peer == peer.address
            assert caught.value.states == b"\2"
            transfer = engine.submit([Slice("read", segment, region, 1 << 50, 10)])
            for _ in range(2):
                with pytest.raises(TransferError):
                    await transfer
            assert isinstance(transfer.error, TransferError)
            for call in (
                engine.read(segment, bytearray(10), segment.at(0)),
                engine.read(segment, region, segment.at(0), 5000),
                engine.transfer([]),
                engine.register(b"read-only"),
                engine.allocate(0),
            ):
                with pytest.raises(InvalidArgument):
                    await call
            with pytest.raises(InvalidArgument):
                engine.submit([])
            with pytest.raises(Unavailable):
                await engine.open(f"127.0.0.1:{free_port}")
            assert await engine.read(segment, region, segment.at(0)) == 4096
        async with make(token=b"a guess") as stranger:
            with pytest.raises(AuthError):
                await stranger.open(peer.address)

    run(main)


def test_before_start_and_after_close(peer: Peer) -> None:
    async def main() -> None:
        engine = make()
        with pytest.raises(Closed, match="start this engine first"):
            await engine.open(peer.address)
        with pytest.raises(Closed, match="start this engine first"):
            engine.metrics()
        await engine.close()  # of what was never started
        engine = await AsyncTransferEngine.start(token=TOKEN)
        segment, region = await engine.open(peer.address), await engine.allocate(4096)
        await engine.close()
        await engine.close()
        for call in (
            engine.open(peer.address),
            engine.read(segment, region.at(0), segment.at(0), 10),
            engine.write(segment, region.at(0), segment.at(0), 10),
            engine.transfer([Slice("read", segment, region, segment.at(0), 10)]),
            engine.register(bytearray(10)),
            engine.allocate(10),
            engine.notify(segment, b"x"),
            engine.notifications(),
            engine.notifications(1),
        ):
            with pytest.raises(Closed, match="closed"):
                await call
        with pytest.raises(Closed):
            engine.submit([Slice("read", segment, region, segment.at(0), 10)])
        region.close()

    run(main)


def test_the_loop_runs_on_while_the_peer_stands_still() -> None:
    async def main() -> None:
        still = Peer("host_arena", MIB)
        try:
            async with make(transports=["tcp"]) as engine:
                segment, region = await engine.open(still.address), await engine.allocate(MIB)
                await engine.read(segment, region, segment.at(0))
                still.stop()
                turns = 0
                call = asyncio.create_task(engine.read(segment, region, segment.at(0), deadline_s=1.0))
                while not call.done():
                    turns += 1
                    await asyncio.wait([call], timeout=0.01)
                with pytest.raises(TransferError, match="for 1 s"):
                    await call
                assert turns > 5  # it would be one or two if the call kept the loop
        finally:
            still.close()

    run(main)


def test_a_cancelled_call_cancels_its_transfer(peer: Peer) -> None:
    async def main() -> None:
        with Relay(peer.address) as relay:
            async with make(transports=["tcp"]) as engine:
                segment = await engine.open(relay.address)
                region = await engine.allocate(MIB)
                await engine.read(segment, region, segment.at(0), 1)
                relay.stall()
                call = asyncio.create_task(engine.read(segment, region, segment.at(0), MIB))
                await asyncio.wait([call], timeout=0.05)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                while engine._waiting:  # ends though nothing moves
                    await asyncio.sleep(0.001)
                assert bytes(region.view[1:]) == bytes(MIB - 1)
                relay.go_on()
                assert await engine.read(segment, region, segment.at(0), 4096) == 4096

    run(main)


def test_a_transfer_outlives_a_task_that_stops_waiting(peer: Peer) -> None:
    async def main() -> None:
        with Relay(peer.address) as relay:
            async with make(transports=["tcp"]) as engine:
                segment, region = await engine.open(relay.address), await engine.allocate(MIB)
                await engine.read(segment, region, segment.at(0), 1)
                relay.stall()
                transfer = engine.submit([Slice("read", segment, region, segment.at(0), MIB)])

                async def wait() -> int:
                    return await transfer

                waiting = asyncio.create_task(wait())
                await asyncio.wait([waiting], timeout=0.05)
                waiting.cancel()
                await asyncio.wait([waiting])
                assert not transfer.done
                relay.go_on()
                assert await transfer == MIB
                relay.stall()
                other = engine.submit([Slice("read", segment, region, segment.at(0), MIB)])
                other.cancel()
                with pytest.raises(TransferError, match="cancel"):
                    await other
                assert other.state is TransferState.CANCELLED

    run(main)


def test_looking_before_awaiting(peer: Peer) -> None:
    """Whoever sees ``done`` first must not keep the one who awaits waiting for ever."""

    async def main() -> None:
        async with make() as engine:
            segment, region = await engine.open(peer.address), await engine.allocate(4096)
            for _ in range(50):
                transfer = engine.submit([Slice("read", segment, region, segment.at(0), 4096)])
                while not transfer.done:
                    pass
                assert transfer.bytes_done == 4096
                assert await asyncio.wait_for(transfer, 5) == 4096
            assert not engine._waiting

    run(main)


def test_a_transfer_that_nobody_keeps(peer: Peer) -> None:
    async def main() -> None:
        async with make(transports=["tcp"]) as engine:
            segment, region = await engine.open(peer.address), await engine.allocate(4096)
            for _ in range(100):
                engine.submit([Slice("read", segment, region, segment.at(0), 4096)])
            gc.collect()
            while engine._waiting:
                await asyncio.sleep(0.001)
            assert engine.metrics()["tcp_read_bytes_total"] == 100 * 4096

    run(main)


def test_close_ends_what_waits(peer: Peer) -> None:
    async def main() -> None:
        with Relay(peer.address) as relay:
            engine = await AsyncTransferEngine.start(token=TOKEN, transports=["tcp"], timeout_s=30)
            segment, region = await engine.open(relay.address), await engine.allocate(MIB)
            await engine.read(segment, region, segment.at(0), 1)
            relay.stall()
            calls = [asyncio.create_task(engine.read(segment, region, segment.at(0))) for _ in range(5)]
            listener = asyncio.create_task(engine.notifications(30))
            await asyncio.wait([*calls, listener], timeout=0.05)
            await asyncio.wait_for(engine.close(), 10)
            ends = await asyncio.wait_for(asyncio.gather(*calls, listener, return_exceptions=True), 10)
            assert all(isinstance(end, (Closed, TransferError)) for end in ends), ends

    run(main)
