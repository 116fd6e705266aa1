"""Multi-buffer forms, ranges of objects, and sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mooncake.store import ReplicateConfig

from moonpool import InvalidArgument

Keys = Callable[[int], list[str]]
MISS, BAD = -704, -600
SOURCE = np.arange(10_000, dtype=np.uint32).view(np.uint8)
START = SOURCE.ctypes.data


def test_many_buffers_make_one_object(store: Any, keys: Keys) -> None:
    one, other, none = keys(3)
    pieces = [[START, START + 100, START + 50], [START + 7]]
    sizes = [[10, 20, 30], [5]]
    assert store.batch_put_from_multi_buffers([one, other], pieces, sizes) == [0, 0]
    assert store.get(one) == b"".join(
        SOURCE[at : at + n].tobytes() for at, n in ((0, 10), (100, 20), (50, 30))
    )
    into = np.zeros(100, np.uint8)
    at = into.ctypes.data
    answer = store.batch_get_into_multi_buffers(
        [one, none, other], [[at + 40, at], [at], [at + 80]], [[40, 20], [9], [5]]
    )
    assert answer == [60, MISS, 5]
    whole = store.get(one)
    assert into[40:80].tobytes() == whole[:40]
    assert into[:20].tobytes() == whole[40:]
    assert into[80:85].tobytes() == SOURCE[7:12].tobytes()
    assert store.batch_get_into_multi_buffers([one], [[at]], [[60]], prefer_alloc_in_same_node=True) == [60]


@pytest.mark.parametrize("registered", [0, 1, 3])
def test_buffers_in_several_registrations(store: Any, keys: Keys, registered: int) -> None:
    """As engines have them: a buffer for each layer. Some, all or none of them are registered."""
    layers = [np.random.default_rng(i).integers(0, 256, 4096, np.uint8) for i in range(3)]
    starts = [layer.ctypes.data for layer in layers]
    for start in starts[:registered]:
        assert store.register_buffer(start, 4096) == 0
    names = keys(4)
    pointers = [[start + 1000 * i for start in starts] for i in range(4)]
    sizes = [[1000] * 3] * 4
    assert store.batch_put_from_multi_buffers(names, pointers, sizes) == [0] * 4
    for i, name in enumerate(names):
        assert store.get(name) == b"".join(layer[1000 * i : 1000 * (i + 1)].tobytes() for layer in layers)
    before = [layer.copy() for layer in layers]
    for layer in layers:
        layer[:] = 0
    assert store.batch_get_into_multi_buffers(names, pointers, sizes) == [3000] * 4
    for layer, old in zip(layers, before, strict=True):
        assert (layer[:4000] == old[:4000]).all()
        assert not layer[4000:].any()
    # One of the keys has a buffer that is too small, or lists that differ: its own code, the others' bytes.
    for bad in ([1000, 1000, 999], [1000, 1000]):
        answer = store.batch_get_into_multi_buffers(names, pointers, [bad, *sizes[1:]])
        assert answer == [BAD, 3000, 3000, 3000]
    (new,) = keys(1)
    assert store.batch_put_from_multi_buffers([names[0], new], pointers[:2], [[1000] * 2, [1000] * 3]) == [
        BAD,
        0,
    ]
    with pytest.raises(TypeError):
        store.batch_put_from([new], [[starts[0]]], [[10]])
    with pytest.raises(TypeError):
        store.batch_put_from_multi_buffers([new], starts[:1], [10])
    for start in starts[:registered]:
        assert store.unregister_buffer(start) == 0


def test_bad_buffers_are_a_code_of_their_own_key(store: Any, keys: Keys) -> None:
    one, other = keys(2)
    assert store.batch_put_from_multi_buffers([one, other], [[START, 0], [START]], [[1, 1], [1]]) == [BAD, 0]
    assert store.batch_put_from_multi_buffers([one], [[START, START]], [[1]]) == [BAD]
    assert store.batch_put_from_multi_buffers([one, other], [[START]], [[1]]) == [BAD, BAD]
    assert store.batch_put_from_multi_buffers([one], [[]], [[]]) == [BAD]
    assert store.is_exist(one) == 0
    into = np.zeros(10, np.uint8)
    at = into.ctypes.data
    assert store.batch_put_from_multi_buffers([one], [[START]], [[8]]) == [0]
    assert store.batch_get_into_multi_buffers([one, other], [[at, at + 4], [at + 9]], [[4, 3], [1]]) == [
        BAD,
        1,
    ]
    assert store.batch_get_into_multi_buffers([one], [[at, 0]], [[4, 4]]) == [BAD]
    assert store.batch_get_into_multi_buffers([one], [[at]], [[4, 4]]) == [BAD]


def test_a_read_session(store: Any, keys: Keys) -> None:
    one, other, none = keys(3)
    store.put_batch([one, other], [b"0123456789", b"abcdef"])
    assert store.batch_get_session_start([one, none]) == [0, MISS]
    into = np.zeros(20, np.uint8)
    at = into.ctypes.data
    store.remove(one)  # the session has it
    got = store.batch_get_into_multi_buffer_ranges(
        [one, other], [[at, at + 5], [at]], [[3, 2], [1]], [[7, 0], [0]]
    )
    assert got == [5, BAD]
    assert into[:7].tobytes() == b"789\0\x0001"
    assert store.batch_get_into_multi_buffer_ranges([one], [[at]], [[4]], [[7]]) == [BAD]
    assert store.batch_get_into_multi_buffer_ranges([one], [[0]], [[4]], [[0]]) == [BAD]
    assert store.batch_get_into_multi_buffer_ranges([one], [[at]], [[4]], []) == [BAD]
    assert store.batch_get_session_end([one, none]) == 0
    assert store.batch_get_into_multi_buffer_ranges([one], [[at]], [[1]], [[0]]) == [BAD]


def test_ranges_of_many_objects(store: Any, keys: Keys) -> None:
    one, other, none = keys(3)
    store.put_batch([one, other], [b"0123456789", b"abcdef"])
    first, second = np.zeros(32, np.uint8), np.zeros(32, np.uint8)
    answer = store.get_into_ranges(
        [first.ctypes.data, second.ctypes.data],
        [[one, none], [other]],
        [[[0, 10], [20]], [[3]]],
        [[[0, 5], [0]], [[2]]],
        [[[2, 3], [1]], [[4]]],
    )
    assert answer == [[[2, 3], [MISS]], [[4]]]
    assert first[:2].tobytes() + first[10:13].tobytes() == b"01567"
    assert second[3:7].tobytes() == b"cdef"
    outside = store.get_into_ranges([first.ctypes.data], [[one]], [[[0]]], [[[8]]], [[[3]]])
    assert outside == [[[BAD]]]
    with pytest.raises(InvalidArgument, match="different lengths"):
        store.get_into_ranges([first.ctypes.data], [[one]], [[[0]]], [[[0]]], [])


def test_a_range_stays_in_its_buffer(store: Any, keys: Keys) -> None:
    """Neither before it nor, where it is registered, behind it."""
    (one,) = keys(1)
    assert store.put(one, b"01234567") == 0
    into = np.zeros(64, np.uint8)
    start = into.ctypes.data + 16

    def into_ranges(target: Any) -> Any:
        return store.get_into_ranges([start], [[one]], [[[target]]], [[[0]]], [[[8]]])

    assert store.register_buffer(start, 16) == 0
    for target in (-16, -1, 1.5, "0", None):
        with pytest.raises(TypeError):
            into_ranges(target)
    assert [into_ranges(target) for target in (9, 16, 1 << 62, 1 << 64)] == [[[[BAD]]]] * 4
    assert not into.any()
    assert into_ranges(np.int64(8)) == [[[8]]]
    assert into[24:32].tobytes() == b"01234567"
    assert store.unregister_buffer(start) == 0


def test_what_was_checked_is_what_is_used(store: Any, keys: Keys) -> None:
    """Another thread may change the caller's lists at any time; here an item does when it is looked at."""
    ranges = store._buffers
    addresses, lengths = [START, START + 8], [8, 8]
    assert store.register_buffer(START, 1000) == 0
    try:
        pairs = ranges.check_all(addresses, lengths)
        (columns,) = ranges.check_lists([addresses], [lengths])
        addresses[:], lengths[:] = [16, 16], [1 << 40]
        assert pairs == [(START, 8), (START + 8, 8)]
        assert columns == ([START, START + 8], [8, 8])
    finally:
        assert store.unregister_buffer(START) == 0

    class Offset(int):
        def __index__(self) -> int:
            offsets[0] = 2
            return 0

        __int__ = __index__

    (one,) = keys(1)
    assert store.put(one, b"01234567") == 0
    into = np.zeros(8, np.uint8)
    assert store.batch_get_session_start([one]) == [0]
    offsets = [4, Offset()]
    at = into.ctypes.data
    assert store.batch_get_into_multi_buffer_ranges([one], [[at, at + 4]], [[4, 4]], [offsets]) == [8]
    assert into.tobytes() == b"45670123"
    assert store.batch_get_session_end([one]) == 0


