"""mooncake.store with addresses of a CUDA card: the software device, under its policies."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.core.store_bed import MIB
from tests.soft_card import COMPILER, CardArray, SoftCard, compile_library, soft_card

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

Keys = Callable[[int], list[str]]
BAD, MISS = -600, -704
LAYERS, BLOCKS, FLOATS = 4, 6, 1024  # a paged KV cache: a block has FLOATS in each layer


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("soft"))


@pytest.fixture(params=("late", "early", "shuffled"))
def card(request: pytest.FixtureRequest, library: Path) -> Iterator[SoftCard]:
    with soft_card(library, request.param, seed=23) as card:
        yield card
        gc.collect()


@pytest.fixture
def late_card(library: Path) -> Iterator[SoftCard]:
    with soft_card(library) as card:
        yield card
        gc.collect()


@pytest.fixture(scope="module")
def pool(make_store: Callable[..., Any]) -> Any:
    """What gives the memory; its process is this one."""
    return make_store(64 * MIB)


@pytest.fixture
def open_store(pool: Any, make_store: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    """Stores that end with the test, and so before its card."""
    made = []

    def make() -> Any:
        made.append(make_store(0))
        return made[-1]

    yield make
    for store in made:
        store.close()


def rows(cache: CardArray, block: int) -> tuple[list[int], list[int]]:
    """Addresses and sizes of a block's bytes, one for each layer."""
    size = 4 * FLOATS
    return [cache.address + (layer * BLOCKS + block) * size for layer in range(LAYERS)], [size] * LAYERS


