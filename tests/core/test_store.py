"""The verbs of Store over an embedded node: what they answer, and what they refuse with which words."""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool import EXISTS, STORED, Presence, Store, _native
from moonpool.core.config.native_settings import node_settings
from moonpool.core.errors import Closed, Error, InvalidArgument, Unavailable
from moonpool.core.store.types import PutStatus

from .store_bed import MIB, TOKEN, Tensor

ARENA = 16 * MIB
PATIENCE_S = 30.0  # a machine that pauses is no node that does not answer


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(embedded=ARENA, timeout_s=PATIENCE_S) as store:
        yield store
        assert is_sound(store)


def is_sound(store: Store) -> bool:
    assert store._server is not None
    return store._server.check_integrity()


def gauge(store: Store, name: str) -> int:
    return store.stat()[name]


# ---- one key, many keys


def test_one_key_or_a_list_of_keys(store: Store) -> None:
    assert store.put("one", b"1") == STORED
    assert store.put(["two", b"three"], [b"22", bytearray(b"333")]) == [STORED, STORED]
    assert store.get("one") == b"1"
    views = store.get([b"one", "absent", "three"])
    assert [None if view is None else bytes(view) for view in views] == [b"1", None, b"333"]
    assert store.exists("one") is Presence.HIT
    assert store.exists(["one", "absent"]) == [Presence.HIT, Presence.MISS]
    assert store.remove("one") is True
    assert store.remove(["one", "two"]) == [False, True]
    assert store.exists("two") is Presence.MISS
    assert store.put([], []) == []
    assert store.get([]) == []
    assert store.exists([]) == []
    assert store.longest_prefix([]).blocks == 0


def test_str_keys_are_utf8(store: Store) -> None:
    store.put("Schlüssel", b"x")
    assert store.get("Schlüssel".encode()) == b"x"


def test_a_view_is_read_only_memory_of_the_arena(store: Store) -> None:
    store.put("k", b"abcdef")
    view = store.get("k")
    assert view is not None
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    assert np.frombuffer(view, np.uint8).tolist() == list(b"abcdef")
    part = view[2:4]
    del view
    gc.collect()
    assert gauge(store, "pins") == 1  # the slice keeps the pin
    del part
    assert gauge(store, "pins") == 0


def test_a_second_put_of_a_key_changes_nothing(store: Store) -> None:
    assert store.put("k", b"first") == STORED
    assert store.put("k", b"second") == EXISTS
    assert store.get("k") == b"first"
    assert gauge(store, "stored_total") == 1


def test_a_key_twice_in_one_call(store: Store) -> None:
    assert store.put(["k", "k"], [b"first", b"second"]) == [STORED, EXISTS]
    assert store.get("k") == b"first"
    assert store.put(["k", "k"], [b"third", b"fourth"], replace=True) == [STORED, STORED]
    assert [bytes(view or b"") for view in store.get(["k", "k"])] == [b"fourth", b"fourth"]
    assert store.remove(["k", "k"]) == [True, False]


def test_replace_makes_a_new_generation_and_pinned_readers_keep_theirs(store: Store) -> None:
    store.put("k", b"old")
    old = store.get("k")
    (before,) = store.list("k")
    assert store.put("k", b"newer", replace=True) == STORED
    (after,) = store.list("k")
    assert after.generation > before.generation
    assert old == b"old"
    assert store.get("k") == b"newer"
    assert gauge(store, "objects_detached") == 1
    del old
    assert gauge(store, "objects_detached") == 0


def test_a_removed_object_stays_readable_under_its_pin(store: Store) -> None:
    store.put(["a", "b"], [b"aa", b"bb"])
    found, pin = store.exists(["a", "absent", "b"], pin=True)
    assert found == [Presence.HIT, Presence.MISS, Presence.HIT]
    assert pin is not None
    assert store.remove(["a", "b"]) == [True, True]
    assert store.get("a") is None
    assert store.get("a", pin=pin) == b"aa"
    assert store.get("absent", pin=pin) is None
    into = bytearray(4)
    assert store.get(["b"], [into], pin=pin) == [2]
    assert into[:2] == b"bb"
    store.release(pin)
    with pytest.raises(Closed, match="released"):
        store.get("a", pin=pin)
    pin.release()
    assert gauge(store, "objects_detached") == 0


