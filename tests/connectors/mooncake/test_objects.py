"""Objects as a whole: every form of put, get, exists and remove, with good and bad input."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mooncake import _memory
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeHostMemAllocator, ReplicateConfig

import moonpool
from tests.core.store_bed import MIB, until

Keys = Callable[[int], list[str]]
MISS = -704
BAD = -600


@pytest.fixture(scope="module")
def buffer(store: Any) -> Any:
    """A registered buffer of a MiB of different bytes."""
    array = np.random.default_rng(1).integers(0, 256, MIB, np.uint8)
    assert store.register_buffer(array.ctypes.data, array.nbytes) == 0
    yield array
    assert store.unregister_buffer(array.ctypes.data) == 0


# ---- bytes


@pytest.mark.parametrize(
    "value", [b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), np.frombuffer(b"bytes", "u1")]
)
def test_put_takes_any_buffer(store: Any, key: str, value: Any) -> None:
    assert store.put(key, value) == 0
    assert store.get(key) == b"bytes"
    assert type(store.get(key)) is bytes


def test_put_keeps_what_is_there_and_upsert_replaces_it(store: Any, key: str) -> None:
    assert store.put(key, b"first") == 0
    assert store.put(key, b"second") == 0
    assert store.get(key) == b"first"
    held = store.get_buffer(key)
    assert store.upsert(key, b"third") == 0
    assert store.get(key) == b"third"
    assert bytes(held) == b"first"  # who reads goes on


def test_bad_values_and_keys(store: Any, key: str) -> None:
    with pytest.raises(TypeError):
        store.put(key, "text")
    with pytest.raises(TypeError):
        store.put(key, None)
    with pytest.raises(TypeError, match="config"):
        store.put(key, b"x", None)
    with pytest.raises(TypeError, match="foo"):
        store.put(key, b"x", foo=1)
    with pytest.raises(TypeError):
        store.put(5, b"x")
    assert store.put(key, b"") == BAD
    assert store.put("", b"x") == BAD
    assert store.put("k" * 70_000, b"x") == BAD
    config = ReplicateConfig()
    config.replica_num = 0
    assert store.put(key, b"x", config) == BAD
    assert store.is_exist(key) == 0


@pytest.mark.parametrize("name", ["nul\0inside", "Ünïcode-鍵", "a*b?[c]", b"bytes"])
def test_any_name(store: Any, name: Any) -> None:
    assert store.put(name, b"value") == 0
    assert store.get(name) == b"value"
    assert store.get_size(name) == 5
    assert store.remove(name) == 0


def test_long_names(store: Any, key: str) -> None:
    """A pool's own end at 1,024 bytes: longer ones have their digest there, and stay apart."""
    stem = key + "n" * 5000
    one, other, longest = stem + "1", stem + "2", "k" * 65_536
    assert store.put_batch([one, other, longest], [b"one", b"other", b"longest"]) == 0
    assert store.get(one) == b"one"
    assert store.get_batch([other, key, longest]) == [b"other", b"", b"longest"]
    assert store.batch_is_exist([one, other, stem, longest]) == [1, 1, 0, 1]
    assert store.is_exist(one) == 1
    assert store.get_size(other) == 5
    into = np.zeros(8, np.uint8)
    assert store.batch_get_into([key, one], [into.ctypes.data] * 2, [8, 8]) == [MISS, 3]
    assert store.upsert(one, b"again") == 0
    assert store.get_batch([one, other]) == [b"again", b"other"]
    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    assert store.upsert(other, b"held", pinned) == 0
    assert store.batch_remove([one, stem]) == [0, MISS]
    assert store.is_exist(one) == 0
    assert store.remove_by_regex(f"^{key}n{{800}}") == 1
    assert store.remove(longest) == 0
    assert store.put("k" * 65_537, b"x") == BAD
    assert store.batch_is_exist([one, other, "k" * 65_537]) == [0, 0, 0]
    assert store.put(key, b"x") == 0
    assert store.batch_is_exist([key, "k" * 65_537]) == [1, 0]  # the good one is known


def test_parts_make_one_object(store: Any, keys: Keys) -> None:
    one, other, none = keys(3)
    assert store.put_parts(one, b"he", bytearray(b"ll"), memoryview(b"o")) == 0
    assert store.get(one) == b"hello"
    assert store.put_parts(none) == BAD
    assert store.upsert_parts(one, b"1", b"2") == 0
    assert store.get(one) == b"12"
    assert store.put_parts(other, b"x", config=ReplicateConfig()) == 0
    with pytest.raises(TypeError):
        store.put_parts(other, b"x", "y")


