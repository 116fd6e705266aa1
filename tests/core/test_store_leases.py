"""Which memory a client leases to write into."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool import _native
from moonpool.core.config.native_settings import node_settings

from .store_bed import MIB, until

TOKEN = b"a token of this test"
SLAB = 64 << 10


@pytest.fixture
def socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:  # sockets have short paths only
        yield str(Path(folder) / "n.sock")


@pytest.fixture
def server(socket: str) -> Iterator[_native.Server]:
    server = _native.Server(socket, [("default", 16 * MIB)], TOKEN, node_settings(slab_bytes=SLAB))
    server.start()
    yield server
    assert server.check_integrity()
    server.stop()


@pytest.fixture
def client(server: _native.Server, socket: str) -> Iterator[_native.Client]:
    client = _native.Client(socket, TOKEN, timeout_s=5)
    client.connect()
    yield client
    client.close()


def leased(server: _native.Server) -> int:
    return server.metrics()["leased_bytes"]


@pytest.mark.parametrize("size", [SLAB // 2, SLAB - 100, SLAB, 3 * SLAB])
def test_a_large_batch_has_a_slab_of_its_own(
    size: int, server: _native.Server, client: _native.Client
) -> None:
    """So nobody else waits while it is leased, and what others fill together stays theirs."""
    client.put(["small"], [bytes(1000)])
    assert leased(server) == SLAB
    names = [f"large {i}" for i in range(9)]
    assert client.put(names, [bytes(size)] * 9)[0] == b"\0" * 9
    client.exists(names)  # what was given back goes along
    assert until(lambda: leased(server) == SLAB)
    client.put(["small too"], [bytes(1000)])
    assert leased(server) == SLAB


def test_batches_of_many_threads_keep_their_bytes(server: _native.Server, client: _native.Client) -> None:
    seed = 11
    print(f"seed {seed}")
    wrong: list[str] = []

    def work(number: int) -> None:
        source = random.Random(seed + number)
        for turn in range(30):
            names = [f"{number} {turn} {i}" for i in range(8)]
            values = [source.randbytes(source.choice([10, 5000, SLAB // 2, SLAB])) for _ in names]
            outcomes = client.put(names, values)[0]
            views = client.get_views(names, verify=True)
            for name, value, view, outcome in zip(names, values, views, outcomes, strict=True):
                if view is not None and bytes(view) != value:
                    wrong.append(name)
                if outcome == 0 and turn == 29 and view is None:
                    wrong.append(f"{name} is gone")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


def test_a_batch_larger_than_the_pool_makes_room_in_itself(
    server: _native.Server, client: _native.Client
) -> None:
    """What it wrote is committed and may go; no lease of before stands in the way."""
    names = [f"{i}" for i in range(400)]
    outcomes = client.put(names, [bytes(SLAB)] * 400)[0]
    assert outcomes == b"\0" * 400
    assert client.exists(names[-1:]) == b"\1"
