"""How much of the arena serves, and what survives: eviction by need, fair leases, promises kept."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import struct
from pathlib import Path
from typing import Any

import pytest

from moonpool import STORED, Presence, Store, _native
from moonpool.core.config.native_settings import node_settings
from moonpool.core.errors import InvalidArgument
from moonpool.core.store.types import PutStatus

from . import wire_client as w
from .store_bed import MIB, TOKEN, NodeProcess, until
from .wire_client import Wire

BLOCK = 16 * 1024


@pytest.fixture
def path(runtime_dir: Path) -> Path:
    return runtime_dir / "node-t.sock"


def test_scattered_ages_leave_the_arena_full_of_objects(rng: random.Random) -> None:
    with Store(embedded=32 * MIB) as store:
        for number in range(20_000):
            # Some keys come again and again: their objects stay, and those around them die.
            key = f"hot-{rng.randrange(200)}" if rng.random() < 0.3 else f"cold-{number}"
            if store.get(key) is None:
                store.put(key, bytes(BLOCK))
        counters = store.stat()
        assert counters["evicted_total"] > 10_000
        assert counters["object_bytes"] > 0.8 * counters["arena_ready_bytes"]


def test_a_large_put_that_is_refused_costs_nothing() -> None:
    with Store(embedded=64 * MIB) as store:
        keys = [f"k{i}" for i in range(3600)]
        store.put(keys, [bytes(BLOCK)] * len(keys))
        _, pin = store.exists(keys[::8], pin=True)  # no window of 15 MiB without one of these
        before = store.stat()["objects"]
        result = store.put("large", bytes(15 * MIB))
        assert result.status is PutStatus.REFUSED
        assert store.stat()["objects"] == before
        assert pin is not None
        pin.release()
        assert store.put("large", bytes(15 * MIB)) == STORED
        assert store.stat()["objects"] > before - 1100  # the window, not the whole arena


def test_chains_of_objects_larger_than_a_slab_lose_their_ends_first(path: Path) -> None:
    size = 128 * 1024
    chains = [[f"{chain}-{i}" for i in range(7)] for chain in range(6)]  # 42 objects, and room for 32
    node = NodeProcess(path, tenants=[["default", 4 * MIB]], slab_bytes=64 * 1024)
    try:
        with Store(str(path), token=TOKEN) as store:
            for keys in chains:
                for i, key in enumerate(keys):
                    above = [keys[i - 1] if i else None]
                    assert store.put([key], [bytes(size)], parents=above) == [STORED]
            hits = [[bool(found) for found in store.exists(keys)] for keys in chains]
            assert all(found == sorted(found, reverse=True) for found in hits), hits
            assert sum(map(sum, hits)) > 28
        assert node.is_sound()
    finally:
        node.close()


def test_many_idle_writers_leave_room_for_others(path: Path) -> None:
    node = NodeProcess(path, tenants=[["default", 64 * MIB]])
    stores = []
    try:
        for number in range(150):
            stores.append(Store(str(path), token=TOKEN))
            assert stores[-1].put(f"k{number}", bytes(1000)) == STORED
        assert node.metric("leased_bytes") < 48 * MIB
        assert stores[0].put("large", bytes(4 * MIB)) == STORED
        assert node.is_sound()
    finally:
        for store in stores:
            store.close()
        node.close()


def test_thousands_of_one_way_puts_arrive(path: Path) -> None:
    node = NodeProcess(path, tenants=[["default", 64 * MIB]])
    try:
        with Store(str(path), token=TOKEN) as store, Store(str(path), token=TOKEN) as other:
            keys = [f"{i:060d}" for i in range(16_000)]
            store.put(keys, [b"x"] * len(keys), ack=False)
            until(lambda: other.exists(keys[-1]) is Presence.HIT)
            assert all(other.exists(keys))
        writer = Store(str(path), token=TOKEN)
        writer.put(["last"], [b"x"], ack=False)
        writer.close()
        with Store(str(path), token=TOKEN) as reader:
            until(lambda: reader.exists("last") is Presence.HIT)
    finally:
        node.close()


def test_a_view_outlives_the_connection_that_broke_the_rules(path: Path) -> None:
    """A client that gave up in the middle of a frame: its views still show their objects."""
    node = NodeProcess(path, tenants=[["default", 8 * MIB]], slab_bytes=MIB)
    store = Store(str(path), token=TOKEN, timeout_s=1.0)
    try:
        store.put("kept", b"A" * 100_000)
        view = store.get("kept")
        node.stop()
        # Too long for the socket's buffer: the call gives up in the middle of a frame.
        assert store.exists(["?" * 900 + str(i) for i in range(4000)])[0] is Presence.UNKNOWN
        node.resume()
        until(lambda: node.metric("connections") >= 1)
        with Store(str(path), token=TOKEN) as other:
            for number in range(400):
                other.put(f"other-{number}", b"B" * 100_000)
            assert other.stat()["evicted_total"] > 0
        assert view is not None
        assert bytes(view) == b"A" * 100_000
        view.release()
        del view
        store.close()
        until(lambda: node.metric("objects_pinned") == 0)
    finally:
        store.close()
        node.close()


def test_a_client_that_broke_the_rules_keeps_its_pins_until_it_hangs_up(path: Path) -> None:
    node = NodeProcess(path, tenants=[["default", 8 * MIB]])
    try:
        with Store(str(path), token=TOKEN) as store, Wire.open(path, TOKEN) as wire:
            store.put("kept", b"A" * 100_000)
            pin, hits, _ = wire.lookup([b"kept"], flags=w.PIN)
            assert (pin > 0, hits) == (True, 1)
            wire.send(99)  # no such kind
            assert "does not know" in wire.ended()[1]
            assert node.metric("objects_pinned") == 1
        until(lambda: node.metric("objects_pinned") == 0)
        assert node.is_sound()
    finally:
        node.close()


class Tensor:
    """What a torch tensor shows us; its memory is unmapped with it."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size)
        self._memory[:] = b"T" * size
        self.device = type("Device", (), {"type": "cpu"})()
        self._size = size

    def data_ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def numel(self) -> int:
        return self._size

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True