def test_put_without_acknowledgement_is_seen_by_the_same_store(store: Store) -> None:
    for i in range(100):
        assert store.put(f"k{i}", bytes([i]), ack=False) == STORED
    assert store.longest_prefix([f"k{i}" for i in range(100)]).blocks == 100


# ---- sizes


@pytest.mark.parametrize(
    "empty", [b"", bytearray(), memoryview(b""), np.empty(0, np.float32), [], [b"", b""]]
)
def test_an_object_of_no_bytes(store: Store, empty: Any) -> None:
    assert store.put("k", empty) == STORED
    view = store.get("k")
    assert view is not None
    assert len(view) == 0
    assert store.get("k", bytearray()) == 0
    assert store.get("k", np.empty((0, 4))) == 0
    assert store.exists("k") is Presence.HIT
    assert store.get("k", verify=True) == b""


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4095, 4096, 4097, 131072, 131073, MIB, ARENA // 4])
def test_sizes_come_back_as_they_went(store: Store, rng: random.Random, size: int) -> None:
    data = rng.randbytes(size)
    assert store.put("k", data) == STORED
    assert store.get("k") == data
    into = bytearray(b"\xee" * (size + 3))
    assert store.get("k", into, verify=True) == size
    assert into == data + b"\xee" * 3


@pytest.mark.parametrize("size", [ARENA // 4 + 1, ARENA, ARENA + 1, 5 * ARENA])
def test_over_a_quarter_of_the_arena_is_refused_with_the_limit(store: Store, size: int) -> None:
    result = store.put("k", bytes(size))
    assert (result.status, result.replicas) == (PutStatus.REFUSED, 0)
    assert not result
    assert str(ARENA // 4) in result.reason
    assert str(size) in result.reason
    assert "node.object_share_max" in result.reason
    assert store.exists("k") is Presence.MISS
    assert store.put("k", b"small") == STORED


def test_a_refusal_does_not_spoil_its_neighbours(store: Store) -> None:
    results = store.put(["a", "b", "c"], [b"a", bytes(ARENA), b"c"])
    assert [result.status for result in results] == [PutStatus.STORED, PutStatus.REFUSED, PutStatus.STORED]
    assert store.get(["a", "b", "c"]) == [b"a", None, b"c"]


def test_sizes_that_overflow_are_no_small_object(store: Store) -> None:
    result = store.put("k", [(1 << 20, 1 << 63), (1 << 20, 1 << 63)])
    assert result.status is PutStatus.REFUSED


def test_keys_up_to_the_limit_and_over_it(store: Store) -> None:
    longest = b"k" * 1024
    assert store.put([longest, b"s"], [b"long", b"short"]) == [STORED, STORED]
    assert store.get(longest) == b"long"
    assert store.get(longest, bytearray(8)) == 4
    assert store.exists(longest) is Presence.HIT
    assert store.longest_prefix([longest, b"s"]).blocks == 2
    over = b"k" * 1025
    calls = (
        lambda: store.put(over, b"x"),
        lambda: store.put("child", b"x", parents=over),
        lambda: store.get(over),
        lambda: store.get(over, bytearray(1)),
        lambda: store.exists(over),
        lambda: store.longest_prefix(["s", over]),
        lambda: store.remove(over),
    )
    for call in calls:
        with pytest.raises(InvalidArgument, match="1025 bytes is over the limit of 1024"):
            call()
    assert store.list(over) == []
    assert store.remove(longest)


def test_an_empty_key_is_refused_by_every_verb(store: Store) -> None:
    calls = (
        lambda: store.put(b"", b"x"),
        lambda: store.put(["a", ""], [b"x", b"y"]),
        lambda: store.get(""),
        lambda: store.get("", bytearray(1)),
        lambda: store.exists([b"a", b""]),
        lambda: store.longest_prefix([""]),
        lambda: store.remove(""),
    )
    for call in calls:
        with pytest.raises(InvalidArgument, match="at least one byte"):
            call()
    assert gauge(store, "objects") == 0  # the good key of the bad call was not stored either


@pytest.mark.parametrize("key", [7, None, bytearray(b"k"), 1.5, ("k",)])
def test_a_key_is_bytes_or_str(store: Store, key: Any) -> None:
    with pytest.raises(InvalidArgument, match="key"):
        store.put([key], [b"x"])
    with pytest.raises(InvalidArgument, match="key"):
        store.exists([key])


def test_counts_must_agree(store: Store) -> None:
    with pytest.raises(InvalidArgument, match="2 keys came with 1 buffers"):
        store.put(["a", "b"], [b"x"])
    with pytest.raises(InvalidArgument, match="1 keys came with 2 buffers"):
        store.get(["a"], [bytearray(1), bytearray(1)])
    with pytest.raises(InvalidArgument, match="2 keys came with 1 parents"):
        store.put(["a", "b"], [b"x", b"y"], parents=["c"])
    assert gauge(store, "objects") == 0


def test_parts_are_gathered_and_scattered(store: Store, rng: random.Random) -> None:
    data = rng.randbytes(10_000)
    cuts = sorted(rng.randrange(10_001) for _ in range(20))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, 10_000], strict=True)]
    assert store.put("k", parts) == STORED
    assert store.get("k") == data
    into = [bytearray(len(part)) for part in reversed(parts)]
    assert store.get("k", into, verify=True) == 10_000
    assert b"".join(into) == data


