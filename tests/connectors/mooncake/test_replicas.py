"""Where copies lie, copy tasks, and segments that come and go."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mooncake.store import ReplicaStatus, ReplicateConfig, SoftPinAction, TaskStatus, TaskType

import moonpool
from tests.core.master_bed import MasterProcess
from tests.core.store_bed import MIB, until

Make = Callable[..., Any]


def places(store: Any, key: str) -> list[str]:
    return sorted(
        one.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for one in store.get_replica_desc(key)
    )


def test_descriptors(store: Any, key: str) -> None:
    assert store.get_replica_desc(key) == []
    store.put(key, b"12345")
    (one,) = store.get_replica_desc(key)  # also before the master has heard of it
    assert one.status is ReplicaStatus.COMPLETE
    assert one.is_memory_replica()
    assert not one.is_disk_replica()
    assert not one.is_local_disk_replica()
    descriptor = one.get_memory_descriptor().buffer_descriptor
    assert (descriptor.size, descriptor.transport_endpoint) == (5, store.get_hostname())
    with pytest.raises(RuntimeError, match="Expected DiskDescriptor"):
        one.get_disk_descriptor()
    assert list(store.batch_get_replica_desc([key, "none"])) == [key]
    assert store.batch_get_replica_desc([]) == {}


def test_nobody_knows(store: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """{} would say that there is no such object."""

    def nobody(*_: object, **__: object) -> None:
        raise moonpool.Unavailable(f"no node says whether {key} is there")

    monkeypatch.setattr(moonpool.Store, "stat", nobody)
    with pytest.raises(moonpool.Unavailable, match=key):
        store.get_replica_desc(key)
    assert store.get_size(key) == -900


def test_descriptors_and_sizes_read_nothing(make_store: Make, key: str) -> None:
    holder, other = make_store(), make_store()
    holder.put(key, bytes(MIB))
    until(lambda: places(other, key) == [holder.get_hostname()])
    before = other._access.server.metrics()["tcp_sent_bytes_total"], _served(holder)
    assert other.get_size(key) == MIB
    (one,) = other.get_replica_desc(key)
    assert one.get_memory_descriptor().buffer_descriptor.size == MIB
    assert (other._access.server.metrics()["tcp_sent_bytes_total"], _served(holder)) == before


def _served(store: Any) -> int:
    return int(store._access.server.metrics()["served_bytes_total"])


def test_a_move_task(make_store: Make, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make_store(), make_store()
    here, there = one.get_hostname(), other.get_hostname()
    assert one.create_move_task(key, here, there) == ((0, 0), -704)
    one.put(key, b"move me")
    until(lambda: places(one, key) == [here])
    handle = one.get_buffer(key)
    assert one.create_move_task(key, there, here) == ((0, 0), -600)  # it has none
    task, code = one.create_move_task(key, here, there)
    answer, _ = one.query_task(task)
    assert (code, answer.status, answer.type) == (0, TaskStatus.SUCCESS, TaskType.REPLICA_MOVE)
    until(lambda: places(one, key) == [there])
    assert (bytes(handle), one.get(key)) == (b"move me", b"move me")
    assert one.create_move_task(key, there, there) == ((0, 0), -600)
    assert one.create_move_task(key, there, "127.0.0.1:1") == ((0, 0), -600)
    # Replaced in the middle of it: the new bytes stay where they are.
    copy_to = type(one)._copy_to

    def replaced_meanwhile(self: Any, *arguments: Any) -> Any:
        made = copy_to(self, *arguments)
        other.upsert(key, b"newer")
        return made

    monkeypatch.setattr(type(one), "_copy_to", replaced_meanwhile)
    task, code = one.create_move_task(key, there, here)
    answer, _ = one.query_task(task)
    assert (code, answer.status) == (0, TaskStatus.FAILED)
    assert "replaced" in answer.message
    assert until(lambda: one.get(key)) == b"newer"


@pytest.mark.parametrize("verb", ["create_move_task", "create_copy_task"])
def test_a_task_brings_nothing_back(
    make_store: Make, keys: Any, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """What was replaced or removed before the copy was made stays so, at the target too."""
    one, other = make_store(), make_store()
    here, there = one.get_hostname(), other.get_hostname()
    replaced, removed = keys(2)
    copy_to = type(one)._copy_to
    for key, change in (
        (replaced, lambda: one.upsert(replaced, b"newer")),
        (removed, lambda: one.remove(removed)),
    ):
        one.put(key, b"old bytes")
        until(lambda key=key: places(one, key) == [here])

        def changed_before(self: Any, *arguments: Any, change: Any = change) -> Any:
            assert change() == 0
            return copy_to(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(type(one), "_copy_to", changed_before)
            where = (here, there) if verb == "create_move_task" else ([there],)
            task, code = getattr(one, verb)(key, *where)
        assert (code, one.query_task(task)[0].status) == (0, TaskStatus.FAILED)
        assert own_bytes(other, key) is None
    assert (one.get(replaced), one.get(removed)) == (b"newer", b"")
    assert until(lambda: places(other, replaced) == [here])
    assert until(lambda: places(other, removed) == [])


def own_bytes(store: Any, key: str) -> int | None:
    """How many the node of this store itself has."""
    one = store._access.store().stat(key, everywhere=False)
    copies = [] if one is None else [c for c in one.copies if c.address == store.get_hostname()]
    return copies[0].size if copies else None


def test_a_move_to_other_bytes(make_store: Make, key: str) -> None:
    one, other = make_store(), make_store()
    other.put(key, b"others")
    assert one._access.store().put(key, b"ours")  # two that came at about the same time
    until(lambda: len(places(one, key)) == 2)
    task, _ = one.create_move_task(key, one.get_hostname(), other.get_hostname())
    answer, _ = one.query_task(task)
    assert answer.status is TaskStatus.FAILED
    assert "other bytes" in answer.message
    assert (one.get(key), other.get(key)) == (b"ours", b"others")


def test_moves_to_a_busy_node(make_store: Make, keys: Any) -> None:
    """Its directory entries are some ms late, and it is not asked there whether it has the copy."""
    one, other = make_store(), make_store()
    here, there = one.get_hostname(), other.get_hostname()
    done = threading.Event()

    def busy() -> None:
        for i in itertools.count():
            if done.wait(0.002):
                return
            other.put(f"busy{i % 100}-{there}", b"x")

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        names = keys(8)
        one.put_batch(names, [name.encode() for name in names])
        until(lambda: all(places(one, name) == [here] for name in names))
        for name in names:
            task, _ = one.create_move_task(name, here, there)
            answer, _ = one.query_task(task)
            assert answer.status is TaskStatus.SUCCESS, answer.message
            assert own_bytes(one, name) is None
            assert own_bytes(other, name) == len(name)
    finally:
        done.set()
        thread.join()


def test_a_striped_object_is_at_no_one_node(make_store: Make, key: str) -> None:
    one, other = make_store(), make_store()
    assert one.put(key, bytes(40 * MIB)) == 0
    here, there = one.get_hostname(), other.get_hostname()
    until(lambda: places(one, key))
    assert one.create_copy_task(key, [there]) == ((0, 0), -1011)
    assert one.create_move_task(key, here, there) == ((0, 0), -1011)
    assert one.get(key) == bytes(40 * MIB)


def test_two_copies_on_one_host(
    make_store: Make, keys: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two processes, which do not die together; a sentence where there is no second one."""
    monkeypatch.setattr("mooncake._codes._said", {})  # else it might have been said a moment ago
    alone = MasterProcess()
    try:
        one = make_store(at=alone.address)
        config = ReplicateConfig()
        config.replica_num = 2
        first, second, named, *many = keys(9)
        assert one.put(first, b"x", config) == 0
        assert "put: 1 of 2 copies: there are not enough other" in caplog.text
        other, third = make_store(at=alone.address), make_store(at=alone.address)
        until(lambda: len(one._access.members()) == 3)
        direct = one._access.store()
        until(lambda: direct.put("probe", b"x", replicas=3, replace=True).replicas == 3)  # it knows of them
        caplog.clear()
        assert one.put(second, b"y", config) == 0
        assert one.put_batch(many, [b"z"] * len(many), config) == 0
        config.preferred_segments = [third.get_hostname(), other.get_hostname()]
        assert one.put(named, b"n", config) == 0
        both = sorted([third.get_hostname(), other.get_hostname()])
        assert until(lambda: places(one, named) == both)
        assert "copies" not in caplog.text
        assert until(lambda: all(len(places(other, key)) == 2 for key in (second, named, *many)))
        one.close()
        assert [other.get(key) for key in (second, named, *many)] == [b"y", b"n", *[b"z"] * len(many)]
    finally:
        alone.close()


