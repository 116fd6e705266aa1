"""What a user of Store sees when a process dies or stands still, in the middle of whatever it does."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool import STORED, Presence, Store, _native
from moonpool.core.errors import CorruptObject, Error, Timeout, Unavailable
from moonpool.core.store.store import NO_ANSWER
from moonpool.core.store.types import PutStatus

from . import wire_client as w
from .store_bed import MIB, TOKEN, NodeProcess, Puppet, until
from .wire_client import Wire

MARGIN_S = 5  # real processes on a busy machine: the promise is 2 s, its measured time is printed


@pytest.fixture
def path(runtime_dir: Path) -> Path:
    return runtime_dir / "node-t.sock"


@pytest.fixture
def nodes(path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Starts nodes on the same path, one after the other."""
    started: list[NodeProcess] = []

    def start(**options: Any) -> NodeProcess:
        path.unlink(missing_ok=True)  # a killed one leaves its socket behind
        started.append(NodeProcess(path, **options))
        return started[-1]

    yield start
    for node in started:
        node.close()


def open_store(path: Path, **options: Any) -> Store:
    return Store(str(path), token=TOKEN, **options)


def timed(name: str, call: Callable[[], Any], limit_s: float, error: type[Error] | None = None) -> Any:
    began = time.monotonic()
    if error is None:
        result = call()
    else:
        with pytest.raises(error) as caught:
            call()
        result = caught.value
    spent = time.monotonic() - began
    print(f"{name}: {spent:.3f} s")
    assert spent < limit_s
    return result


# ---- the node dies


@pytest.mark.parametrize("again", [False, True])
def test_what_a_process_pinned_is_loaded_after_its_node_died(nodes: Any, path: Path, again: bool) -> None:
    """As an engine does that has promised it. again: another node serves there, with other objects."""
    node = nodes()
    client = _native.Client(str(path), TOKEN)
    client.connect()
    client.put([b"k"], [b"first life"])
    pin = client.longest_prefix([b"k"])[1]
    node.kill()
    if again:
        nodes()
        until(lambda: client.connected or _reconnects(client))
        client.put([b"k"], [b"other life"])
    assert load(client, pin) == (b"\1", b"first life")
    holders = pin.hand_over()
    pin.release()
    assert pin.hand_over() == (b"", b"")
    assert load(client, pin, holders) == (b"\0", bytes(10))
    client.close()


def load(client: _native.Client, pin: _native.Pin, handed: tuple[bytes, bytes] | None = None) -> Any:
    """(the answer's flags, the memory of ten bytes that it was loaded into)."""
    memory = np.zeros(10, np.uint8)
    table = _native.PartTable([[(memory.ctypes.data, 0, 10)]])
    worker = _native.Worker(client, threads=0)
    worker.submit_load(*(handed or pin.hand_over()), table, np.zeros(1, np.uint32), np.zeros(1, np.uint16))
    ((_, answer),) = worker.poll()
    return answer.ok, memory.tobytes()


def _reconnects(client: _native.Client) -> bool:
    with contextlib.suppress(Error):
        client.stat()
    return client.connected


def test_a_killed_node_is_missed_at_once_and_found_again(nodes: Any, path: Path) -> None:
    node = nodes()
    store = open_store(path)
    store.put(["k", "view", "long" * 100], [b"first life", b"kept", b"x"])
    view = store.get("view")
    pin = store.longest_prefix(["view"]).pin
    node.kill()
    error = timed("put", lambda: store.put("new", b"x"), 1, Unavailable)
    assert "moonpool node" in str(error)
    assert error.operation == "put"
    assert error.peer == str(path)
    timed("get", lambda: store.get("k"), 1, Unavailable)
    timed("get into", lambda: store.get("k", bytearray(10)), 1, Unavailable)
    timed("remove", lambda: store.remove("k"), 1, Unavailable)
    timed("list", store.list, 1, Unavailable)
    timed("stat", store.stat, 1, Unavailable)
    assert timed("exists", lambda: store.exists(["k", "new"]), 1) == [Presence.UNKNOWN] * 2
    assert timed("exists", lambda: store.exists(["k"], pin=True), 1) == ([Presence.UNKNOWN], None)
    prefix = timed("longest_prefix", lambda: store.longest_prefix(["k"]), 1)
    assert (prefix.blocks, prefix.pin) == (0, None)
    assert "moonpool node" in prefix.why
    assert not store.connected
    assert view == b"kept"
    assert store.get("view", pin=pin) == b"kept"
    nodes()
    began = time.monotonic()
    until(lambda: store.exists("k") is Presence.MISS)  # the new node has nothing, and says so
    print(f"back {time.monotonic() - began:.2f} s after the new node served")
    assert time.monotonic() - began < MARGIN_S
    assert store.put("k", b"second life") == STORED
    assert store.get("k") == b"second life"
    assert view == b"kept"
    assert pin is not None
    pin.release()  # of a life that is over: harmless
    store.close()
    assert view == b"kept"


