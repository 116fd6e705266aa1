"""AsyncStore: the verbs of Store without blocking the event loop; cancelled calls, closing, a lost node."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool import EXISTS, STORED, AsyncStore, Presence
from moonpool.core.errors import Closed, CorruptObject, InvalidArgument, Timeout, TooLarge, Unavailable
from moonpool.core.store.types import PutStatus

from . import wire_client as w
from .store_bed import MIB, TOKEN, NodeProcess, Tensor
from .wire_client import Wire


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 30))


def test_the_verbs() -> None:
    async def main() -> None:
        async with AsyncStore(embedded=16 * MIB) as store:
            assert await store.put("one", b"1") == STORED
            assert await store.put(["one", b"two"], [b"x", [b"2", b"2"]], parents=[None, "one"]) == [
                EXISTS,
                STORED,
            ]
            assert await store.get("two") == b"22"
            assert await store.get(["one", "absent"]) == [b"1", None]
            into = bytearray(4)
            assert await store.get("two", into, verify=True) == 2
            assert into == b"22\0\0"
            assert await store.exists("one") is Presence.HIT
            assert await store.exists(["one", "absent"]) == [Presence.HIT, Presence.MISS]
            prefix = await store.longest_prefix(["one", "two", "absent"])
            assert prefix.blocks == 2
            assert await store.remove("one") is True
            assert await store.remove(["one", "two"]) == [False, True]
            assert await store.get(["one", "two"], pin=prefix.pin) == [b"1", b"22"]
            assert prefix.pin is not None
            store.release(prefix.pin)
            await store.put(["l1", "l2"], [b"a", b"bb"])
            assert {entry.key: entry.size for entry in await store.list("l")} == {b"l1": 1, b"l2": 2}
            assert (await store.stat())["objects"] == 2
            refused = await store.put("big", bytes(5 * MIB))
            assert refused.status is PutStatus.REFUSED
            assert await store.put("one", b"new", replace=True, ack=False) == STORED

    run(main)


def test_errors_are_raised_where_the_call_waits() -> None:
    async def main() -> None:
        async with AsyncStore(embedded=16 * MIB) as store:
            await store.put("k", b"1234")
            for call in (
                store.put("", b"x"),
                store.put(["a", "b"], [b"x"]),
                store.get("k", bytearray(3)),
                store.get("k", b"read-only"),
                store.get("x" * 1025),
                store.exists(""),
                store.longest_prefix(["k"], width=2),
                store.remove(""),
                store.put("k", 7),  # type: ignore[call-overload]
            ):
                with pytest.raises(InvalidArgument):
                    await call
            assert await store.get("k") == b"1234"

    run(main)


def test_before_open_and_after_close() -> None:
    async def main() -> None:
        store = AsyncStore(embedded=4 * MIB)
        with pytest.raises(Closed, match="open this store first"):
            await store.put("k", b"x")
        with pytest.raises(Closed, match="open this store first"):
            await store.stat()
        await store.close()  # of what was never opened
        store = await AsyncStore.open(embedded=4 * MIB)
        await store.put("k", b"x")
        view = await store.get("k")
        await store.close()
        await store.close()
        for call in (
            store.put("k", b"x"),
            store.get("k"),
            store.exists("k"),
            store.longest_prefix(["k"]),
            store.remove("k"),
            store.list(),
            store.stat(),
        ):
            with pytest.raises(Closed, match="closed"):
                await call
        assert view == b"x"

    run(main)


def test_many_calls_at_once_end_in_their_own_futures() -> None:
    async def main() -> None:
        async with AsyncStore(embedded=64 * MIB) as store:
            results = await asyncio.gather(*(store.put(f"k{i}", b"%d" % i) for i in range(2000)))
            assert results == [STORED] * 2000
            views = await asyncio.gather(*(store.get(f"k{i}") for i in range(2000)))
            assert all(view == b"%d" % i for i, view in enumerate(views))

    run(main)


def test_the_loop_runs_on_while_the_node_stands_still(runtime_dir: Path) -> None:
    async def main() -> None:
        node = NodeProcess(runtime_dir / "n.sock")
        async with AsyncStore(str(runtime_dir / "n.sock"), token=TOKEN, timeout_s=1.0) as store:
            await store.put("k", b"x")
            node.stop()
            turns = 0
            call = asyncio.create_task(store.put("late", b"x"))
            while not call.done():
                turns += 1
                await asyncio.wait([call], timeout=0.01)
            with pytest.raises(Timeout):
                await call
            assert turns > 5  # it would be one or two if the call kept the loop
            assert await store.exists("absent") is Presence.UNKNOWN
            node.kill()
            prefix = await store.longest_prefix(["absent"])
            assert (prefix.blocks, prefix.pin) == (0, None)
            assert prefix.why
            with pytest.raises((Unavailable, Timeout)):
                await store.get("absent", bytearray(1))
        node.close()

    run(main)


def test_close_fails_what_has_not_started(runtime_dir: Path) -> None:
    async def main() -> None:
        node = NodeProcess(runtime_dir / "n.sock")
        store = await AsyncStore.open(str(runtime_dir / "n.sock"), token=TOKEN, timeout_s=0.5)
        await store.put("k", b"x")
        node.stop()
        calls = [asyncio.create_task(store.put(f"late{i}", b"x")) for i in range(10)]
        await asyncio.wait(calls, timeout=0.05)
        await store.close()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, (Closed, Timeout, Unavailable)) for end in ends)
        assert sum(isinstance(end, Closed) for end in ends) >= 9
        node.close()

    run(main)


def test_the_queue_has_a_maximum(runtime_dir: Path) -> None:
    async def main() -> None:
        node = NodeProcess(runtime_dir / "n.sock")
        async with AsyncStore(str(runtime_dir / "n.sock"), token=TOKEN, timeout_s=3.0) as store:
            await store.put("k", b"x")
            node.stop()
            calls = [asyncio.ensure_future(store.put(f"late{i}", b"x")) for i in range(4200)]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert any(isinstance(end, TooLarge) and "4096" in str(end) for end in ends)
            assert not any(end == STORED for end in ends)
        node.close()

    run(main)


def test_memory_given_by_address_outlives_a_cancelled_caller(runtime_dir: Path) -> None:
    """The core writes into it, whoever waits or not: it must not be freed meanwhile."""

    async def main() -> None:
        node = NodeProcess(runtime_dir / "n.sock")
        async with AsyncStore(str(runtime_dir / "n.sock"), token=TOKEN, timeout_s=1.0) as store:
            await store.put("k" * 100, b"x" * 1000)  # a long name is asked of the node
            node.stop()
            tensor = Tensor(np.zeros(1000, np.uint8))
            alive = weakref.ref(tensor)
            call = asyncio.create_task(store.get("k" * 100, tensor))
            await asyncio.wait([call], timeout=0.05)
            call.cancel()
            await asyncio.wait([call])
            del call, tensor
            gc.collect()
            assert alive() is not None
            with pytest.raises((Timeout, Unavailable)):
                await store.remove("other")  # has waited behind it
            gc.collect()
            assert alive() is None
        node.close()

    run(main)


def test_a_wrong_checksum_is_raised(runtime_dir: Path) -> None:
    async def main() -> None:
        node = NodeProcess(runtime_dir / "n.sock", scrub_bytes_per_s=0)
        with Wire.open(runtime_dir / "n.sock", TOKEN) as wire:
            offset, _, _ = wire.lease(4096, 4096)
            wire.commit([w.Row(offset, 64, 0xBAD, b"bad")])
            async with AsyncStore(str(runtime_dir / "n.sock"), token=TOKEN) as store:
                with pytest.raises(CorruptObject):
                    await store.get("bad", verify=True)
                with pytest.raises(CorruptObject):
                    await store.get("bad", bytearray(64), verify=True)
                assert await store.get("bad") == bytes(64)
        node.close()

    run(main)


def test_open_without_a_node(runtime_dir: Path) -> None:
    async def main() -> None:
        with pytest.raises(Unavailable, match="moonpool node"):
            await AsyncStore.open()
        with pytest.raises(Unavailable):
            async with AsyncStore():
                raise AssertionError

    run(main)
