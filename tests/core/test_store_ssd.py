"""The SSD tier of real nodes: more than memory holds, what survives a node, and what a bad disk costs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moonpool import Presence, Store, _native
from moonpool.core.config.config import Config, load
from moonpool.core.config.native_settings import node_settings
from moonpool.core.config.sections import Node
from moonpool.core.errors import ConfigError, Error
from moonpool.core.service.node import ssd_directories
from moonpool.core.store.types import PutStatus

from . import wire_client as w
from .ssd_bed import BLOCK, Bed, bed, content, end, put
from .store_bed import MIB, TOKEN, NodeProcess, until
from .wire_client import Wire

__all__ = ["bed"]

ALL_WRITTEN: dict[str, Any] = {"ssd_clean_share": 1.0}  # at once, not only what is cold


def check(store: Store, numbers: range, size: int = BLOCK) -> None:
    for i in numbers:
        into = bytearray(size)
        assert store.get(f"k{i}", into) == size
        assert into == content(i, size)


def test_a_node_that_was_stopped_has_its_content_back(bed: Bed) -> None:
    node = bed.node(dram=32 * MIB)
    with bed.store() as store:
        put(store, range(100))
    end(node)
    node = bed.node(dram=32 * MIB)
    with bed.store() as store:
        assert node.metric("objects") == 0
        assert store.exists([f"k{i}" for i in range(100)]) == [Presence.HIT] * 100
        assert store.exists("k100") is Presence.MISS
        assert node.metric("objects") == 0  # to ask brings nothing
        check(store, range(100))
    counters = node.metrics()
    assert counters["ssd_promoted_total"] == counters["objects"] == 100
    assert counters["ssd_recovered_scanned_segments"] == 0
    assert counters["integrity"]


def test_reading_back_costs_nothing_that_is_not_written(bed: Bed) -> None:
    """What comes back drives out what is coldest: that must be on the disk by then, though what came back is,
    too. No faster than the disk, and twice."""
    node = bed.node()
    pieces = [range(i, i + 8) for i in range(0, 320, 8)]  # a quarter of the arena is 32 objects
    with bed.store() as store:
        for piece in pieces:
            put(store, piece)
            until(lambda: node.metric("ssd_writing") == 0)
        for piece in pieces * 2:
            check(store, piece)
            until(lambda: node.metric("ssd_writing") == 0)
    counters = node.metrics()
    assert counters["ssd_lost_total"] == 0
    assert counters["ssd_promoted_total"] >= 320 - 128


def test_what_was_written_survives_a_kill(bed: Bed) -> None:
    node = bed.node(**ALL_WRITTEN)
    with bed.store() as store:
        put(store, range(64))
        until(lambda: node.metric("ssd_objects") == 64)
    node.kill()
    node = bed.node()
    with bed.store() as store:
        check(store, range(64))
    assert node.is_sound()


def test_a_pool_larger_than_memory(bed: Bed) -> None:
    node = bed.node(**ALL_WRITTEN)
    with bed.store() as store:
        for begin in range(0, 640, 32):  # 40 MiB through 8
            put(store, range(begin, begin + 32))
            until(lambda: node.metric("ssd_dirty_objects") == 0 and node.metric("ssd_writes_waiting") == 0)
        counters = node.metrics()
        assert counters["evicted_total"] > 400
        assert counters["ssd_lost_total"] == 0
        check(store, range(640))
        assert [store.get(f"k{i}") == content(i) for i in range(0, 640, 40)] == [True] * 16
    counters = node.metrics()
    assert counters["ssd_promoted_total"] > 400
    assert counters["ssd_promote_failed_total"] == 0
    assert counters["integrity"]


def test_the_cold_quarter_is_written_before_it_is_evicted(bed: Bed) -> None:
    node = bed.node()
    with bed.store() as store:
        put(store, range(60))  # less than half of the arena: nothing needs to be written
        assert node.metric("ssd_written_total") == 0
        put(store, range(60, 110))
        until(lambda: 0 < node.metric("ssd_saved_bytes") < 5 * MIB)
        assert store.exists("k0") is Presence.HIT


def test_a_chain_comes_back_and_counts_in_a_prefix(bed: Bed) -> None:
    node = bed.node(**ALL_WRITTEN)
    names = [f"k{i}" for i in range(20)]
    with bed.store() as store:
        for i, name in enumerate(names):
            store.put(name, content(i), parents=None if i == 0 else names[i - 1])
        until(lambda: node.metric("ssd_objects") == 20)
    node.kill()
    node = bed.node()
    with bed.store() as store:
        found = store.longest_prefix([*names, "k99"])
        assert found.blocks == 20
        assert store.get(names, pin=found.pin) == [content(i) for i in range(20)]
        del found
    assert node.is_sound()


def test_a_lookup_brings_at_most_a_quarter_of_the_arena(bed: Bed) -> None:
    node = bed.node(**ALL_WRITTEN)
    names = [f"k{i}" for i in range(64)]
    with bed.store() as store:
        put(store, range(64))
        until(lambda: node.metric("ssd_objects") == 64)
    node.kill()
    bed.node()
    with bed.store() as store:
        assert store.longest_prefix(names).blocks == 2 * MIB // BLOCK


def test_what_was_removed_or_replaced_does_not_come_back(bed: Bed) -> None:
    node = bed.node(**ALL_WRITTEN)
    with bed.store() as store:
        put(store, range(10))
        until(lambda: node.metric("ssd_objects") == 10)
        assert store.remove("k0")
        store.put("k1", content(1001), replace=True)
        until(lambda: node.metric("ssd_written_total") == 11)
    end(node)
    node = bed.node()
    with bed.store() as store:
        assert store.exists("k0") is Presence.MISS
        assert store.get("k0") is None
        assert store.get("k1") == content(1001)
        assert store.remove("k2")  # on the SSD only
        assert not store.remove("k2")
    end(node)
    bed.node()
    with bed.store() as store:
        assert store.exists(["k0", "k1", "k2"]) == [Presence.MISS, Presence.HIT, Presence.MISS]


def test_a_put_of_what_only_the_ssd_has_keeps_the_old_bytes(bed: Bed) -> None:
    node = bed.node()
    with bed.store() as store:
        put(store, range(1))
    end(node)
    bed.node()
    with bed.store() as store:
        assert store.put("k0", content(7)).status is PutStatus.EXISTS
        assert store.get("k0") == content(0)


def test_list_shows_what_only_the_ssd_has(bed: Bed) -> None:
    node = bed.node()
    with bed.store() as store:
        put(store, range(30))
    end(node)
    bed.node()
    with bed.store() as store:
        put(store, range(30, 40))
        store.get([f"k{i}" for i in range(5)])
        assert sorted(row.key for row in store.list("k")) == sorted(f"k{i}".encode() for i in range(40))


def test_flipped_bits_on_the_disk_are_a_miss(bed: Bed) -> None:
    node = bed.node(**ALL_WRITTEN)
    with bed.store() as store:
        put(store, range(10))
        until(lambda: node.metric("ssd_objects") == 10)
    end(node)
    file = bed.directory / "moonpool.ssd"
    at = file.read_bytes().index(content(3)[1000:1100])
    with file.open("r+b") as disk:
        disk.seek(at)
        disk.write(bytes([content(3)[1000] ^ 1]))
    node = bed.node()
    with bed.store() as store:
        assert store.get("k3") is None
        assert store.exists("k3") is Presence.MISS
        check(store, range(3))
    assert node.metric("ssd_corrupt_total") == 1


def test_a_damaged_file_costs_content_and_nothing_else(bed: Bed, rng: random.Random) -> None:
    node = bed.node(**ALL_WRITTEN)
    with bed.store() as store:
        put(store, range(60))
        until(lambda: node.metric("ssd_objects") == 60)
    end(node)
    file = bed.directory / "moonpool.ssd"
    with file.open("r+b") as disk:
        for _ in range(40):
            disk.seek(65536 + rng.randrange(6 * MIB))
            disk.write(rng.randbytes(600))
    bed.node()
    with bed.store() as store:
        for i in range(60):
            assert store.get(f"k{i}") in (None, content(i))


def test_answers_keep_their_order_while_one_waits_for_the_disk(bed: Bed) -> None:
    node = bed.node()
    with bed.store() as store:
        put(store, range(20))
    end(node)
    bed.node()
    with Wire.open(bed.socket, TOKEN) as wire:
        names = [f"k{i}".encode() for i in range(20)]
        wire.send(w.LOOKUP, w.lookup(wire.space, names, flags=w.PIN), request_id=71)
        wire.send(w.STAT, b"", request_id=72)
        wire.send(w.LOOKUP, w.lookup(wire.space, [b"k0"]), request_id=73)
        answers = [wire.receive() for _ in range(3)]
        assert [answer.request_id for answer in answers] == [71, 72, 73]


def test_a_client_that_dies_while_it_waits_harms_nobody(bed: Bed) -> None:
    node = bed.node()
    with bed.store() as store:
        put(store, range(60))
    end(node)
    node = bed.node()
    for _ in range(20):
        with Wire.open(bed.socket, TOKEN) as wire:
            wire.send(w.LOOKUP, w.lookup(wire.space, [f"k{i}".encode() for i in range(60)], flags=w.PIN))
    until(lambda: node.metric("connections") == 0 and node.metric("ssd_promoting") == 0)
    counters = node.metrics()
    assert counters["objects_pinned"] == counters["pins"] == counters["leased_bytes"] == 0
    assert counters["integrity"]


def test_over_tcp_too(bed: Bed, free_port: int) -> None:
    node = bed.node()
    with bed.store() as store:
        put(store, range(60))
    end(node)
    node = bed.node(listen=[f"127.0.0.1:{free_port}"])
    with Store(f"tcp://127.0.0.1:{free_port}", token=TOKEN) as store:
        assert store.exists("k7") is Presence.HIT
        check(store, range(60))
        assert store.put("k7", content(1)).status is PutStatus.EXISTS
    assert node.metric("ssd_promoted_total") == 60


def test_several_directories_share_the_objects(bed: Bed, tmp_path: Path) -> None:
    places = [[str(tmp_path / f"disk{i}"), 32 * MIB] for i in range(3)]

    def node() -> NodeProcess:
        node = NodeProcess(
            bed.socket, tenants=[["default", 32 * MIB]], ssd=places, ssd_segment_bytes=MIB, **ALL_WRITTEN
        )
        bed.nodes.append(node)
        return node

    first = node()
    with bed.store() as store:
        put(store, range(90))
        until(lambda: first.metric("ssd_objects") == 90)
    end(first)
    assert all(os.path.getsize(f"{place}/moonpool.ssd") <= size for place, size in places)
    places.reverse()
    node()
    with bed.store() as store:
        check(store, range(90))


def test_two_nodes_on_one_directory(bed: Bed, runtime_dir: Path) -> None:
    bed.node()
    with pytest.raises(Error, match="is in use by another node; give each node an SSD directory of its own"):
        _native.Server(
            str(runtime_dir / "other.sock"),
            [("default", 8 * MIB)],
            TOKEN,
            node_settings(),
            ssd=[(str(bed.directory), 64 * MIB)],
        )


def test_a_directory_that_cannot_serve_is_refused_in_one_sentence(runtime_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    cases = {
        str(tmp_path): r"holds files that are not moonpool's \(thesis.txt\); give an empty directory",
        str(tmp_path / "no" / "such"): "making .*/no/such: No such file or directory",
    }
    for directory, why in cases.items():
        with pytest.raises(Error, match=why):
            _native.Server(
                str(runtime_dir / "n.sock"),
                [("default", 8 * MIB)],
                TOKEN,
                node_settings(),
                ssd=[(directory, 64 * MIB)],
            )
    with pytest.raises(Error, match="needs at least"):
        _native.Server(
            str(runtime_dir / "n.sock"),
            [("default", 8 * MIB)],
            TOKEN,
            node_settings(),
            ssd=[(str(tmp_path / "d"), MIB)],
        )


def test_the_setting() -> None:
    config = Config(node=Node(ssd=["/a:1GiB", "/with:colon:512MiB"]))
    assert ssd_directories(config) == [("/a", 1 << 30), ("/with:colon", 512 << 20)]
    for wrong in ("/a", "/a:", ":1GiB", "/a:much"):
        with pytest.raises(ConfigError, match="write DIR:SIZE"):
            ssd_directories(Config(node=Node(ssd=[wrong])))
    with pytest.raises(ConfigError, match="names a directory twice"):
        ssd_directories(Config(node=Node(ssd=["/a:1GiB", "/a/:2GiB"])))
    assert load(env={"MOONPOOL_NODE_SSD": "/a:1GiB,/b:2GiB"}).node.ssd == ["/a:1GiB", "/b:2GiB"]


def test_the_command_line(tmp_path: Path, runtime_dir: Path) -> None:
    options = ["--dram", "16MiB", "--http", "off", "--listen", "off"]
    directories = ["--ssd", f"{tmp_path}/one:64MiB", "--ssd", f"{tmp_path}/two:64MiB"]
    process = subprocess.Popen(
        [sys.executable, "-m", "moonpool", "node", *options, *directories], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert f"SSD {tmp_path}/one:64MiB, {tmp_path}/two:64MiB" in process.stdout.readline().decode()
        with Store(str(runtime_dir / "node-default.sock")) as store:
            put(store, range(10))
            assert store.stat()["ssd_directories"] == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
