"""The remote connector without a pool, without room, and with callers and engines that end in the middle."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.storage_backend import RemoteBackend

from tests.connectors.lmcache.real.beds import (
    BY_COPY,
    Backend,
    Make,
)
from tests.connectors.own_node import Node
from tests.core.store_bed import until

MIB = 1 << 20


def test_no_node_at_start_and_later(node: Node, make: Make, said: Callable[[], str]) -> None:
    backend = make()
    backend.put([1])
    assert backend.contains([1]) == 0
    assert backend.get([1]) == [None]
    assert "no pool at" in said()
    node.start()
    until(lambda: backend.connector._pool.client)
    backend.put([1])
    assert backend.get([1]) == [16]
    until(lambda: "joined the pool" in said())


def test_a_node_that_dies_and_comes_back(node: Node, make: Make, said: Callable[[], str]) -> None:
    node.start()
    backend = make()
    backend.put([1])
    node.stop()
    backend.put([2])
    assert backend.contains([1, 2]) == 0
    assert backend.get([2]) == [None]
    assert "does not answer" in said()
    node.start()
    assert until(lambda: [backend.put([3]), backend.contains([3])][1])
    assert backend.get([1, 3]) == [None, 16]
    assert "answers again" in said()


def test_a_full_pool(node: Node, make: Make) -> None:
    node.start(2 * MIB)
    backend = make(max_local_cpu_size=0.01)
    size = 64 + backend.connector.full_chunk_size_bytes
    for start in range(0, 1600, 100):  # three times what it holds
        backend.put(range(start, start + 100))
    held = [number for number in range(1600) if backend.contains([number])]
    assert 50 < len(held) < 2 * MIB // size
    assert backend.get(held) == [16] * len(held)


def test_a_pool_full_of_pins(node: Node, make: Make, said: Callable[[], str]) -> None:
    node.start(2 * MIB)
    release = node.full()
    backend = make()
    backend.put(range(500))
    assert "not all of 500 chunks were stored" in said()
    assert backend.contains([0]) == 0
    assert backend.get([0]) == [None]
    release()
    backend.put([3000])
    assert backend.get([3000]) == [16]


def test_a_wrong_token(
    node: Node, make: Make, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start()
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "another token")
    backend = make()
    backend.put([1])
    assert backend.contains([1]) == 0
    assert node.objects() == 0
    assert "no pool at" in said()
    assert "another token" not in said()
    with pytest.raises(IrrecoverableException):
        make(remote_url="moonpool://?require_pool=1")
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "a token of this test")
    until(lambda: backend.connector._pool.client)
    backend.put([1])
    assert backend.get([1]) == [16]


def test_no_memory_for_what_is_there(node: Node, make: Make) -> None:
    node.start()
    make().put(range(60))
    small = make(max_local_cpu_size=0.0001, **BY_COPY)  # room for 26 chunks
    found = small.get(range(60))
    assert found[0] == 16
    assert None in found
    assert found == sorted(found, key=lambda n: n is None)
    assert small.get(range(5)) == [16] * 5


@pytest.mark.parametrize("options", [{}, BY_COPY], ids=["lent", "copied"])
def test_a_caller_that_gives_up_keeps_memory_until_the_end(
    options: dict[str, Any], node: Node, make: Make
) -> None:
    node.start()
    backend = make(**options)
    backend.put(range(8))
    manager = backend.memory.memory_allocator.pin_allocator.address_manager
    free = manager.get_free_size()

    async def cancelled() -> None:
        for _ in range(50):
            task = asyncio.ensure_future(backend.connector.batched_get(backend.keys(*range(8))))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    backend.run(cancelled())
    until(lambda: manager.get_free_size() == free)
    until(lambda: node.pinned() == 0)
    chunk = backend.chunk(100)

    async def put_cancelled() -> None:
        task = asyncio.ensure_future(backend.connector.batched_put(backend.keys(100), [chunk]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        chunk.ref_count_down()  # as LMCache does, whatever became of it

    backend.run(put_cancelled())
    until(lambda: manager.get_free_size() == free)
    assert backend.get([100]) in ([16], [None])


def test_a_caller_that_gives_up_late(node: Node, make: Make) -> None:
    """While what has a header is looked at, full chunks are there already."""
    node.start()
    backend = make(**BY_COPY)
    backend.put([1])
    manager = backend.memory.memory_allocator.pin_allocator.address_manager
    free = manager.get_free_size()
    kept = []  # so that nothing is given back by being forgotten
    allocate = backend.connector._allocate
    backend.connector._allocate = lambda *what: kept.append(allocate(*what)) or kept[-1]

    async def cancelled() -> None:
        looking = asyncio.Event()

        async def views(names: list[str]) -> None:
            looking.set()
            await asyncio.get_running_loop().create_future()

        backend.connector._views = views
        task = asyncio.ensure_future(backend.connector.batched_get(backend.keys(1, 2)))
        await looking.wait()
        assert manager.get_free_size() < free
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    backend.run(cancelled())
    assert manager.get_free_size() == free


def test_a_pool_that_does_not_answer_is_asked_once(node: Node, make: Make) -> None:
    node.start()
    backend = make(**BY_COPY)
    backend.put([1])
    node.stop()
    asked = []
    backend.connector._views = lambda names: asked.append(names)
    assert backend.get([1, 2]) == [None, None]
    assert asked == []


def test_a_process_that_only_looks_up_has_no_memory(node: Node, make: Make) -> None:
    """LMCache's scheduler with enable_scheduler_bypass_lookup."""
    node.start()
    backend = make()
    backend.put([1, 2])
    only = RemoteBackend(backend.config, backend.metadata, backend.loop, None, "cpu")
    assert only.batched_contains(backend.keys(1, 2, 3)) == 2
    assert only.batched_get_blocking(backend.keys(1)) == [None]
    backend.run(only.connection.close())