def test_batches_of_bytes(store: Any, keys: Keys) -> None:
    one, other, none = keys(3)
    assert store.put_batch([one, other], [b"x", b"yy"]) == 0
    assert store.get_batch([one, none, other]) == [b"x", b"", b"yy"]
    assert store.put_batch([one, other], [b"x"]) == BAD
    assert store.put_batch([none, ""], [b"x", b"y"]) == BAD
    assert store.put_batch(["k" * 70_000, none], [b"x", b"y"]) == BAD
    assert store.get(none) == b"x"  # what is right is stored
    assert store.upsert_batch([one, other], [b"new", b"newer"]) == 0
    assert store.get_batch([one, other]) == [b"new", b"newer"]
    assert store.get_batch([]) == []
    with pytest.raises(TypeError):
        store.get_batch(one)


def test_a_miss_is_nothing(store: Any, key: str) -> None:
    assert store.get(key) == b""
    assert store.get_buffer(key) is None
    assert store.batch_get_buffer([key]) == [None]
    assert store.get_size(key) == MISS


def test_a_size_needs_no_list(store: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list walks through every object of every node, and leaves out those of a node that is silent."""
    store.put(key, b"12345")
    monkeypatch.setattr(moonpool.Store, "list", lambda *_, **__: [])
    assert store.get_size(key) == 5
    (one,) = store.get_replica_desc(key)
    assert one.get_memory_descriptor().buffer_descriptor.size == 5


def test_a_handle_is_a_pinned_buffer(store: Any, key: str) -> None:
    store.put(key, b"some bytes")
    (held,) = store.batch_get_buffer([key])
    assert held.size() == len(held) == 10
    assert held
    assert bytes(held) == bytes(memoryview(held)) == b"some bytes"
    assert memoryview(held).readonly
    assert np.frombuffer(held, np.uint8).ctypes.data == held.ptr()
    store.remove(key)
    assert bytes(held) == b"some bytes"
    assert "10 bytes" in repr(held)


# ---- memory


def test_from_memory_and_into_memory(store: Any, buffer: Any, keys: Keys) -> None:
    one, other, none = keys(3)
    start = buffer.ctypes.data
    assert store.put_from(one, start, 4096) == 0
    assert store.batch_put_from([one, other], [start, start + 4096], [4096, 1000]) == [0, 0]
    into = np.zeros(8192, np.uint8)
    assert store.batch_get_into([one, none, other], [into.ctypes.data] * 3, [4096, 4096, 1000]) == [
        4096,
        MISS,
        1000,
    ]
    assert store.get_into(one, into.ctypes.data, 8192) == 4096  # a larger buffer is fine
    assert (into[:4096] == buffer[:4096]).all()
    assert store.get_into(none, into.ctypes.data, 10) == MISS
    assert store.upsert_from(one, start + 5000, 100) == 0
    assert store.batch_upsert_from([other], [start + 6000], [50]) == [0]
    assert store.get(one) == buffer[5000:5100].tobytes()
    assert store.get(other) == buffer[6000:6050].tobytes()


def test_a_small_buffer_is_left_alone(store: Any, buffer: Any, keys: Keys) -> None:
    one, other = keys(2)
    start = buffer.ctypes.data
    assert store.batch_put_from([one, other], [start, start], [100, 200]) == [0, 0]
    into = np.zeros(300, np.uint8)
    place = into.ctypes.data
    assert store.get_into(one, place, 99) == BAD
    assert not into.any()
    assert store.batch_get_into([one, other], [place, place + 100], [100, 199]) == [100, BAD]
    assert (into[:100] == buffer[:100]).all()
    assert not into[100:].any()


def test_metadata_comes_first(store: Any, buffer: Any, key: str) -> None:
    start = buffer.ctypes.data
    assert store.put_from_with_metadata(key, start, start + 100, 10, 4) == 0
    assert store.get(key) == buffer[100:104].tobytes() + buffer[:10].tobytes()
    assert store.put_from_with_metadata(key, start, 0, 10, 4) == BAD


def test_addresses_that_are_none(store: Any, buffer: Any, keys: Keys) -> None:
    """Codes, each for its own key; no crash."""
    names = keys(5)
    start = buffer.ctypes.data
    pointers = [start, 0, 12345, (1 << 47) - 8, start]
    sizes = [10, 10, 10, 100, 0]
    assert store.batch_put_from(names, pointers, sizes) == [0, BAD, BAD, BAD, BAD]
    assert store.batch_is_exist(names) == [1, 0, 0, 0, 0]
    assert store.batch_get_into(names[:1] * 5, pointers, sizes) == [10, BAD, BAD, BAD, BAD]
    assert store.put_from(names[1], start, 1 << 62) == BAD
    with pytest.raises(TypeError):
        store.put_from(names[1], -1, 10)
    with pytest.raises(TypeError):
        store.put_from(names[1], 1.5, 10)
    assert store.batch_put_from(names, [start], [10]) == [BAD] * 5
    assert store.batch_get_into(names, [start], [10]) == [BAD] * 5
    assert store.batch_put_from([], [], []) == store.batch_get_into([], [], []) == []


def test_memory_that_the_cpu_may_not_touch(
    store: Any, key: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a GPU's, which is reserved in this process and no more."""
    monkeypatch.setattr("mooncake._codes._said", {})
    size = 4 * mmap.PAGESIZE
    reserved, constant = mmap.mmap(-1, size), mmap.mmap(-1, size)
    places = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (reserved, constant)]
    libc = ctypes.CDLL(None)
    for place, rights in zip(places, (0, mmap.PROT_READ), strict=True):
        assert libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(size), rights) == 0
    try:
        assert store.put_from(key, places[0], size) == BAD
        assert "GPU" in caplog.text
        assert store.put_from(key, places[1], size) == 0
        for place in places:
            assert store.get_into(key, place, size) == BAD
            assert store.batch_get_into_multi_buffers([key], [[place, place + 100]], [[100, 200]]) == [BAD]
            assert store.register_buffer(place, size) == BAD
            assert TransferEngine().register_memory(place, size) < 0
        # The middle of it: both ends are good memory.
        libc.mprotect(ctypes.c_void_p(places[1]), ctypes.c_size_t(mmap.PAGESIZE), 3)
        libc.mprotect(ctypes.c_void_p(places[1] + size - mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 3)
        assert store.get_into(key, places[1], size) == BAD
        assert store.get_into(key, places[1], mmap.PAGESIZE) == BAD  # too small
    finally:
        for place in places:
            libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(size), 3)