def test_4096_parts_and_one_more(store: Store) -> None:
    assert store.put("k", [b"x"] * 4096) == STORED
    assert store.get("k") == b"x" * 4096
    with pytest.raises(InvalidArgument, match="4097 parts is over the limit of 4096"):
        store.put("more", [b"x"] * 4097)
    assert store.exists("more") is Presence.MISS


def test_a_pool_needs_a_mebibyte() -> None:
    with pytest.raises(InvalidArgument, match="under 1 MiB"):
        Store(embedded=1000)


# ---- buffers


def test_a_buffer_that_is_too_small_is_not_written(store: Store) -> None:
    store.put("k", b"x" * 100)
    into = bytearray(b"\xee" * 99)
    with pytest.raises(InvalidArgument, match=r"key k holds 99 bytes, the object has 100"):
        store.get("k", into)
    parts = [bytearray(b"\xee" * 50), bytearray(b"\xee" * 49)]
    with pytest.raises(InvalidArgument, match="99 bytes"):
        store.get("k", parts)
    long = b"l" * 100
    store.put(long, b"x" * 100)  # too long a name for the shared index: asked of the node
    with pytest.raises(InvalidArgument, match="99 bytes"):
        store.get(long, into)
    _, pin = store.exists(["k"], pin=True)
    with pytest.raises(InvalidArgument, match="99 bytes"):
        store.get("k", into, pin=pin)
    assert into == b"\xee" * 99
    assert b"".join(parts) == b"\xee" * 99


def test_read_only_memory_is_no_destination(store: Store) -> None:
    store.put("k", b"data")
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    for into in (bytes(4), memoryview(bytes(4)), frozen):
        with pytest.raises(InvalidArgument, match="writable"):
            store.get("k", into)
    assert frozen.tolist() == [0, 0, 0, 0]


def test_a_refused_buffer_leaves_the_others_free(store: Store) -> None:
    good = bytearray(4)
    with pytest.raises(InvalidArgument):
        store.get(["a", "b"], [good, bytes(4)])
    good.append(1)  # BufferError if the failed call still held it


