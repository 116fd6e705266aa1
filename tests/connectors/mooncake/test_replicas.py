"""Where copies lie, copy tasks, and segments that come and go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mooncake.store import ReplicaStatus, TaskStatus, TaskType

import moonpool
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
    monkeypatch.setattr(moonpool.Store, "exists", lambda _, keys: [moonpool.Presence.UNKNOWN] * len(keys))
    with pytest.raises(moonpool.Unavailable, match=key):
        store.get_replica_desc(key)


def test_the_size_of_what_is_gone(store: Any, key: str) -> None:
    store.put(key, b"12345")
    (one,) = store.get_replica_desc(key)
    store.remove(key)
    with pytest.raises(moonpool.Unavailable, match="gone"):
        one.get_memory_descriptor()


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


def test_tasks_that_cannot_be(store: Any, key: str, caplog: pytest.LogCaptureFixture) -> None:
    here = store.get_hostname()
    assert store.create_copy_task(key, [here]) == ((0, 0), -704)
    store.put(key, b"x")
    assert store.create_copy_task(key, ["127.0.0.1:1"]) == ((0, 0), -600)
    assert store.create_copy_task(key, []) == ((0, 0), -600)
    assert store.create_copy_task("", [here]) == ((0, 0), -600)
    assert store.create_move_task(key, here, "127.0.0.1:1") == ((0, 0), -1011)
    assert "was not moved" in caplog.text
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