def test_a_preferred_segment(make_store: Make, keys: Any) -> None:
    one, other = make_store(), make_store()
    a, b, c = keys(3)
    config = ReplicateConfig()
    config.preferred_segments = ["127.0.0.1:1", other.get_hostname()]
    assert one.put(a, b"x", config) == 0
    assert places(one, a) == [other.get_hostname()]
    assert one.get(a) == b"x"
    assert one.upsert(a, b"y", config) == 0
    assert (places(one, a), other.get(a)) == ([other.get_hostname()], b"y")
    config = ReplicateConfig()
    config.preferred_segment = "nowhere:1"
    assert one.put(b, b"x", config) == 0
    assert places(one, b) == [one.get_hostname()]
    config = ReplicateConfig()
    config.prefer_alloc_in_same_node = True
    assert one.put(c, b"x", config) == 0
    assert places(one, c) == [one.get_hostname()]


def test_groups_and_soft_pins(store: Any, keys: Any) -> None:
    def marks(name: str) -> tuple[bool, bool]:
        (copy,) = store._access.store().stat(name).copies
        return copy.grouped, copy.soft_pinned

    names = keys(7)
    config = ReplicateConfig()
    config.group_ids = ["page", ""]
    assert store.put_batch(names[:2], [b"1", b"2"], config) == 0
    assert [marks(name) for name in names[:2]] == [(True, False), (False, False)]
    assert store.put_batch(names[2:5], [b"3", b"4", b"5"], config) == -600  # two groups for three keys
    assert store.is_exist(names[2]) == 0
    config.group_ids = ["page"]
    config.with_soft_pin = True
    assert store.put_batch([names[2], "", names[3]], [b"3", b"4", b"5"], config) == -600  # one alone is bad
    assert [marks(name) for name in names[2:4]] == [(True, True), (True, True)]
    config = ReplicateConfig()
    config.soft_pin_action = SoftPinAction.ENABLE
    config.soft_pin_ttl_ms = 60_000
    assert store.put(names[4], b"5", config) == 0
    assert marks(names[4]) == (False, True)
    config.soft_pin_ttl_ms = 1000
    assert store.put(names[6], b"7", config) == 0
    until(lambda: not marks(names[6])[1])
    assert marks(names[4]) == (False, True)
    config.with_soft_pin = True
    config.soft_pin_action = SoftPinAction.DISABLE
    assert store.put(names[5], b"6", config) == 0
    assert marks(names[5]) == (False, False)


