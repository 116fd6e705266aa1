"""Chunks that LMCache's connector lends to a GPU (gpu_pin): read by the software device where they lie, as
LMCache's kernels read them. Only LMCache's name for its platform, and the vLLM around it, are played."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from moonpool import _native
from moonpool.connectors.lmcache import pinned_chunks, remote_connector, vllm_engine
from moonpool.connectors.lmcache.remote_connector import ZERO_COPY_SHARE
from moonpool.connectors.pinned_arena import ALL
from tests.connectors.lmcache.real.beds import BY_COPY, Backend, Make, expected
from tests.connectors.own_node import TOKEN, Node
from tests.core.store_bed import until
from tests.soft_card import COMPILER, SoftCard, compile_library, soft_card

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

PIN = {"remote_url": "moonpool://?gpu_pin=all"}
NODE_BYTES = 64 << 20


@pytest.fixture
def card(tmp_path: Path) -> Iterator[SoftCard]:
    with soft_card(compile_library(tmp_path), "late") as card:
        yield card


@pytest.fixture(autouse=True)
def _in_a_worker_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_connector, "torch_device_type", "cuda")
    monkeypatch.setattr(vllm_engine, "current", SimpleNamespace)
    monkeypatch.setattr(pinned_chunks, "PART_BYTES", 8 << 20)


def settle(node: Node) -> None:
    """Waits until the node has gathered its memory into huge pages, or knows that it cannot."""
    client = _native.Client(str(node.socket), TOKEN, timeout_s=10)
    client.connect()
    arena = _native.PinnedArena(0, client, 64 << 20)
    until(lambda: "settled" not in arena.grow(ALL).why, 30)
    client.close()


def start(node: Node) -> None:
    node.start(NODE_BYTES)
    settle(node)


def chunks_of(backend: Backend, *numbers: int) -> list[Any]:
    chunks = backend.run(backend.connector.batched_get(backend.keys(*numbers)))
    assert all(chunk is not None for chunk in chunks)
    return list(chunks)


def as_floats(chunk: Any) -> npt.NDArray[np.float32]:
    """The chunk's memory, where it lies."""
    return np.frombuffer(chunk.byte_array, np.float32)


def read_by_card(card: SoftCard, chunks: list[Any]) -> list[torch.Tensor]:
    """What a kernel finds at their addresses, once its stream has ended."""
    targets = [card.array(as_floats(chunk).shape) for chunk in chunks]
    for target, chunk in zip(targets, chunks, strict=True):
        card.forward(target, as_floats(chunk))
    card.settle()
    return [torch.from_numpy(target.view.copy()).view(torch.int16) for target in targets]


def wanted(number: int, chunk: Any) -> torch.Tensor:
    return expected(number, chunk.tensor.shape, torch.bfloat16).view(torch.int16).reshape(-1)


def test_a_card_reads_lent_chunks_where_they_lie(
    card: SoftCard, node: Node, make: Make, said: Callable[[], str]
) -> None:
    start(node)
    backend = make(**PIN)
    assert "64.0 MiB of the node's 64.0 MiB are pinned for the card" in said()
    backend.put([1, 2])
    manager = backend.memory.memory_allocator.pin_allocator.address_manager
    free = manager.get_free_size()
    chunks = chunks_of(backend, 1, 2)
    assert manager.get_free_size() == free
    assert node.pinned() == 2
    for number in range(100, 2100, 100):  # more than the pool holds: what is lent stays
        backend.put(range(number, number + 100))
    for number, chunk, read in zip((1, 2), chunks, read_by_card(card, chunks), strict=True):
        assert torch.equal(read, wanted(number, chunk))
        chunk.ref_count_down()
    until(lambda: node.pinned() == 0)
    assert backend.connector._zero_copy.nbytes == 0


def test_chunks_outside_of_the_pinned_part_are_copied(
    card: SoftCard, node: Node, make: Make, said: Callable[[], str], rng: random.Random
) -> None:
    start(node)
    pinned = rng.randrange(1, 9) * 4096
    backend = make(remote_url=f"moonpool://?gpu_pin={pinned}")
    assert "of the node's 64.0 MiB are pinned for the card" in said()
    numbers, size = range(40), backend.connector.full_chunk_size_bytes
    assert 2 * pinned < len(numbers) * size
    backend.put(numbers)
    chunks = chunks_of(backend, *numbers)
    lent = node.pinned()
    assert 0 < lent <= pinned // size
    assert backend.connector._zero_copy.nbytes == lent * size
    for number, chunk in zip(numbers, chunks, strict=True):
        assert torch.equal(chunk.tensor.view(torch.int16).reshape(-1), wanted(number, chunk))
        chunk.ref_count_down()
    until(lambda: node.pinned() == 0)


