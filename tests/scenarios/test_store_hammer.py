"""Several processes on the same few keys of a small arena: constant replacing, removing and evicting under
readers. Every object names its key in each of its words, so a torn or foreign byte cannot hide."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool import Store

from ..core.store_bed import MIB, TOKEN, NodeProcess, Puppet
from ..core.store_puppet import STAMP, check_stamped

OPERATIONS = 60_000  # of each process


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[NodeProcess]:
    node = NodeProcess(runtime_dir / "node-t.sock", tenants=[["default", 2 * MIB]], slab_bytes=64 << 10)
    yield node
    node.close()


def test_a_large_object_is_replaced_while_it_is_copied(runtime_dir: Path) -> None:
    """A copy takes longer than a replacement, whose memory is that of an old generation: almost every read is
    overtaken, and must notice."""
    size = 4 * MIB
    node = NodeProcess(runtime_dir / "node-t.sock", tenants=[["default", 16 * MIB]])
    rewriter = Puppet("rewriter", node.socket_path, TOKEN.decode(), size)
    assert rewriter.hear() == "ready"
    seen = set()
    into = bytearray(size)
    with Store(str(node.socket_path), token=TOKEN) as store:
        for _ in range(200):
            if store.get("large", into) is None:
                continue
            check_stamped(0, into)
            seen.add(bytes(into[:STAMP]))
    print(f"{len(seen)} generations seen in 200 reads")
    assert len(seen) > 10
    rewriter.close()
    assert node.is_sound()
    node.close()


def test_no_torn_or_foreign_byte(node: NodeProcess, rng: random.Random) -> None:
    began = time.monotonic()
    processes = [
        Puppet("hammer", node.socket_path, TOKEN.decode(), rng.randrange(1 << 30), OPERATIONS, 200)
        for _ in range(4)
    ]
    for _ in range(20):
        assert node.is_sound()
    totals: dict[str, int] = {}
    for process in processes:
        for name, count in process.hear(100).items():
            totals[name] = totals.get(name, 0) + count
    print(f"{4 * OPERATIONS} operations in {time.monotonic() - began:.1f} s: {totals}")
    metrics = node.metrics()
    assert metrics["integrity"]
    assert metrics["evicted_total"] > 1000
    assert metrics["protocol_errors_total"] == 0
    assert all(totals[name] > 100 for name in ("put", "exists", "hit", "miss", "view", "removed", "prefix"))
    for process in processes:
        process.close()
    metrics = node.metrics()
    assert metrics["integrity"]