def test_a_reader_never_serves_a_dead_nodes_memory_as_the_new_ones(nodes: Any, path: Path) -> None:
    """A hit needs no message, so nothing in it would notice the death of the node."""
    node = nodes()
    reader = open_store(path)
    reader.put("k", b"old")
    into = bytearray(3)
    assert reader.get("k", into) == 3
    node.kill()
    nodes()
    with open_store(path) as writer:
        assert writer.put("k", b"new") == STORED

    def read() -> bytes | None:
        try:
            return bytes(into) if reader.get("k", into) else None
        except Unavailable:
            return None

    assert until(read) == b"new"
    reader.close()


def test_kill_during_traffic_of_another_process(nodes: Any, path: Path) -> None:
    """Twice: each call of the other process ends in time, and it goes on with the new node by itself."""
    node = nodes()
    traffic = Puppet("traffic", path, TOKEN.decode(), 256 * 1024)
    assert traffic.hear() == "ready"
    for _ in range(2):
        until(lambda node=node: node.metric("stored_total") > 50)
        node.kill()
        assert traffic.hear() == "lost"
        node = nodes()
        assert traffic.hear() == "recovered"
    traffic.tell("q")
    counts = traffic.hear()
    print(counts)
    assert counts["longest_s"] < MARGIN_S
    assert counts["recovered"] == 2
    assert counts["lost"] >= 2
    assert node.is_sound()
    traffic.close()


def test_a_large_put_and_get_with_the_node_killed_in_the_middle(nodes: Any, path: Path) -> None:
    node = nodes(tenants=[["default", 512 * MIB]])
    store = open_store(path)
    data = random.Random(1).randbytes(MIB) * 64
    store.put("there", data)
    reading = Puppet("traffic", path, TOKEN.decode(), 64 * MIB)
    assert reading.hear() == "ready"
    until(lambda: node.metric("stored_total") > 3)
    node.kill()
    assert reading.hear() == "lost"
    reading.tell("q")
    assert reading.hear()["longest_s"] < MARGIN_S
    reading.close()
    store.close()


# ---- the node stands still


def test_a_stopped_node_is_a_timeout_then_unavailable_and_back(nodes: Any, path: Path) -> None:
    node = nodes()
    store = open_store(path, timeout_s=1.0)
    store.put(["k", "held"], [b"x" * 100, b"held"])
    view = store.get("held")
    node.stop()
    error = timed("put with timeout_s=1.0", lambda: store.put("new", b"y"), MARGIN_S * 1.0, Timeout)
    assert "in time" in str(error)
    # The next call connects: the kernel accepts, nobody greets.
    timed("the next call", lambda: store.put("new", b"y"), MARGIN_S * 1.0, Timeout)

    def fails_at_once() -> bool:
        began = time.monotonic()
        with pytest.raises(Timeout):
            store.put("new", b"y")
        return time.monotonic() - began < 0.5

    # Within the back-off; for whoever comes late it is over, and that call connects.
    until(fails_at_once, 20.0)
    assert timed("exists", lambda: store.exists("absent"), MARGIN_S * 1.0) is Presence.UNKNOWN
    other = open_store_fails(path)
    assert isinstance(other, Timeout)
    node.resume()
    until(lambda: store.exists("absent") is Presence.MISS)
    assert store.get("k") == b"x" * 100
    assert view == b"held"
    store.close()
    assert node.is_sound()


def open_store_fails(path: Path) -> Error:
    error: Error = timed("open", lambda: open_store(path, timeout_s=0.3), 0.3 * MARGIN_S, Error)
    return error


