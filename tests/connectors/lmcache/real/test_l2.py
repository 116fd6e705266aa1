"""The plug points of LMCache's server, through LMCache's own factory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lmcache.v1.distributed.api import ipc_key_to_object_keys
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

from moonpool.connectors.lmcache.adapter import parse_wire_key, wire_key
from moonpool.connectors.lmcache.locks import HELD_S, UNASKED_S
from moonpool.core.errors import ConfigError, Unavailable
from tests.connectors.lmcache.real.l2 import BY_NAME, BY_PATH, L2, NATIVE, SHAPE, L2Process, key
from tests.connectors.own_node import Node
from tests.core.store_bed import until

SIZE = SHAPE.numel() * 2
WAYS = pytest.mark.parametrize(
    "spec", [BY_NAME, BY_PATH, NATIVE], ids=["moonpool", "plugin", "native_plugin"]
)
WITH_PINS = pytest.mark.parametrize("spec", [BY_NAME, {**BY_NAME, "form": "bf16"}], ids=["layouts", "form"])
Make = Callable[[dict[str, Any]], L2]


@pytest.fixture
def make(node: Node) -> Iterator[Make]:
    made: list[L2] = []

    def make(spec: dict[str, Any]) -> L2:
        made.append(L2(spec))
        return made[-1]

    yield make
    for adapter in made:
        adapter.close()


@pytest.fixture(scope="module")
def process() -> Iterator[L2Process]:
    """LMCache takes seconds to import."""
    process = L2Process()
    yield process
    process.kill()


@WAYS
def test_two_processes_share(spec: dict[str, Any], node: Node, make: Make, process: L2Process) -> None:
    node.start()
    adapter = make(spec)
    process.open(spec)
    assert process.call("lookup", [1, 2, 3]) == [False] * 3
    assert process.call("store", [1, 2, 3])[0] is True
    assert adapter.lookup([1, 9, 3]) == [True, False, True]
    assert adapter.load([1, 9, 3]) == [True, False, True]
    adapter.unlock([1, 9, 3])
    assert adapter.store([2, 4])[0] is True
    assert process.call("lookup", [2, 4]) == [True, True]
    assert process.call("load", [2, 4]) == [True, True]
    adapter.delete([2, 4])
    assert adapter.lookup([1, 2, 3, 4]) == [True, False, True, False]
    fds = {
        adapter.adapter.get_store_event_fd(),
        adapter.adapter.get_lookup_and_lock_event_fd(),
        adapter.adapter.get_load_event_fd(),
    }
    assert len(fds) == 3
    assert adapter.adapter.report_status()["is_healthy"]


def test_the_native_client_and_the_adapter_share_one_form(node: Node, make: Make) -> None:
    node.start()
    native, adapter = make(NATIVE), make({**BY_NAME, "form": "bfloat16"})
    native.store([1])
    assert adapter.lookup([1]) == adapter.load([1]) == [True]
    adapter.store([2])
    assert native.lookup([2]) == native.load([2]) == [True]


# Locks are pins


@WITH_PINS
def test_what_is_locked_stays_until_it_is_unlocked(spec: dict[str, Any], node: Node, make: Make) -> None:
    node.start()
    adapter, remover = make(spec), make(spec)
    adapter.store([1, 2, 3])
    assert adapter.lookup([1, 2, 3]) == [True] * 3
    assert node.pinned() == 3
    assert remover.lookup([1]) == [True]  # tells it the layout, too
    remover.unlock([1])
    remover.delete([1, 2, 3])
    assert remover.lookup([1, 2, 3]) == [False] * 3
    assert adapter.load([1, 2, 3]) == [True] * 3  # readable under its lock, though removed
    adapter.unlock([1, 2])
    assert node.pinned() == 3
    adapter.unlock([3])
    until(lambda: node.pinned() == 0)
    assert adapter.load([1, 2, 3]) == [False] * 3


@WITH_PINS
def test_nothing_that_is_locked_is_evicted(spec: dict[str, Any], node: Node, make: Make) -> None:
    node.start(size=2 << 20)
    adapter = make(spec)
    adapter.store([1, 2])
    assert adapter.lookup([1, 2]) == [True, True]
    for number in range(100, 500, 10):
        adapter.store(range(number, number + 10))
    assert adapter.load([1, 2]) == [True, True]
    adapter.unlock([1, 2])
    for number in range(500, 900, 10):
        adapter.store(range(number, number + 10))
    assert adapter.lookup([1, 2]) == [False, False]


def test_the_locks_of_the_dead_end_and_its_chunks_stay(node: Node, make: Make) -> None:
    node.start()
    dying = L2Process()
    try:
        dying.open(BY_NAME).call("store", [1, 2])
        assert dying.call("lookup", [1, 2]) == [True, True]
        assert node.pinned() == 2
    finally:
        dying.kill()
    until(lambda: node.pinned() == 0)
    again = make(BY_NAME)
    assert again.lookup([1, 2]) == again.load([1, 2]) == [True, True]


@WAYS
def test_a_restart_with_a_warm_pool(spec: dict[str, Any], node: Node, process: L2Process) -> None:
    node.start()
    assert process.open(spec).call("store", [1, 2, 3])[0] is True
    process.open(spec)
    assert process.call("lookup", [1, 2, 3, 4]) == process.call("load", [1, 2, 3, 4]) == [True] * 3 + [False]


def test_the_server_is_healthy_without_the_pool(node: Node, make: Make) -> None:
    status = make(BY_NAME).adapter.report_status
    assert (status()["is_healthy"], status()["pool_connected"]) == (True, False)
    node.start()
    until(lambda: status()["pool_connected"])


def test_close_ends_the_locks(node: Node) -> None:
    node.start()
    adapter = L2(BY_NAME)
    adapter.store([1])
    adapter.lookup([1])
    adapter.close()
    until(lambda: node.pinned() == 0)


def test_the_locks_of_a_lookup_that_was_given_up_end(node: Node, make: Make) -> None:
    """LMCache does not take its answer then, and unlocks nothing."""
    node.start()
    adapter = make(BY_NAME)
    adapter.store([1, 2, 3, 4])
    adapter.give_up([1, 2])
    until(lambda: node.pinned() == 2)
    assert adapter.lookup([3]) == [True]  # that lock is held
    since_s = time.monotonic()
    adapter.adapter._locks._now_s = lambda: since_s + UNASKED_S + 1
    assert adapter.lookup([9]) == [False]
    until(lambda: node.pinned() == 1)
    assert adapter.adapter.report_status()["expired_locks"] == 1
    assert adapter.load([1, 3]) == [True, True]
    adapter.unlock([1, 3])  # as who did not notice
    until(lambda: node.pinned() == 0)
    assert adapter.lookup([4]) == [True]
    adapter.adapter._locks._now_s = lambda: since_s + UNASKED_S + HELD_S + 2
    adapter.lookup([9])
    until(lambda: node.pinned() == 0)
    assert adapter.adapter.report_status()["expired_locks"] == 2


def test_an_object_larger_than_its_buffer_is_no_one_elses_miss(node: Node, make: Make) -> None:
    node.start()
    adapter = make({**BY_NAME, "form": "bf16"})
    adapter.store([1, 3])
    larger = L2({**BY_NAME, "form": "bf16"}, 2 * SHAPE[2])
    larger.store([2])
    larger.close()
    assert adapter.load([1, 2, 3]) == [True, False, True]
    assert adapter.lookup([1, 2, 3]) == [True, True, True]  # the key has no size
    assert adapter.load([1, 2, 3]) == [True, False, True]


# The same model, other bytes


def test_another_type_is_another_chunk(node: Node, make: Make) -> None:
    """bfloat16 and float16 have one size, and LMCache's key does not tell them apart."""
    node.start()
    first, second = make(BY_NAME), make(BY_NAME)
    first.store([1])
    assert second.lookup([1], "float16") == [False]
    assert second.load([1], "float16") == [False]
    second.store([1], "float16")
    assert second.lookup([1], "float16") == second.load([1], "float16") == [True]
    assert first.load([1]) == [True]
    assert node.objects() == 2
    native, other = make(NATIVE), make({**NATIVE, "adapter_params": {"form": "float16"}})
    native.store([1])
    assert other.lookup([1]) == other.load([1]) == [False]


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"model_name": "org/other"},
    "rank": {"kv_rank": 0x02000100},
    "worker": {"kv_rank": 0x02000101},
    "group": {"object_group_id": 1},
    "salt": {"cache_salt": "a"},
}