def columns(*pairs: tuple[list[int], list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    return [addresses for addresses, _ in pairs], [sizes for _, sizes in pairs]


def test_blocks_of_a_kv_cache_are_put_and_got_layer_by_layer(
    card: SoftCard, open_store: Callable[[], Any], keys: Keys
) -> None:
    """As vLLM's MooncakeStoreConnector does: one object a block, one buffer a layer."""
    store = open_store()
    source, target = card.array((LAYERS, BLOCKS, FLOATS)), card.array((LAYERS, BLOCKS, FLOATS))
    source.view[:] = np.random.default_rng(5).random(source.view.shape, np.float32)
    for cache in (source, target):
        assert store.register_buffer(cache.address, cache.view.nbytes) == 0
    names = keys(BLOCKS)
    saved = columns(*(rows(source, block) for block in range(BLOCKS)))
    assert store.batch_put_from_multi_buffers(names, *saved) == [0] * BLOCKS
    order = [3, 0, 5, 1, 4, 2]
    loaded = columns(*(rows(target, block) for block in range(BLOCKS)))
    got = store.batch_get_into_multi_buffers([names[block] for block in order], *loaded)
    assert got == [4 * FLOATS * LAYERS] * BLOCKS
    assert np.array_equal(target.view, source.view[:, order])
    for cache in (source, target):
        assert store.unregister_buffer(cache.address) == 0


def test_one_buffer_each_registered_or_not_and_larger_than_its_object(
    card: SoftCard, open_store: Callable[[], Any], keys: Keys
) -> None:
    store = open_store()
    source, target = card.array((3, FLOATS)), card.array((3, 2 * FLOATS))
    source.view[:] = np.random.default_rng(6).random(source.view.shape, np.float32)
    target.view[:] = 7
    names = keys(3)
    size = 4 * FLOATS
    assert store.register_buffer(target.address, target.view.nbytes) == 0
    assert store.put_from(names[0], source.address, size) == 0
    assert store.batch_put_from(
        names[1:], [source.address + size, source.address + 2 * size], [size] * 2
    ) == [
        0,
        0,
    ]
    assert store.upsert_from(names[0], source.address, size) == 0
    assert store.get_into(names[0], target.address, 2 * size) == size
    rest = [target.address + 2 * size, target.address + 4 * size]
    assert store.batch_get_into(names[1:], rest, [2 * size] * 2) == [size] * 2
    assert np.array_equal(target.view[:, :FLOATS], source.view)
    assert (target.view[:, FLOATS:] == 7).all()
    assert bytes(store.get(names[1])) == source.view[1].tobytes()


def test_cards_and_the_host_in_one_batch_and_in_one_object(
    card: SoftCard, open_store: Callable[[], Any], keys: Keys
) -> None:
    store = open_store()
    on_card, back = card.array((2, FLOATS)), card.array((2, FLOATS))
    on_card.view[:] = np.random.default_rng(7).random(on_card.view.shape, np.float32)
    host = np.random.default_rng(8).integers(0, 256, 1000, np.uint8)
    host_back = np.zeros(2000, np.uint8)
    size = 4 * FLOATS
    plain, mixed, other = keys(3)
    pointers = [
        [host.ctypes.data],
        [on_card.address, host.ctypes.data, on_card.address + size],
        [on_card.address],
    ]
    sizes = [[1000], [size, 1000, size], [size]]
    assert store.batch_put_from_multi_buffers([plain, mixed, other], pointers, sizes) == [0] * 3
    assert store.get(mixed) == on_card.view[0].tobytes() + host.tobytes() + on_card.view[1].tobytes()
    start = host_back.ctypes.data
    pointers = [[back.address, start + 1000, back.address + size], [start]]
    assert store.batch_get_into_multi_buffers([mixed, plain], pointers, [sizes[1], [1000]]) == [
        2 * size + 1000,
        1000,
    ]
    assert np.array_equal(back.view, on_card.view)
    assert np.array_equal(host_back[:1000], host)
    assert np.array_equal(host_back[1000:], host)
    # Metadata of the host before data of a card.
    both = keys(1)[0]
    assert store.put_from_with_metadata(both, on_card.address, host.ctypes.data, size, 1000) == 0
    assert store.get(both) == host.tobytes() + on_card.view[0].tobytes()


def test_an_object_larger_than_a_slot_of_pinned_memory(
    late_card: SoftCard, open_store: Callable[[], Any], key: str
) -> None:
    store = open_store()
    floats = 2_600_000  # 10.4 MB; a slot has 8 MiB
    source, target = late_card.array((floats,)), late_card.array((floats,))
    source.view[:] = np.arange(floats)
    assert store.put_from(key, source.address, 4 * floats) == 0
    assert store.get_into(key, target.address, 4 * floats) == 4 * floats
    assert np.array_equal(target.view, source.view)
    store.remove(key)


def test_sessions_move_parts_of_objects(card: SoftCard, open_store: Callable[[], Any], keys: Keys) -> None:
    store = open_store()
    source, target = card.array((4, FLOATS)), card.array((4, FLOATS))
    source.view[:] = np.random.default_rng(9).random(source.view.shape, np.float32)
    size = 4 * FLOATS
    key = keys(1)[0]
    assert store.batch_put_session_start([key], [4 * size]) == [0]
    for first in (0, 2):
        places = [source.address + row * size for row in (first, first + 1)]
        offsets = [(3 - row) * size for row in (first, first + 1)]
        assert store.batch_put_from_multi_buffer_ranges([key], [places], [[size] * 2], [offsets]) == [
            2 * size
        ]
    assert store.batch_put_session_end([key]) == [0]
    assert store.get(key) == source.view[::-1].tobytes()
    assert store.batch_get_session_start([key]) == [0]
    places = [target.address, target.address + 2 * size]
    got = store.batch_get_into_multi_buffer_ranges([key], [places], [[size, 2 * size]], [[3 * size, 0]])
    assert got == [3 * size]
    assert store.batch_get_session_end([key]) == 0
    assert np.array_equal(target.view[0], source.view[0])
    assert np.array_equal(target.view[2:], source.view[:1:-1])
    assert store.get_into_ranges([target.address], [[key]], [[[size]]], [[[2 * size]]], [[[size]]]) == [
        [[size]]
    ]
    assert np.array_equal(target.view[1], source.view[1])


def test_what_is_no_memory_of_a_card_is_refused_for_its_own_key(
    late_card: SoftCard, open_store: Callable[[], Any], keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    good, freed = late_card.array((FLOATS,)), late_card.array((FLOATS,))
    size = 4 * FLOATS
    assert store.register_buffer(freed.address, size) == 0
    assert store.register_buffer(good.address, 1 << 40) == BAD  # over several allocations, or beyond the last
    late_card.free(freed)
    names = keys(3)
    beyond = abs(freed.address - good.address) + size
    first = min(good.address, freed.address)
    pointers, sizes = [good.address, freed.address, first], [size, size, beyond]
    assert store.batch_put_from(names, pointers, sizes) == [0, BAD, BAD]
    assert store.batch_get_into([names[0]] * 3, pointers, sizes) == [size, BAD, BAD]
    lists = [[pointer] for pointer in pointers], [[size] for size in sizes]
    assert store.batch_put_from_multi_buffers(names, *lists) == [0, BAD, BAD]
    assert store.batch_get_into_multi_buffers([names[0]] * 3, *lists) == [size, BAD, BAD]
    assert store.get_into(keys(1)[0], good.address, size) == MISS
    # Tensors are made of memory that the CPU reads.
    with caplog.at_level(logging.WARNING, "mooncake"):
        assert store.put_tensor_from(keys(1)[0], good.address, size) == BAD
        assert store.batch_get_tensor_into(names[:1], [good.address], [size]) == [None]
    assert "GPU" in caplog.text


@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_a_card_that_dies_or_hangs_costs_an_error_and_the_pool_goes_on(
    library: Path, open_store: Callable[[], Any], keys: Keys, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mooncake import _access

    monkeypatch.setattr(_access, "TIMEOUT_S", 5.0)  # each call that needs a card that hangs takes so long
    with soft_card(library) as card:
        store = open_store()
        array, names = card.array((FLOATS,)), keys(3)
        host = np.arange(100, dtype=np.uint8)
        assert store.put(names[0], host) == 0
        card.die(1, 700) if fate == "dies" else card.hang(1)
        assert store.put_from(names[1], array.address, 4 * FLOATS) < 0
        assert store.get_into(names[0], array.address, 4 * FLOATS) < 0
        assert store.is_exist(names[1]) == 0
        assert store.put_from(names[2], host.ctypes.data, 100) == 0
        assert store.get(names[2]) == host.tobytes()
        card.unhang()
        store.close()


def test_without_a_driver_a_gpus_address_is_refused(
    open_store: Callable[[], Any], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    reserved = libc.mmap(None, MIB, 0, 0x22, -1, 0)  # as a GPU's is here: no access
    with caplog.at_level(logging.WARNING, "mooncake"):
        assert store.register_buffer(reserved, MIB) == BAD
        assert store.put_from(key, reserved, 4096) == BAD
    assert "copy what a GPU has to the host first" in caplog.text
