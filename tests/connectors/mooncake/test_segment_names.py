"""Segments by the name that setup() got, in each process, and the ports of those without one."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from mooncake._hosts import address_of
from mooncake._segment_names import node_name, segment_of
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from moonpool.core.config.paths import read_or_create_token
from tests.core.master_bed import MasterProcess
from tests.core.store_bed import MIB, until


def test_a_segment_keeps_the_name_that_setup_got(free_port: int, runtime_dir: Path, keys: Any) -> None:
    """Without a chosen token its node listens at 127.0.0.1; the name stands for it in every process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MOONPOOL_CLUSTER_")]:
            patch.delenv(name)
        token = read_or_create_token()
        there = MasterProcess(env={"MOONPOOL_CLUSTER_TOKEN": token.decode()})
        a, b, c = (MooncakeDistributedStore() for _ in range(3))
        try:
            names = []
            for store, host, size in (
                (a, f"localhost:{free_port}", 16 * MIB),
                (b, "some-host.example", 16 * MIB),
                (c, "10.9.8.7", 16 * MIB),
            ):
                assert store.setup(host, "P2PHANDSHAKE", size, 0, "tcp", "", there.address) == 0
                names.append(store.get_hostname())
            first, second, third = names
            assert first == f"localhost:{free_port}"
            hosts = [name.rpartition(":") for name in (second, third)]
            assert [host for host, _, _ in hosts] == ["some-host.example", "10.9.8.7"]
            assert all(int(port) in range(12_300, 14_301) for _, _, port in hosts)
            assert until(lambda: len(c._access.members()) == 3)
            key, other = keys(2)
            config = ReplicateConfig()
            config.preferred_segment = first
            assert c.put(key, b"x", config) == 0
            assert endpoints(c, key) == [first]
            assert c.create_copy_task("no such", [second]) == ((0, 0), -704)
            assert c.create_copy_task("no such", ["nowhere:1"]) == ((0, 0), -704)
            assert c.create_copy_task(key, ["nowhere:1"]) == ((0, 0), -600)
            assert c.create_copy_task(key, [second])[1] == 0
            assert until(lambda: endpoints(c, key) == sorted([first, second]))
            assert c.create_move_task(key, third, first) == ((0, 0), -600)  # it has no copy
            assert c.create_move_task("no such", third, first) == ((0, 0), -704)
            assert c.create_move_task(key, second, third)[1] == 0
            assert until(lambda: endpoints(a, key) == sorted([first, third]))
            assert b.batch_replica_clear([key], "nowhere:1") == []
            assert b.batch_replica_clear([key], first) == [key]
            assert until(lambda: endpoints(a, key) == [third])
            config.preferred_segment = third
            assert a.put(other, b"x", config) == 0
            assert endpoints(a, other) == [third]
            added = b.allocate_and_mount_segment(16 * MIB)
            assert until(lambda: len(c._access.members()) == 4)
            assert b.unmount_segment(added["segment_ids"]) == 0
            # The port is taken: as there.
            assert (
                MooncakeDistributedStore().setup(first, "P2PHANDSHAKE", 16 * MIB, 0, "tcp", "", there.address)
                == -600
            )
        finally:
            for store in (a, b, c):
                store.close()
            there.close()


def endpoints(store: Any, key: str) -> list[str]:
    return sorted(
        one.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for one in store.get_replica_desc(key)
    )


@pytest.mark.parametrize(
    ("called", "reached", "segment"),
    [
        ("localhost:10001", "127.0.0.1:10001", "localhost:10001"),
        ("localhost:0", "127.0.0.1:12345", "localhost:12345"),
        ("[fe80::7]:15", "127.0.0.1:12345", "[fe80::7]:15"),
        ("127.0.0.1:15", "127.0.0.1:12345", "127.0.0.1:15"),
        ("127.0.0.1:0", "127.0.0.1:12345", "127.0.0.1:12345"),
        ("localhost:10001", "10.0.0.1:10001", "10.0.0.1:10001"),  # each host has a localhost
        (f"{'long.' * 20}host:5", "127.0.0.1:5", "127.0.0.1:5"),
        ("no host:5", "127.0.0.1:5", "127.0.0.1:5"),
    ],
)
def test_names_of_segments(called: str, reached: str, segment: str) -> None:
    name = node_name(address_of(called, "called"), address_of(reached, "reached"))
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name)
    assert segment_of(name, reached) == segment