def test_a_copy_on_an_ssd(make_store: Make, tmp_path: Path, keys: Any) -> None:
    store = make_store(8 * MIB, enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
    names = keys(24)
    for name in names:
        until(lambda name=name: store.put(name, bytes(MIB)) == 0)
    found = until(lambda: [d for d in store.get_replica_desc(names[0]) if d.is_local_disk_replica()])
    assert found[0].get_disk_descriptor().object_size == MIB
    with pytest.raises(RuntimeError, match="Expected MemoryDescriptor"):
        found[0].get_memory_descriptor()
    assert store.get_offload_rpc_read_count() >= 0


def test_a_copy_task(make_store: Make, key: str) -> None:
    one, other = make_store(), make_store()
    one.put(key, b"copy me")
    until(lambda: places(one, key) == [one.get_hostname()])
    task, code = one.create_copy_task(key, [other.get_hostname()])
    assert code == 0
    until(lambda: places(one, key) == sorted([one.get_hostname(), other.get_hostname()]))
    answer, code = one.query_task(task)
    assert code == 0
    assert (answer.status, answer.type, answer.id) == (TaskStatus.SUCCESS, TaskType.REPLICA_COPY, task)
    assert 0 < answer.created_at_ms_epoch <= answer.last_updated_at_ms_epoch
    one.close()
    assert until(lambda: other.get(key)) == b"copy me"  # the copy is one


def test_tasks_that_cannot_be(store: Any, key: str) -> None:
    here = store.get_hostname()
    assert store.create_copy_task(key, [here]) == ((0, 0), -704)
    store.put(key, b"x")
    assert store.create_copy_task(key, ["127.0.0.1:1"]) == ((0, 0), -600)
    assert store.create_copy_task(key, []) == ((0, 0), -600)
    assert store.create_copy_task("", [here]) == ((0, 0), -704)
    assert store.get(key) == b"x"
    assert store.query_task((1, 2)) == (None, -1400)


def test_clearing_replicas(make_store: Make, keys: Any) -> None:
    one, other = make_store(), make_store()
    single, double, none = keys(3)
    one.put_batch([single, double], [b"x", b"y"])
    until(lambda: len(places(one, single)) == len(places(one, double)) == 1)
    one.create_copy_task(double, [other.get_hostname()])
    until(lambda: len(places(one, double)) == 2)
    assert one.batch_replica_clear([single, double, none], "127.0.0.1:1") == []
    handle = one.get_buffer(double)
    assert one.batch_replica_clear([single, double, none], one.get_hostname()) == [single, double]
    until(lambda: places(one, double) == [other.get_hostname()])
    assert one.batch_is_exist([single, double]) == [0, 1]
    assert (bytes(handle), one.get(double)) == (b"y", b"y")  # whoever reads the copy, and from now on
    assert one.batch_replica_clear([single, double, none], one.get_hostname()) == []
    assert one.batch_replica_clear([double, none]) == [double]
    assert one.batch_is_exist([single, double]) == [0, 0]


def test_more_segments(make_store: Make, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store()
    before = len(store._access.members())
    added = store.allocate_and_mount_segment(16 * MIB)
    assert (added["ret"], added["allocated_size"], len(added["segment_ids"])) == (0, 16 * MIB, 1)
    until(lambda: len(store._access.members()) == before + 1)
    assert store.unmount_segment(["no such"]) == -600
    assert store.unmount_segment(added["segment_ids"]) == 0
    until(lambda: len(store._access.members()) == before)
    again = store.allocate_and_mount_segment(16 * MIB)
    assert store.unmount_and_free_segment(again["segment_ids"], 1) == 0
    assert store.allocate_and_mount_segment(0)["ret"] == -600
    assert store.mount_segment("/tmp/no/such/file", MIB) == {"ret": -1100, "segment_ids": []}
    assert store.mount_segment("/dev/null", MIB) == {"ret": -1011, "segment_ids": []}
    assert "memory of their own" in caplog.text
    assert store.unmount_local_disk_segment() == 0