@WAYS
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_is_not_the_same_is_not_there(
    other: dict[str, Any], spec: dict[str, Any], node: Node, make: Make
) -> None:
    """Under one hash of the tokens; a group's bytes are of one size, too."""
    node.start()
    first, stranger = make(spec), L2(spec, keys=other)
    try:
        first.store([1])
        assert stranger.lookup([1]) == stranger.load([1]) == [False]
        stranger.store([1])
        assert node.objects() == 2
        assert stranger.lookup([1]) == stranger.load([1]) == first.load([1]) == [True]
        stranger.delete([1])
        assert stranger.lookup([1]) == [False]
        assert first.lookup([1]) == [True]
    finally:
        stranger.close()


def test_a_salt_is_what_keeps_adapters_apart() -> None:
    """The remedy for LoRA that docs/lmcache.md gives. LMCache's own way from a request to its keys: a salt
    counts, and a tag does not."""
    keys = []
    for salt, configs in (("", None), ("a", None), ("b", None), ("", {"lmcache.tag.lora": "a"})):
        told = IPCCacheServerKey.from_token_ids(
            "org/model", 1, 0, [1] * 16, end=16, cache_salt=salt, request_configs=configs
        )
        ((found,),) = ipc_key_to_object_keys(told, [b"12345678"], [0])
        keys.append(wire_key(found))
    plain, first, second, with_tag = keys
    assert plain == with_tag
    assert len({plain, first, second}) == 3