def test_closing_the_backend_alone_leaves_the_memory_as_it_was(node: Node) -> None:
    node.start()
    backend = Backend()
    free = backend.memory.close
    backend.connector._idle.clear()  # something is under way
    backend.run(backend.connector.close())
    assert backend.memory.close != free
    assert backend.memory.close.__func__ is type(backend.memory).close
    # The hook of before, which somebody else may have: it waits for nothing.
    freeing = threading.Thread(target=free)
    freeing.start()
    freeing.join(5)
    assert not freeing.is_alive()
    backend.backend.close()
    backend.stop()


def test_a_restart_with_a_warm_pool(node: Node) -> None:
    node.start()
    first = Backend()
    first.put([1, 2])
    first.put([3], tokens=5)
    first.close()
    again = Backend()
    assert again.contains([1, 2, 3, 4]) == 3
    assert again.get([1, 2, 3, 4]) == [16, 16, 5, None]
    again.close()


def test_the_last_store_before_the_end_is_not_lost(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was handed to LMCache's loop, and has not begun."""
    node.start()
    backend = Backend()
    gate, closing = threading.Event(), threading.Thread(target=backend.close)
    chunk = backend.chunk(1)
    backend.loop.call_soon_threadsafe(gate.wait)
    backend.backend.batched_submit_put_task(backend.keys(1), [chunk])
    chunk.ref_count_down()
    asked, ask = threading.Event(), backend.loop.call_soon_threadsafe

    def seen(*arguments: Any, **more: Any) -> Any:
        try:
            return ask(*arguments, **more)
        finally:
            asked.set()

    monkeypatch.setattr(backend.loop, "call_soon_threadsafe", seen)
    closing.start()
    assert asked.wait(10)  # it waits for the loop, for a second; so the loop must not wait longer
    gate.set()
    closing.join(30)
    again = Backend()
    assert again.get([1]) == [16]
    again.close()


def test_closing_while_chunks_are_stored(node: Node) -> None:
    """LMCache frees its memory first; native threads must have ended with it by then."""
    node.start()
    backend = Backend()
    numbers = list(range(300))
    chunks = [backend.chunk(number) for number in numbers]
    backend.backend.batched_submit_put_task(backend.keys(*numbers), chunks)
    for chunk in chunks:
        chunk.ref_count_down()
    closing = threading.Thread(target=backend.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    again = Backend()
    assert again.get(numbers) == [16] * 300
    again.close()
    assert os.path.exists(node.socket)