def test_numpy_arrays_must_be_contiguous(store: Store) -> None:
    matrix = np.arange(100, dtype=np.int32).reshape(10, 10)
    assert store.put("k", matrix) == STORED
    into = np.empty_like(matrix)
    assert store.get("k", into) == 400
    assert (into == matrix).all()
    for strided in (matrix[:, ::2], matrix.T):
        with pytest.raises(InvalidArgument, match="contiguous"):
            store.put("strided", strided)
        with pytest.raises(InvalidArgument, match="contiguous"):
            store.get("k", strided)
    with pytest.raises(InvalidArgument, match="contiguous"):
        store.put("strided", memoryview(bytes(10))[::2])
    assert store.exists("strided") is Presence.MISS


def test_tensors_on_the_cpu(store: Store) -> None:
    tensor = Tensor(np.arange(64, dtype=np.float32))
    assert store.put("k", [tensor, b"tail"]) == STORED
    back = Tensor(np.zeros(65, np.float32))
    assert store.get("k", back) == 260
    assert (back.array[:64] == tensor.array).all()
    with pytest.raises(InvalidArgument, match="no CUDA driver of this process"):
        store.put("gpu", Tensor(tensor.array, "cuda"))
    with pytest.raises(InvalidArgument, match="contiguous"):
        store.put("strided", Tensor(tensor.array, contiguous=False))


def test_a_pair_of_lists_is_the_parts_of_one_object(store: Store) -> None:
    memory = ctypes.create_string_buffer(b"gathered and scattered", 22)
    at = ctypes.addressof(memory)
    assert store.put(["k", "l"], [([at, at + 12], [8, 10]), (at + 9, 3)]) == [STORED] * 2
    assert store.get("k") == b"gathered scattered"
    assert store.get("l") == b"and"
    into = ctypes.create_string_buffer(18)
    here = ctypes.addressof(into)
    assert store.get(["k"], [([here + 10, here], [8, 10])]) == [18]
    assert into.raw == b" scatteredgathered"
    assert store.put("empty", ([], [])) == STORED
    assert store.get("empty") == b""
    for bad in (([at], [1, 2]), ([at], ["1"]), ([None], [1]), ([-1], [1]), ([at], [2**64])):
        with pytest.raises(InvalidArgument, match=r"numbers|lengths"):
            store.put("bad", bad)


def test_exists_as_flags(store: Store) -> None:
    store.put("k", b"x")
    assert store.exist_flags(["k", "l", b"k"]) == b"\1\0\1"
    assert store.exist_flags([]) == b""
    with pytest.raises(InvalidArgument):
        store.exist_flags([5])  # type: ignore[list-item]
    other = Store(embedded=ARENA)
    other.close()
    with pytest.raises(Closed):
        other.exist_flags(["k"])


def test_an_address_and_a_length(store: Store) -> None:
    memory = ctypes.create_string_buffer(b"from an address", 15)
    assert store.put("k", (ctypes.addressof(memory), 15)) == STORED
    into = ctypes.create_string_buffer(15)
    assert store.get("k", [(ctypes.addressof(into), 5), (ctypes.addressof(into) + 5, 10)]) == 15
    assert into.raw == b"from an address"
    for bad in ((-1, 4), (1 << 64, 4), (4096, -4)):
        with pytest.raises(InvalidArgument, match="address"):
            store.put("bad", bad)


@pytest.mark.parametrize("thing", [7, "text", None, object(), {"a": 1}, (1, 2, 3)])
def test_what_is_no_buffer(store: Store, thing: Any) -> None:
    with pytest.raises(InvalidArgument, match="buffer"):
        store.put("k", thing)
    if thing is not None:  # which asks for a view
        with pytest.raises(InvalidArgument, match="buffer"):
            store.get("k", thing)


# ---- chains and eviction