def test_an_end_that_fails_can_be_tried_again(store: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after -200, when there is no room at the moment: the bytes are still there."""
    assert store.batch_put_session_start([key], [10]) == [0]
    assert store.batch_put_from_multi_buffer_ranges([key], [[START]], [[10]], [[0]]) == [10]
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "_put", lambda *_: [-200])
        assert store.batch_put_session_end([key]) == [-200]
    assert store.batch_put_session_end([key]) == [0]
    assert store.get(key) == SOURCE[:10].tobytes()
    assert store.batch_put_session_end([key]) == [BAD]


def test_a_write_session(store: Any, keys: Keys) -> None:
    one, other = keys(2)
    assert store.batch_put_session_start([one, other], [20, 10]) == [0, 0]
    assert store.batch_put_session_start([one], [20]) == [BAD]
    assert store.batch_put_session_start([one, other], [20]) == [BAD, BAD]
    ranges = ([one], [[START, START + 10]], [[10, 10]], [[10, 0]])
    assert store.batch_put_from_multi_buffer_ranges(*ranges) == [20]
    assert store.batch_put_from_multi_buffer_ranges([one], [[START]], [[10]], [[15]]) == [BAD]
    assert store.batch_put_from_multi_buffer_ranges([one], [[0]], [[10]], [[0]]) == [BAD]
    assert store.batch_put_from_multi_buffer_ranges(["none"], [[START]], [[10]], [[0]]) == [BAD]
    assert store.is_exist(one) == 0  # nobody sees what is not whole
    assert store.batch_put_session_end([one, "none"]) == [0, BAD]
    assert store.get(one) == SOURCE[10:20].tobytes() + SOURCE[:10].tobytes()
    assert store.batch_put_session_revoke([other, "none"]) == [0, BAD]
    assert store.is_exist(other) == 0
    assert store.batch_put_session_end([other]) == [BAD]


def test_groups_of_a_session(store: Any, keys: Any) -> None:
    names = keys(3)
    config = ReplicateConfig()
    config.group_ids = ["one", "two"]
    assert store.batch_put_session_start(names[:2], [4, 4], config) == [0, 0]
    assert store.batch_put_session_end(names[:2]) == [0, 0]
    assert all(store._access.store().stat(name).copies[0].grouped for name in names[:2])
    assert store.batch_put_session_start(names, [4] * 3, config) == [-600] * 3