def test_where_a_sandbox_forbids_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the kernel's table of mappings has to do."""

    def forbidden(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(_memory._libc, "process_vm_readv", forbidden)
    array = np.zeros(100, np.uint8)
    _memory.check_memory(array.ctypes.data, 100)
    for address in (12345, 1):
        with pytest.raises(moonpool.InvalidArgument):
            _memory.check_memory(address, 100)


def test_numbers_of_numpy_are_numbers(store: Any, buffer: Any, keys: Keys) -> None:
    names = keys(2)
    pointers = buffer.ctypes.data + np.arange(2, dtype=np.uint64) * 100
    assert store.batch_put_from(names, list(pointers), [np.int64(100)] * 2) == [0, 0]
    assert store.get(names[1]) == buffer[100:200].tobytes()


def test_memory_need_not_be_registered(store: Any, key: str) -> None:
    array = np.arange(100, dtype=np.uint8)
    assert store.put_from(key, array.ctypes.data, 100) == 0
    assert store.get_into(key, array.ctypes.data, 100) == 100


def test_registering(store: Any) -> None:
    array = np.zeros(10_000, np.uint8)
    start = array.ctypes.data
    assert store.register_buffer(start, 5000) == 0
    assert store.register_buffer(start, 5000) == BAD
    assert store.register_buffer(start + 4999, 10) == BAD
    assert store.register_buffer(start + 5000, 5000) == 0
    assert store.register_buffer(start + 10_000, 0) == BAD
    assert store.register_buffer(0, 10) == BAD
    assert store.unregister_buffer(start) == 0
    assert store.unregister_buffer(start) == BAD
    assert store.register_buffer(start, 5000) == 0
    assert store.unregister_buffer(start) == store.unregister_buffer(start + 5000) == 0


def test_the_host_allocator() -> None:
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(10_000)
    assert address % 4096 == 0
    assert address > 0
    assert allocator.free(address) == 0
    assert allocator.free(address) == BAD
    assert allocator.alloc(0) == 0
    assert allocator.alloc(1 << 60) == 0
    with pytest.raises(TypeError):
        allocator.alloc("1")


def test_memory_of_the_pool_of_a_store(store: Any, key: str) -> None:
    address = store.alloc_from_mem_pool(4096)
    assert store.put_from(key, address, 4096) == 0
    assert store.get(key) == bytes(4096)
    assert MooncakeHostMemAllocator().free(address) == 0


# ---- what is there


def test_exist(store: Any, keys: Keys) -> None:
    one, none = keys(2)
    store.put(one, b"x")
    assert store.is_exist(one) == 1
    assert store.is_exist(none) == 0
    assert store.batch_is_exist([one, none, one]) == [1, 0, 1]
    assert store.batch_is_exist([]) == []
    assert store.is_exist("") == 0


def test_remove(store: Any, keys: Keys) -> None:
    one, other, none = keys(3)
    store.put_batch([one, other], [b"x", b"y"])
    held = store.get_buffer(one)
    assert store.remove(one) == 0
    assert store.remove(one, True) == MISS
    assert bytes(held) == b"x"
    assert store.batch_remove([other, none], force=True) == [0, MISS]
    assert store.batch_remove([]) == []


def test_remove_by_regex(store: Any, key: str) -> None:
    for i in range(3):
        store.put(f"{key}/{i}/end", b"x")
    store.put(f"{key}-other", b"x")
    assert store.remove_by_regex("/1/") == 1
    assert store.remove_by_regex(f"^{key}/.*end$") == 2
    assert store.is_exist(f"{key}-other") == 1
    assert store.remove_by_regex("(") == BAD
    assert store.remove_by_regex("") == BAD
    assert store.remove_by_regex("no such key") == 0
    # Nothing but the caller's own text is looked at: a long name's digest is none of it.
    long = key + "n" * 2000
    assert store.put(long, b"x") == 0
    assert store.remove_by_regex("sha256|n[0-9a-f]*[0-9a-f]$(?<!n)|#") == 0
    assert store.remove_by_regex(f"^{key}n+$") == 1


def test_remove_all_counts(make_store: Any, keys: Keys) -> None:
    alone = make_store(tenant_id="remove-all")
    names = keys(20)
    alone.put_batch(names, [b"x"] * 20)
    assert alone.remove_all(force=True) == 20
    assert alone.batch_is_exist(names) == [0] * 20
    assert alone.remove_all() == 0


def test_an_object_larger_than_the_old_local_buffer(store: Any, key: str) -> None:
    """There it came back empty."""
    data = np.random.default_rng(2).integers(0, 256, 5 * MIB, np.uint8)
    assert store.put(key, data) == 0
    assert store.get(key) == data.tobytes()
    assert store.remove(key) == 0


def test_a_hard_pin_keeps_it(make_store: Any, keys: Keys) -> None:
    small = make_store(8 * MIB, tenant_id="hard-pin")
    pinned, *others = keys(40)
    config = ReplicateConfig()
    config.with_hard_pin = True
    assert small.put(pinned, bytes(MIB), config) == 0
    for name in others:
        assert small.put(name, bytes(MIB)) == 0
    assert small.is_exist(pinned) == 1
    assert small.is_exist(others[0]) == 0
    assert small.remove(pinned) == 0
    assert until(lambda: small.put(others[0], bytes(MIB)) == 0)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("act", ["remove", "upsert"])
def test_a_hard_pin_ends_with_its_object(
    make_store: Any, keys: Keys, act: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes or replaces it: its bytes may go, at the latest when the pool is full."""
    monkeypatch.setattr("mooncake._pins.LOOK_S", 3600.0 if full else 0.01)
    tenant = f"pins-{act}-{full}"
    owner, other = make_store(8 * MIB, tenant_id=tenant), make_store(0, tenant_id=tenant)
    config = ReplicateConfig()
    config.with_hard_pin = True
    names = keys(16)
    codes = [owner.put(name, bytes(MIB), config) for name in names]
    held = [name for name, code in zip(names, codes, strict=True) if code == 0]
    assert set(codes) == {0, -200}
    assert owner.remove(held.pop()) == 0  # room for what comes in place of the others
    assert owner.put(f"{held[0]}-new", bytes(2 * MIB)) == -200
    for name in held:
        assert until(lambda name=name: other.is_exist(name)) == 1
        if act == "remove":
            assert until(lambda name=name: other.remove(name) == 0)
        else:
            assert until(lambda name=name: other.upsert(name, b"small") == 0)
    store = owner if full else other
    assert until(lambda: store.put(f"{held[0]}-new", bytes(2 * MIB)) == 0)
    if act == "upsert":
        assert owner.get(held[0]) == b"small"


def test_a_pin_that_fails_is_the_code_of_its_key(
    store: Any, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, third = keys(3)
    real = moonpool.Store.exists

    def exists(self: Any, names: Any, **more: Any) -> Any:
        if names == [other.encode()] and more:
            raise moonpool.Timeout("nobody answers")
        return real(self, names, **more)

    monkeypatch.setattr(moonpool.Store, "exists", exists)
    config = ReplicateConfig()
    config.with_hard_pin = True
    assert store.put_batch([one, other, third], [b"x"] * 3, config) == -901
    assert store._put("put", [one, other, third], [b"x"] * 3, config) == [0, -901, 0]
    assert store.batch_remove([one, other, third]) == [0, 0, 0]