def test_longest_prefix_stops_at_the_first_gap(store: Store) -> None:
    keys = [f"c{i}" for i in range(10)]
    store.put(keys[:4] + keys[5:], [b"x"] * 9)
    assert store.longest_prefix(keys).blocks == 4
    assert store.longest_prefix(keys[5:]).blocks == 5
    assert store.longest_prefix(["absent", *keys]).blocks == 0
    found = store.longest_prefix(keys, width=2)
    assert found.blocks == 2
    assert len(found.tiers) == len(found.holders) == len(found.hosts) == 2
    assert found.pin is not None
    assert store.get(keys[:4], pin=found.pin) == [b"x"] * 4
    assert store.longest_prefix(keys[:3], width=3).blocks == 1
    unpinned = store.longest_prefix(keys, pin=False)
    assert (unpinned.blocks, unpinned.pin) == (4, None)


@pytest.mark.parametrize(("width", "keys"), [(0, 4), (3, 4), (70_000, 4)])
def test_a_width_that_does_not_fit(store: Store, width: int, keys: int) -> None:
    with pytest.raises(InvalidArgument, match="width"):
        store.longest_prefix([f"k{i}" for i in range(keys)], width=width)


def test_eviction_is_least_recently_used_first(store: Store) -> None:
    size = ARENA // 256
    names = [f"k{i:03}" for i in range(200)]
    for name in names:
        store.put(name, bytes(size))
    used = [names[0], names[7], names[9]]
    store.longest_prefix(used[:1])
    assert store.get(used[1], bytearray(size)) == size  # read straight from memory: told to the node later
    assert store.get(used[2]) is not None
    store.stat()
    for i in range(150):
        assert store.put(f"new{i}", bytes(size)) == STORED
    gone = [name for name in names if not store.exists(name)]
    assert not set(gone) & set(used)
    assert gone == [name for name in names if name not in used][: len(gone)]
    assert len(gone) > 50
    assert gauge(store, "evicted_total") == len(gone)


def test_eviction_takes_a_chain_from_its_leaf(store: Store) -> None:
    size = ARENA // 256
    chain = [f"c{i}" for i in range(100)]
    store.put(chain, [bytes(size)] * 100, parents=[None, *chain[:-1]])
    for name in chain:  # the leaves are the most recently used ones now, and go first all the same
        store.longest_prefix([name])
    blocks = [100]
    for i in range(200):
        assert store.put(f"other{i}", bytes(size)) == STORED
        here = [bool(presence) for presence in store.exists(chain)]
        blocks.append(sum(here))
        assert here == [True] * blocks[-1] + [False] * (100 - blocks[-1])  # never a hole
    assert store.longest_prefix(chain, pin=False).blocks == blocks[-1]
    assert blocks[-1] < 90


def test_pins_hold_a_share_of_the_arena_and_puts_go_on(store: Store) -> None:
    names = [f"k{i}" for i in range(40)]
    held = []
    for name in names:
        assert store.put(name, bytes(MIB)) == STORED
        held.append(store.longest_prefix([name]))
    assert [prefix.blocks for prefix in held] == [1] * 12 + [0] * 28  # three quarters
    assert "node.pins_share_max" in held[-1].why
    assert gauge(store, "pinned_bytes") == 12 * MIB
    assert all(store.exists(names[:12]))
    assert gauge(store, "pins_refused_total") == 28
    held.clear()
    assert store.longest_prefix(names[-1:]).blocks == 1


def test_an_arena_full_of_pins_refuses_and_works_again_after_release(tmp_path: Path) -> None:
    server = _native.Server(
        str(tmp_path / "n.sock"), [("default", ARENA)], TOKEN, node_settings(pins_share_max=1.0)
    )
    server.start()
    with Store(str(tmp_path / "n.sock"), token=TOKEN, timeout_s=PATIENCE_S) as store:
        refuses_and_works_again(store)
    assert server.check_integrity()
    server.stop()


