"""What changes on a node while a client's frame is under way: no key ends with two contents, or with none."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from moonpool import STORED, Presence, Store, _native
from moonpool.core.store.types import PutStatus

from ..cluster.tcp_wire import TcpWire
from . import wire_client as w
from .ssd_bed import BLOCK, Bed, bed, content, end, put
from .store_bed import MIB, PROTOCOL, TOKEN, NodeProcess, until
from .wire_client import Wire

__all__ = ["bed"]


def call(port: int) -> TcpWire:
    wire = TcpWire(socket.create_connection(("127.0.0.1", port), 10.0))
    wire.prove(TOKEN, b"store")
    (wire.space,) = struct.unpack("<I", wire.ask(w.OPEN_SPACE, w.open_space(b"default", b"")).body)
    return wire


def row(name: str, data: bytes) -> tuple[int, bytes, bytes, bytes]:
    return _native.crc32c(data), name.encode(), b"", data


def outcomes(answer: w.Frame) -> list[int]:
    (n,) = struct.unpack_from("<I", answer.body)
    return list(answer.body[4 : 4 + n])


def test_what_a_put_evicts_itself_is_not_told_as_there(runtime_dir: Path, free_port: int) -> None:
    node = NodeProcess(
        runtime_dir / "node-p.sock", tenants=[["default", 8 * MIB]], listen=[f"127.0.0.1:{free_port}"]
    )
    with Store(str(node.socket_path), token=TOKEN) as store, call(free_port) as wire:
        for i in range(16):  # more than there is room for
            assert store.put(f"k{i}", content(i, MIB)) == STORED
        oldest = min(int(entry.key[1:]) for entry in store.list())  # a list is no use of them
        new = content(100, 2 * MIB)
        kept = content(oldest, MIB)
        answer = wire.ask(w.PUT, w.put(wire.space, [row(f"k{oldest}", kept), row("new", new)]))
        assert outcomes(answer) == [w.REFUSED, w.STORED]
        assert store.get(f"k{oldest}") is None
        assert store.get("new") == new
        assert node.metric("put_refused_total") == 1
    assert node.is_sound()
    node.close()


def test_a_slow_put_of_what_went_to_the_ssd_meanwhile(bed: Bed, free_port: int) -> None:
    node = bed.node(listen=[f"127.0.0.1:{free_port}"], ssd_clean_share=1.0)
    with bed.store() as store, call(free_port) as wire:
        frame = w.frame(w.PUT, w.put(wire.space, [row("k0", content(1000))]), request_id=5)
        wire.socket.sendall(frame[:-100])
        until(lambda: node.metric("leased_bytes") > 0)
        for begin in range(0, 320, 32):  # 20 MiB through 8
            put(store, range(begin, begin + 32))
            until(lambda: node.metric("ssd_dirty_objects") == 0 and node.metric("ssd_writes_waiting") == 0)
        assert node.metric("evicted_total") > 100
        wire.socket.sendall(frame[-100:])
        assert outcomes(wire.receive()) == [w.EXISTS]
        assert store.get("k0") == content(0)
    assert node.is_sound()


@pytest.mark.parametrize("over_tcp", [False, True])
def test_a_replacement_that_is_refused_costs_nothing(bed: Bed, free_port: int, over_tcp: bool) -> None:
    node = bed.node()
    with bed.store() as store:
        put(store, range(1))
    end(node)
    node = bed.node(objects_max=4, listen=[f"127.0.0.1:{free_port}"])
    url = f"tcp://127.0.0.1:{free_port}" if over_tcp else str(bed.socket)
    with bed.store() as store, Store(url, token=TOKEN) as other, Wire.open(bed.socket, TOKEN) as pins:
        put(store, range(10, 14))
        _, hits, _ = pins.lookup([f"k{i}".encode() for i in range(10, 14)], flags=w.PIN)
        assert hits == 4
        assert other.put("k0", content(7), replace=True).status is PutStatus.REFUSED
        pins.close()
        until(lambda: node.metric("objects_pinned") == 0)
        assert store.get("k0") == content(0)
        assert other.put("k0", content(7), replace=True) == STORED
        assert store.get("k0") == content(7)
    end(node)
    bed.node()
    with bed.store() as store:
        assert store.get("k0") == content(7)


def test_the_reason_arrives_before_the_end_of_a_bad_put(bed: Bed, free_port: int) -> None:
    node = bed.node(listen=[f"127.0.0.1:{free_port}"])
    with call(free_port) as wire:
        body = w.put(99, [(0, b"k", b"", os.urandom(BLOCK))])  # a space that was never opened
        wire.socket.sendall(w.frame(w.PUT, body, request_id=3) * 2)
        code, text = wire.receive().error
        assert code == PROTOCOL
        assert "PUT" in text
        assert node.metric("connections") == 1  # closed now, its unread bytes would be a reset: no reason
        wire.socket.sendall(body)
        assert wire.socket.recv(1) == b""
    until(lambda: node.metric("connections") == 0)


def test_a_removal_leaves_what_is_newer_on_the_ssd(bed: Bed, free_port: int) -> None:
    def outcome(wire: Wire, version: int) -> list[int]:
        return outcomes(wire.ask(w.REMOVE, w.remove(wire.space, [b"k"], versions=[version])))

    node = bed.node(listen=[f"127.0.0.1:{free_port}"])
    with call(free_port) as wire:
        put_7 = w.put(wire.space, [row("k", content(1))], version=7)
        assert outcomes(wire.ask(w.PUT, put_7)) == [w.STORED]
    end(node)
    node = bed.node(listen=[f"127.0.0.1:{free_port}"])
    with call(free_port) as wire, bed.store() as store:
        assert outcome(wire, 7) == [0]  # what came after the removal
        assert store.exists("k") is Presence.HIT
        assert outcome(wire, 8) == [1]
        assert store.exists("k") is Presence.MISS
    assert node.metric("ssd_promoted_total") == 0
    end(node)
    bed.node()
    with bed.store() as store:
        assert store.get("k") is None