KEYS = [key(1), *(key(1, **other) for other in OTHERS.values()), key(2, object_group_id=17, cache_salt="ü %")]


def test_our_names_are_lmcaches() -> None:
    """What a native client is told by LMCache, the adapter makes itself: they share."""
    assert [wire_key(each) for each in KEYS] == [_object_key_to_string(each) for each in KEYS]
    assert [parse_wire_key(wire_key(each)).to_object_key() for each in KEYS] == KEYS
    assert len({wire_key(each) for each in KEYS}) == len(KEYS)


@WAYS
def test_another_chunk_size_is_another_chunk(spec: dict[str, Any], node: Node, make: Make) -> None:
    """Under one key, which no two chunk sizes have: LMCache hashes tokens."""
    node.start()
    first, larger, smaller = make(spec), L2(spec, 2 * SHAPE[2]), L2(spec, SHAPE[2] // 2)
    first.store([1])
    for other in (larger, smaller):
        other.lookup([1])  # the native client's has no size
        assert other.load([1]) == [False]
        other.close()
    assert first.load([1]) == [True]


def test_a_native_client_must_know_the_form(node: Node, make: Make) -> None:
    with pytest.raises(ConfigError, match="form"):
        make({**NATIVE, "adapter_params": {}})
    with pytest.raises(ValueError, match="serde"):
        make({**BY_NAME, "serde": {"type": "fp8"}})


def test_without_a_layout_those_that_were_seen_count(node: Node, make: Make) -> None:
    node.start()
    first, second = make(BY_NAME), make(BY_NAME)
    first.store([1])
    assert first.lookup([1], None) == [True]
    assert second.lookup([1], None) == [False]
    assert second.load([1]) == [True]
    assert second.lookup([1], None) == [True]


def test_types_of_one_byte_need_a_form(node: Node, make: Make) -> None:
    node.start()
    without = make(BY_NAME)
    assert without.store([1], "uint8")[0] is False
    assert without.lookup([1], "uint8") == without.load([1], "uint8") == [False]
    assert node.objects() == 0
    e4m3, e5m2 = make({**BY_NAME, "form": "fp8_e4m3"}), make({**BY_NAME, "form": "fp8_e5m2"})
    assert e4m3.store([1], "uint8")[0] is True
    assert e5m2.lookup([1], "uint8") == [False]
    assert e4m3.lookup([1], "uint8") == e4m3.load([1], "uint8") == [True]


# Books


def test_what_is_counted_and_listed(node: Node, make: Make) -> None:
    node.start()
    first, second = make(BY_NAME), make(BY_NAME)
    assert first.store([1, 2, 3]) == (True, 3 * SIZE)
    assert first.store([1, 4]) == (True, SIZE)
    assert first.adapter.get_usage().total_bytes_used == 0  # the pool evicts without telling
    assert first.adapter.get_usage().usage_fraction == -1.0  # no capacity: the pool evicts by itself
    assert second.lookup([4]) == [True]
    second.unlock([4])
    page = second.adapter.list_l2_keys("org/model", page_size=3)
    rest = second.adapter.list_l2_keys("org/model", page_size=3, cursor=page.next_page_token)
    assert rest.next_page_token is None
    listed = [*page.entries, *rest.entries]
    assert [entry.key.to_object_key() for entry in listed] == [key(number) for number in (1, 2, 3, 4)]
    assert {entry.size_bytes for entry in listed} == {SIZE}
    assert second.adapter.list_l2_keys("other").entries == ()
    with pytest.raises(ValueError, match="page_size"):
        second.adapter.list_l2_keys(page_size=0)
    after_a_restart = make(BY_NAME)
    after_a_restart.delete([1, 2])
    assert second.lookup([1, 2, 3]) == [False, False, True]


def test_a_node_that_is_lost_is_no_error_to_who_lists(node: Node, make: Make) -> None:
    node.start()
    adapter = make(BY_NAME)
    adapter.store([1])
    node.stop()
    assert adapter.adapter.list_l2_keys().entries == ()


# Faults


@WAYS
def test_no_node_at_start_and_later(spec: dict[str, Any], node: Node, make: Make) -> None:
    adapter = make(spec)
    assert adapter.store([1])[0] is False
    assert adapter.lookup([1]) == adapter.load([1]) == [False]
    adapter.unlock([1])
    adapter.delete([1])
    node.start()
    assert until(lambda: adapter.store([1])[0])
    assert adapter.lookup([1]) == adapter.load([1]) == [True]


@WAYS
def test_a_node_that_dies_and_comes_back(spec: dict[str, Any], node: Node, make: Make) -> None:
    node.start()
    adapter = make(spec)
    adapter.store([1, 2])
    assert adapter.lookup([1, 2]) == [True, True]
    node.stop()
    assert adapter.store([3])[0] is False
    assert adapter.lookup([3]) == [False]
    adapter.load([1, 2])  # right, or a miss
    adapter.unlock([1, 2])
    node.start()
    assert until(lambda: adapter.store([4])[0])
    assert adapter.lookup([1, 4]) == [False, True]
    assert adapter.load([1, 4]) == [False, True]


@WAYS
def test_a_full_pool(spec: dict[str, Any], node: Node, make: Make) -> None:
    node.start(size=2 << 20)
    adapter = make(spec)
    release = node.full()
    assert adapter.store(range(2, 60))[0] is False
    assert adapter.lookup(range(2, 60)) == adapter.load(range(2, 60)) == [False] * 58
    release()
    assert adapter.store([1])[0]
    assert adapter.lookup([1]) == adapter.load([1]) == [True]


@WAYS
def test_a_wrong_token(spec: dict[str, Any], node: Node, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    node.start()
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "another token")
    adapter = make(spec)
    assert adapter.store([1])[0] is False
    assert adapter.lookup([1]) == adapter.load([1]) == [False]
    assert node.objects() == 0


@WAYS
def test_a_pool_that_is_required(spec: dict[str, Any], make: Make) -> None:
    where = spec if spec["type"] == "moonpool" else spec["adapter_params"]
    needed = {**where, "require_pool": True}
    with pytest.raises(Unavailable):
        make(needed if where is spec else {**spec, "adapter_params": needed})