def refuses_and_works_again(store: Store) -> None:
    names = []
    held = []
    while (result := store.put(f"k{len(names)}", bytes(MIB))) == STORED:
        names.append(f"k{len(names)}")
        held.append(store.longest_prefix([names[-1]]))
        assert len(names) <= 16
    assert len(names) >= 12
    assert result.status is PutStatus.REFUSED
    assert "pinned" in result.reason
    assert "full" in result.reason
    assert store.get(names[0]) == bytes(MIB)  # reading goes on
    assert gauge(store, "lease_refused_total") >= 1
    for prefix in held:
        assert prefix.pin is not None
        prefix.pin.release()
    assert store.put("after", bytes(MIB)) == STORED
    assert gauge(store, "objects_pinned") == 0


# ---- many keys


@pytest.mark.parametrize("n", [16_384, 16_385, 20_000, 50_000])
def test_thousands_of_keys_in_a_call(n: int) -> None:
    with Store(embedded=256 * MIB) as store:
        keys = [f"key-{i:06}".encode() for i in range(n)]
        assert store.longest_prefix(keys).blocks == 0
        assert store.get(keys) == [None] * n
        assert store.get(keys, [bytearray(8)] * n) == [None] * n
        assert store.put(keys, [key[-6:] for key in keys]) == [STORED] * n
        assert store.put(keys, [b"other"] * n) == [EXISTS] * n
        assert all(store.exists(keys))
        views = store.get(keys)
        assert all(view == key[-6:] for view, key in zip(views, keys, strict=True))
        into = [bytearray(6) for _ in keys]
        assert store.get(keys, into) == [6] * n
        assert all(buffer == key[-6:] for buffer, key in zip(into, keys, strict=True))
        found = store.longest_prefix(keys)
        assert found.blocks == n
        assert found.pin is not None
        assert store.get([keys[0], keys[-1]], pin=found.pin) == [b"000000", keys[-1][-6:]]
        assert store.remove(keys[n - 2]) is True
        assert store.longest_prefix(keys).blocks == n - 2
        assert store.remove(keys[5]) is True
        assert store.longest_prefix(keys).blocks == 5
        assert sum(store.remove(keys)) == n - 2
        del views, found
        assert gauge(store, "pins") == 0
        assert is_sound(store)


def test_many_long_keys_fill_frames_by_their_bytes() -> None:
    with Store(embedded=64 * MIB) as store:
        keys = [f"{i:06}".encode() * 170 for i in range(10_000)]  # 1,020 bytes each: over 8 MiB together
        assert store.put(keys, [b"x"] * 10_000) == [STORED] * 10_000
        assert all(store.exists(keys))
        assert store.get(keys, [bytearray(1) for _ in keys]) == [1] * 10_000
        assert all(view == b"x" for view in store.get(keys))
        assert store.longest_prefix(keys).blocks == 10_000
        assert store.longest_prefix(keys, width=100).blocks == 100
        with pytest.raises(InvalidArgument, match="one block"):
            store.longest_prefix(keys, width=10_000)
        found, pin = store.exists(keys, pin=True)
        assert all(found)
        assert pin is not None
        assert sum(store.remove(keys)) == 10_000
        assert store.get(keys[9_999], pin=pin) == b"x"


def test_list_shows_objects_by_prefix(store: Store) -> None:
    store.put([f"a{i}" for i in range(30)], [bytes(i) for i in range(30)])
    store.put("b", b"bb")
    assert sorted(entry.key for entry in store.list("a1")) == sorted(
        [b"a1", *(f"a1{i}".encode() for i in range(10))]
    )
    assert {entry.key: entry.size for entry in store.list(b"")}[b"a29"] == 29
    assert len(store.list("a", limit=7)) == 7
    assert store.list("a", limit=0) == []
    assert store.list("absent") == []
    view = store.get("b")
    (entry,) = store.list("b")
    assert (entry.key, entry.size, entry.pins) == (b"b", 2, 1)
    assert view == b"bb"
    store.put([f"many{i}" for i in range(5000)], [b""] * 5000)
    assert len(store.list("many", limit=100_000)) <= 5000


