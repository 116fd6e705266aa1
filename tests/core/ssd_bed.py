"""A node process with an SSD tier."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool import STORED, Store

from .store_bed import MIB, TOKEN, NodeProcess

BLOCK = 64 * 1024


class Bed:
    """Nodes, one after the other, on one socket and one directory."""

    def __init__(self, folder: Path, socket: Path) -> None:
        self.directory = folder / "ssd"
        self.socket = socket
        self.nodes: list[NodeProcess] = []

    def node(self, dram: int = 8 * MIB, ssd: int = 128 * MIB, **options: Any) -> NodeProcess:
        self.socket.unlink(missing_ok=True)  # as a killed one left it
        node = NodeProcess(
            self.socket,
            tenants=[["default", dram]],
            ssd=[[str(self.directory), ssd]],
            ssd_segment_bytes=MIB,
            **options,
        )
        self.nodes.append(node)
        return node

    def store(self, **options: Any) -> Store:
        return Store(str(self.socket), token=TOKEN, **{"timeout_s": 10.0, **options})  # the machine may pause

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@pytest.fixture
def bed(tmp_path: Path, runtime_dir: Path) -> Iterator[Bed]:
    bed = Bed(tmp_path, runtime_dir / "node-ssd.sock")
    yield bed
    bed.close()


def end(node: NodeProcess) -> None:
    """As SIGTERM does."""
    assert node.process.stdin is not None
    node.process.stdin.close()
    assert node.process.wait(30) == 0


def content(number: int, size: int = BLOCK) -> bytes:
    return random.Random(number).randbytes(size)


def put(store: Store, numbers: range, size: int = BLOCK) -> None:
    for i in numbers:
        assert store.put(f"k{i}", content(i, size)) == STORED