def test_a_tensor_that_only_the_call_holds_is_read_before_it_dies() -> None:
    with Store(embedded=8 * MIB) as store:
        result = store.put("t", Tensor(MIB))  # not inside assert, which would hold the tensor too
        assert result == STORED
        assert bytes(store.get("t") or b"") == b"T" * MIB


def test_a_pinned_object_is_copied_into_parts() -> None:
    with Store(embedded=8 * MIB) as store:
        store.put("k", b"0123456789")
        _, pin = store.exists(["k"], pin=True)
        store.remove("k")
        first, second = bytearray(4), bytearray(8)
        assert store.get(["k", "other"], [[first, second], bytearray(1)], pin=pin, verify=True) == [10, None]
        assert (bytes(first), bytes(second[:6])) == (b"0123", b"456789")
        with pytest.raises(InvalidArgument, match="holds 2 bytes"):
            store.get("k", bytearray(2), pin=pin)


def test_a_child_of_fork_ends_though_a_worker_is_left_over() -> None:
    server = _native.Server("", [("default", 8 * MIB)], TOKEN, node_settings())
    server.start()
    client = _native.Client("", TOKEN, embedded=server)
    client.connect()
    worker: Any = _native.Worker(client)
    child = os.fork()
    if child == 0:
        del worker  # must not wait for threads that only the parent has
        os._exit(0)
    until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, 5.0)
    worker.close()
    server.stop()


def test_a_killed_parents_pins_end_though_its_child_lives(path: Path) -> None:
    node = NodeProcess(path, tenants=[["default", 8 * MIB]])
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        store = Store(str(path), token=TOKEN)
        store.put("k", b"v")
        store.view = store.get("k")  # type: ignore[attr-defined]
        child = os.fork()
        if child == 0:
            os.close(read)
            signal.pause()
        os.write(write, struct.pack("i", child))
        signal.pause()
    (child,) = struct.unpack("i", os.read(read, 4))
    try:
        until(lambda: node.metric("pins") == 1)
        os.kill(parent, 9)
        os.waitpid(parent, 0)
        until(lambda: node.metric("pins") == 0)
    finally:
        os.kill(child, 9)
        os.close(read)
        os.close(write)
        node.close()


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 256])
def test_names_of_spaces_are_checked(name: str) -> None:
    with pytest.raises(InvalidArgument, match="namespace has 1 to 255 bytes"):
        Store(embedded=8 * MIB, namespace=name)