def test_list_walks_over_several_answers() -> None:
    with Store(embedded=256 * MIB) as store:
        keys = {f"m{i}".encode() for i in range(10_000)}
        store.put(list(keys), [b"x"] * len(keys))
        rows = store.list("m", limit=100_000)
        assert len(rows) == len(keys)
        assert {entry.key for entry in rows} == keys
        assert len(store.list("m", limit=4_500)) == 4_500


# ---- spaces


def test_spaces_never_see_each_other(runtime_dir: Path) -> None:
    from moonpool import _native

    path = str(runtime_dir / "n.sock")
    server = _native.Server(path, [("default", 4 * MIB), ("other", 4 * MIB)], b"t", node_settings())
    server.start()
    spaces = [
        {},
        {"namespace": "n"},
        {"fingerprint": b"f"},
        {"namespace": "n", "fingerprint": b"f"},
        {"tenant": "other"},
        {"tenant": "other", "namespace": "n"},
    ]
    stores = [Store(path, token=b"t", **space) for space in spaces]  # type: ignore[arg-type]
    for i, store in enumerate(stores):
        assert store.exists("k") is Presence.MISS
        assert store.put("k", b"%d" % i) == STORED
    for i, store in enumerate(stores):
        assert store.get("k") == b"%d" % i
        assert len(store.list()) == 1
    twin = Store(path, token=b"t", namespace="n")
    assert twin.get("k") == b"1"
    assert twin.remove("k")
    assert stores[1].get("k") is None
    assert stores[3].get("k") == b"3"
    assert server.check_integrity()
    for store in [*stores, twin]:
        store.close()
    server.stop()


# ---- life of a handle


def test_every_call_after_close_raises(store: Store) -> None:
    other = Store(embedded=4 * MIB)
    other.put(["k", "p"], [b"kept", b"pinned"])
    view = other.get("k")
    pin = other.longest_prefix(["p"]).pin
    other.close()
    other.close()
    calls = (
        lambda: other.put("k", b"x"),
        lambda: other.get("k"),
        lambda: other.get("k", bytearray(4)),
        lambda: other.get("p", pin=pin),
        lambda: other.exists("k"),
        lambda: other.exists(["k"], pin=True),
        lambda: other.longest_prefix(["k"]),
        lambda: other.remove("k"),
        lambda: other.list(),
        lambda: other.stat(),
    )
    for call in calls:
        with pytest.raises(Closed, match="closed"):
            call()
    assert not other.connected
    assert pin is not None
    pin.release()
    assert view == b"kept"


def test_open_without_a_node_says_how_to_start_one(runtime_dir: Path) -> None:
    with pytest.raises(Unavailable, match="moonpool node") as caught:
        Store()
    assert caught.value.operation == "connect"
    assert caught.value.peer == str(runtime_dir / "node.sock")
    assert isinstance(caught.value, ConnectionError)
    with pytest.raises(InvalidArgument, match="longer than a Unix socket allows"):
        Store("/tmp/" + "x" * 200)


def test_arguments_of_open(runtime_dir: Path) -> None:
    with pytest.raises(InvalidArgument, match="not both"):
        Store("somewhere", embedded=MIB)
    for timeout_s in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidArgument, match="timeout_s"):
            Store(embedded=4 * MIB, timeout_s=timeout_s)
    for timeout_s in (1e-9, 1e12, float("inf")):
        with Store(embedded=4 * MIB, timeout_s=max(timeout_s, 1.0)) as store:
            assert store.put("k", b"x") == STORED
    with Store(embedded="4MiB") as store:
        assert store.put("k", b"x", timeout_s=1e12) == STORED
        for replicas in (0, -1, 17):
            with pytest.raises(InvalidArgument, match="replicas"):
                store.put("k", b"x", replicas=replicas)
        # One node keeps one copy, and says so.
        result = store.put("two", b"x", replicas=2)
        assert (result.status, result.replicas) == (PutStatus.STORED, 1)
        assert "no other nodes" in result.reason


def test_errors_are_one_family() -> None:
    with pytest.raises(Error), Store(embedded=4 * MIB) as store:
        store.put("", b"")