def test_what_is_lent_has_a_limit(card: SoftCard, node: Node, make: Make) -> None:
    node.start(1 << 20)
    settle(node)
    backend = make(**PIN)
    backend.put(range(100))
    lendable = (1 << 20) // ZERO_COPY_SHARE // backend.connector.full_chunk_size_bytes
    assert 0 < lendable < 90
    chunks = chunks_of(backend, *range(90))
    assert node.pinned() == lendable
    for chunk in chunks:
        chunk.ref_count_down()
    until(lambda: node.pinned() == 0)


def test_a_driver_that_refuses(card: SoftCard, node: Node, make: Make, said: Callable[[], str]) -> None:
    start(node)
    card.limit_pinned(0)
    backend = make(**PIN)
    assert "0 B of the node's 64.0 MiB are pinned for the card; chunks in the rest are copied" in said()
    assert "cuMemHostRegister: " in said()
    backend.put([1, 2])
    assert backend.get([1, 2, 3]) == [16, 16, None]
    assert node.pinned() == 0


def test_no_driver(node: Node, make: Make, said: Callable[[], str]) -> None:
    node.start(NODE_BYTES)
    _native.use_driver_for_tests("/no/such/library.so")
    try:
        backend = make(**PIN)
    finally:
        _native.use_driver_for_tests("")
    assert "no memory of the node is pinned (gpu_pin); chunks in the rest are copied into LMCache" in said()
    backend.put([1])
    assert backend.get([1]) == [16]


def test_no_node_at_start_and_later(card: SoftCard, node: Node, make: Make, said: Callable[[], str]) -> None:
    backend = make(**PIN)
    assert "there is no pool yet, so no memory of a node is pinned (gpu_pin)" in said()
    start(node)
    until(lambda: backend.connector._pool.client)
    backend.put([1])
    registered = card.calls("cuMemHostRegister")
    (chunk,) = chunks_of(backend, 1)
    assert node.pinned() == 0
    assert card.calls("cuMemHostRegister") == registered
    chunk.ref_count_down()


def test_a_node_that_ends_under_a_lent_chunk(card: SoftCard, node: Node, make: Make) -> None:
    start(node)
    backend = make(**PIN)
    backend.put([1])
    (lent,) = chunks_of(backend, 1)
    node.stop()
    assert backend.get([2]) == [None]
    start(node)
    assert until(lambda: [backend.put([3]), backend.contains([3])][1])
    released = card.calls("cuMemHostUnregister")
    (copied,) = chunks_of(backend, 3)  # of the next life: not pinned
    assert node.pinned() == 0
    assert card.calls("cuMemHostUnregister") == released  # a kernel may still read the lent one
    (read,) = read_by_card(card, [lent])
    assert torch.equal(read, wanted(1, lent))
    lent.ref_count_down()
    assert card.calls("cuMemHostUnregister") > released
    copied.ref_count_down()


def test_lent_chunks_outlive_the_connector(card: SoftCard, node: Node) -> None:
    start(node)
    backend = Backend(**PIN)
    backend.put([1])
    (chunk,) = chunks_of(backend, 1)
    backend.close()
    (read,) = read_by_card(card, [chunk])
    assert torch.equal(read, wanted(1, chunk))
    chunk.ref_count_down()
    until(lambda: node.pinned() == 0)


@pytest.mark.parametrize(
    ("platform", "engine", "options", "why"),
    [
        ("cpu", SimpleNamespace(), {}, "platform is the CPU, where chunks are lent without it"),
        ("xpu", SimpleNamespace(), {}, "platform is xpu"),
        ("cuda", None, {}, "no worker of vLLM"),
        ("cuda", SimpleNamespace(), BY_COPY, "local_cpu"),
        ("cuda", SimpleNamespace(), {"enable_blending": True}, "blending"),
    ],
)
def test_where_it_has_no_effect(
    card: SoftCard,
    node: Node,
    make: Make,
    said: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    engine: Any,
    options: dict[str, Any],
    why: str,
) -> None:
    monkeypatch.setattr(remote_connector, "torch_device_type", platform)
    monkeypatch.setattr(vllm_engine, "current", lambda: engine)
    start(node)
    registered = card.calls("cuMemHostRegister")
    backend = make(**PIN, **options)
    assert "gpu_pin has no effect: " in said()
    assert why in said()
    assert card.calls("cuMemHostRegister") == registered
    assert backend.connector._pinned is None
