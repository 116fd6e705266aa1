"""Large objects over TCP on a path that is slow, stalls or ends: deadlines count from the last byte that
moved, and a peer that stops in the middle of a body is noticed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool import STORED, Store, _native
from moonpool.core.config.native_settings import node_settings
from moonpool.core.errors import Timeout, Unavailable

from .engine_bed import Relay, timed
from .store_bed import MIB, TOKEN, until

SIZE = MIB + 13  # more than what a caller polls for, and than the relay's buffer
DEADLINE_S = 1.2  # all of it is one process, which stands still for a moment on a busy machine
SLOW = SIZE / (2.5 * DEADLINE_S)  # bytes a second: a whole object takes more than two deadlines


@pytest.fixture
def way(tmp_path: Path) -> Iterator[Relay]:
    """To a node, over TCP."""
    server = _native.Server(
        str(tmp_path / "node.sock"), [("default", 64 * MIB)], TOKEN, node_settings(), listen=["127.0.0.1:0"]
    )
    server.start()
    with Relay(server.addresses[0], receive_bytes=64 << 10) as relay:
        yield relay
    assert server.check_integrity()
    server.stop()


def open_store(way: Relay, timeout_s: float = DEADLINE_S) -> Store:
    return Store(f"tcp://{way.address}", token=TOKEN, timeout_s=timeout_s)


def test_what_trickles_is_waited_for(way: Relay) -> None:
    data, into = random.Random(4).randbytes(SIZE), bytearray(SIZE)
    with open_store(way) as store:
        way.pace(SLOW)
        began_s = time.monotonic()
        assert store.put("k", data) == STORED
        put_s = time.monotonic() - began_s
        assert store.get("k", into) == SIZE
        get_s = time.monotonic() - began_s - put_s
    assert into == data
    assert min(put_s, get_s) > 1.5 * DEADLINE_S  # else this tested nothing


def test_a_node_that_stops_in_the_middle_of_an_answer(way: Relay) -> None:
    with open_store(way) as store:
        assert store.put("k", bytes(SIZE)) == STORED
        way.stall_after(SIZE // 4)
        timed("get", lambda: store.get("k", bytearray(SIZE)), 20, Timeout)
        assert way.stalled


def test_a_node_that_takes_no_more_of_a_put(way: Relay) -> None:
    with open_store(way) as store:
        way.stall_after(SIZE // 4)
        timed("put", lambda: store.put("k", bytes(SIZE)), 20, Timeout)
        assert way.stalled


def test_a_node_that_took_a_whole_put_and_says_nothing(way: Relay) -> None:
    """All bytes have left the caller: then only the answer is progress."""
    with open_store(way) as store:
        way.stall_after(SIZE - (32 << 10))
        timed("put", lambda: store.put("k", bytes(SIZE)), 20, Timeout)
        assert way.stalled


def test_a_connection_that_ends_in_the_middle_of_an_answer(way: Relay) -> None:
    def cut() -> None:
        until(lambda: way.stalled)
        way.cut()

    with open_store(way, timeout_s=60) as store:
        assert store.put("k", bytes(SIZE)) == STORED
        way.stall_after(SIZE // 4)
        cutter = threading.Thread(target=cut)
        cutter.start()
        timed("get", lambda: store.get("k", bytearray(SIZE)), 30, Unavailable)  # not after the deadline
        cutter.join()