def test_a_timeout_of_one_call(nodes: Any, path: Path) -> None:
    node = nodes()
    store = open_store(path, timeout_s=30)
    store.put("k", b"x")
    node.stop()
    timed("put with timeout_s=0.2", lambda: store.put("new", bytes(MIB), timeout_s=0.2), MARGIN_S, Timeout)
    node.resume()
    store.close()


@pytest.fixture
def many_signals() -> Iterator[None]:
    """Fifty within the timeout of a call, as of a profiler."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def test_signals_keep_no_call_beyond_its_timeout(nodes: Any, path: Path, many_signals: None) -> None:
    node = nodes()
    store = open_store(path, timeout_s=1.0)
    store.put("k", b"x")
    node.stop()
    timed("put", lambda: store.put("new", b"y"), MARGIN_S, Timeout)
    node.resume()
    until(lambda: store.exists("k") is Presence.HIT)
    store.close()


def test_views_survive_a_timeout_and_what_happens_after_it(nodes: Any, path: Path) -> None:
    """The client gives the call up, the node goes on and fills its arena: what was pinned is still there."""
    node = nodes(tenants=[["default", 4 * MIB]])
    store = open_store(path, timeout_s=1.0)
    data = os.urandom(256 * 1024)
    store.put("held", data)
    view = store.get("held")
    node.stop()
    with pytest.raises(Timeout):
        store.put("late", b"x")
    node.resume()
    until(lambda: store.exists("held"))
    store.remove("held")
    with open_store(path) as other:
        for i in range(40):
            other.put(f"fill{i}", os.urandom(256 * 1024))
    assert node.metric("evicted_total") > 0
    assert view == data
    assert node.metric("objects_detached") == 1
    del view
    until(lambda: node.metric("objects_detached") == 0)
    assert node.is_sound()
    store.close()


def test_views_survive_close_and_what_happens_after_it(nodes: Any, path: Path) -> None:
    node = nodes(tenants=[["default", 4 * MIB]])
    data = os.urandom(256 * 1024)
    with open_store(path) as store:
        store.put("held", data)
        view = store.get("held")
    with open_store(path) as other:
        for i in range(40):
            other.put(f"fill{i}", os.urandom(256 * 1024))
    assert node.metric("evicted_total") > 0
    assert view == data
    del view
    until(lambda: node.metric("connections") == 0)
    assert node.is_sound()


def test_one_way_puts_to_a_stopped_node_wait_at_last(nodes: Any, path: Path) -> None:
    """They cost memory only up to a limit; then the put waits like any other."""
    node = nodes()
    store = open_store(path, timeout_s=1.0)
    store.put("first", b"x")
    node.stop()
    with pytest.raises(NO_ANSWER):  # noqa: PT012
        for i in range(100_000):
            store.put(b"%0500d" % i, b"", ack=False)
    print(f"after {i} puts of 500 bytes of key")
    assert i < 10_000
    node.resume()
    store.close()


# ---- a client dies


def test_a_writer_killed_in_mid_put(nodes: Any, path: Path) -> None:
    """It puts objects of 32 MiB for ever. Killed at any moment: its leases come back, its keys are free."""
    node = nodes(tenants=[["default", 256 * MIB]])
    for _ in range(5):
        writer = Puppet("writer", path, TOKEN.decode(), 32 * MIB)
        assert writer.hear() == "ready"
        until(lambda: node.metric("leased_bytes") >= 32 * MIB)
        writer.kill()
        began = time.monotonic()
        until(lambda: node.metric("leased_bytes") == 0)
        print(f"leases came back in {time.monotonic() - began:.3f} s")
        with open_store(path) as store:
            for i in range(4):
                assert store.put(f"writer-{i}", b"mine", replace=True) == STORED
                assert store.get(f"writer-{i}") == b"mine"
            assert node.is_sound()
            store.remove([f"writer-{i}" for i in range(4)])
        writer.close()
    until(lambda: node.metric("leased_bytes") == 0)
    assert node.metric("arena_free_bytes") == node.metric("arena_ready_bytes")


def test_the_key_of_a_writer_that_died_half_way_is_free(nodes: Any, path: Path) -> None:
    node = nodes()
    writer = Wire.open(path, TOKEN)
    offset, size, _ = writer.lease(8 * MIB, 8 * MIB)
    arena = mmap.mmap(writer.descriptors[0], 64 * MIB)
    arena[offset : offset + 4 * MIB] = b"h" * (4 * MIB)  # half of it is written, and not yet committed
    with open_store(path) as store:
        assert store.exists("k") is Presence.MISS
        assert store.put("k", b"of another") == STORED  # the half-written one blocks nobody
        writer.close()
        until(lambda: node.metric("leased_bytes") < size)
        assert store.get("k") == b"of another"
    arena.close()
    assert node.is_sound()


def test_a_reader_that_is_killed_lets_go_of_its_pins(nodes: Any, path: Path) -> None:
    node = nodes(tenants=[["default", 16 * MIB]], pins_share_max=1.0)
    store = open_store(path)
    names = [f"p{i}" for i in range(10)]
    store.put(names, [bytes(MIB)] * 10)
    holder = Puppet("holder", path, TOKEN.decode(), "p", 10)
    assert holder.hear() == [10, 10]
    metrics = node.metrics()
    assert (metrics["objects_pinned"], metrics["pins"]) == (10, 2)
    mine = []
    while store.put(f"fill{len(mine)}", bytes(3 * MIB)).status is PutStatus.STORED:
        mine.append(store.get(f"fill{len(mine)}"))
    assert len(mine) < 3  # the rest is pinned
    mine.clear()
    assert all(store.exists(names))
    holder.kill()
    until(lambda: node.metric("pins") == 0)
    assert node.metric("objects_pinned") == 0
    for i in range(4):
        assert store.put(f"after{i}", bytes(3 * MIB)) == STORED
    assert not all(store.exists(names))
    store.close()
    assert node.is_sound()
    holder.close()


def test_a_stopped_reader_keeps_its_pins(nodes: Any, path: Path) -> None:
    node = nodes(tenants=[["default", 16 * MIB]])
    store = open_store(path)
    store.put("p0", os.urandom(MIB))
    holder = Puppet("holder", path, TOKEN.decode(), "p", 1)
    holder.hear()
    holder.stop()
    for i in range(40):
        assert store.put(f"fill{i}", bytes(MIB)) == STORED
    assert store.exists("p0") is Presence.HIT
    store.close()
    holder.close()
    assert node.is_sound()


# ---- memory goes bad


def corrupt(node: NodeProcess, data: bytes) -> None:
    """Flips one bit of ``data`` where it lies in the arena."""
    with node.arena_file().open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
        at = arena.find(data)
        assert at >= 0
        arena[at + len(data) // 2] ^= 1


def test_verify_finds_a_flipped_bit(nodes: Any, path: Path) -> None:
    node = nodes(tenants=[["default", 16 * MIB]], scrub_bytes_per_s=0)
    store = open_store(path)
    data, long = os.urandom(100_000), "long" * 100
    store.put(["k", "good", long], [data, b"good", data[::-1]])
    assert store.get("k", verify=True) == data
    corrupt(node, data)
    corrupt(node, data[::-1])
    into = bytearray(100_000)
    pin = store.longest_prefix(["k"]).pin
    for call in (
        lambda: store.get("k", verify=True),
        lambda: store.get("k", into, verify=True),
        lambda: store.get(long, into, verify=True),
        lambda: store.get("k", pin=pin, verify=True),
    ):
        with pytest.raises(CorruptObject, match="do not match their checksum"):
            call()
    assert store.get("good", verify=True) == b"good"
    assert store.get("k", into) == 100_000  # without verify, memory is trusted
    assert sum(a != b for a, b in zip(into, data, strict=True)) == 1
    assert node.is_sound()
    store.close()


def test_the_scrub_drops_what_went_bad(nodes: Any, path: Path) -> None:
    node = nodes(tenants=[["default", 16 * MIB]], scrub_bytes_per_s=1 << 30)
    store = open_store(path)
    wire = Wire.open(path, TOKEN)
    offset, _, _ = wire.lease(4096, 4096)
    before = node.metric("scrub_dropped_total")
    assert wire.commit([w.Row(offset, 4096, 0x12345678, b"bad")]) == [
        w.STORED
    ]  # a checksum that never was right
    store.put("good", os.urandom(MIB))
    until(lambda: node.metric("scrub_dropped_total") == before + 1)
    assert store.exists(["bad", "good"]) == [Presence.MISS, Presence.HIT]
    assert store.get("good", verify=True) is not None
    wire.close()
    store.close()
    assert node.is_sound()
