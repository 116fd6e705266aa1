"""What an engine tells of the rails to a peer: over two NICs of the software libibverbs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool import PeerRail, Segment, TransferEngine
from tests import soft_verbs

from .store_bed import MIB, TOKEN, until

pytestmark = pytest.mark.skipif(soft_verbs.COMPILER is None, reason="needs a C++ compiler")


class Pair:
    """Two engines, and memory of both."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        options = {"token": TOKEN, "metadata": "", "transports": ["rdma"], "rdma_library": str(library)}
        self.here, self.there = TransferEngine("here", **options), TransferEngine("there", **options)
        self.mine, self.theirs = self.here.allocate(8 * MIB), self.there.allocate(8 * MIB)
        self.peer = self.open()

    def open(self) -> Segment:
        return self.here.open(self.there.addresses[0])

    def write(self) -> None:
        self.here.write(self.peer, self.mine, self.theirs.address, 8 * MIB)

    def rails(self) -> dict[str, PeerRail]:
        (path,) = (path for path in self.here.paths(self.peer) if path.transport == "rdma")
        return {rail.port: rail for rail in path.rails}

    def counted(self, what: str) -> dict[str, int]:
        """Of metrics(), by port."""
        begin = f'rdma_rail_{what}{{port="'
        return {
            name.removeprefix(begin).removesuffix('"}'): value
            for name, value in self.here.metrics().items()
            if name.startswith(begin)
        }


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # 1 GB/s each: one rail alone could not carry what both do.
    monkeypatch.setenv("MOONPOOL_SOFT_VERBS", "devices=2 speed0=1000 speed1=1000")
    monkeypatch.setenv("MOONPOOL_SOFT_VERBS_FILE", str(tmp_path / "wire"))
    made = Pair(soft_verbs.compile_library(tmp_path))
    yield made
    made.here.close()
    made.there.close()


def test_each_rail_says_what_it_carried(pair: Pair) -> None:
    before = pair.rails()
    assert list(before) == ["soft0:1", "soft1:1"]
    for rail in before.values():
        assert (rail.state, rail.why) == ("down", "it was not used yet")
        assert (rail.bytes, rail.pieces, rail.faults, rail.bytes_per_s) == (0, 0, 0, 0)
    for _ in range(4):
        pair.write()
    after = pair.rails()
    assert sum(rail.bytes for rail in after.values()) == 4 * 8 * MIB
    for port, rail in after.items():
        assert (rail.state, rail.why, rail.faults) == ("up", "", 0)
        assert rail.path.startswith(f"{port} ")
        assert rail.bytes > 0
        assert rail.bytes / MIB <= rail.pieces <= rail.bytes / 4096
        assert rail.bytes_per_s > 0
    assert pair.counted("bytes_total") == {port: rail.bytes for port, rail in after.items()}
    assert pair.counted("pieces_total") == {port: rail.pieces for port, rail in after.items()}
    assert pair.counted("faults_total") == {"soft0:1": 0, "soft1:1": 0}
    assert pair.counted("connections") == {"soft0:1": 1, "soft1:1": 1}
    # Other transports have none.
    assert [path.rails for path in pair.here.paths(pair.peer) if path.transport == "tcp"] == [()]


def test_the_counters_of_ports_outlive_a_peer(pair: Pair) -> None:
    pair.write()
    counted = pair.counted("bytes_total")
    pair.peer.close()
    until(lambda: set(pair.counted("connections").values()) == {0})
    assert pair.counted("bytes_total") == counted
    pair.peer = pair.open()
    assert [rail.bytes for rail in pair.rails().values()] == [0, 0]
    pair.write()
    assert sum(pair.counted("bytes_total").values()) == 2 * 8 * MIB


def test_a_rail_that_was_left_says_why(pair: Pair) -> None:
    pair.write()
    before = pair.rails()
    pair.library.soft_verbs_port(1, 0)
    until(lambda: pair.rails()["soft1:1"].state == "down")  # the NIC tells by itself
    pair.write()
    after = pair.rails()
    assert after["soft0:1"].bytes == before["soft0:1"].bytes + 8 * MIB
    assert after["soft1:1"].bytes == before["soft1:1"].bytes
    assert after["soft1:1"].state == "down"
    assert after["soft1:1"].why == "the port soft1:1 is down"
    assert after["soft1:1"].faults == 1
    assert pair.counted("faults_total") == {"soft0:1": 0, "soft1:1": 1}
    assert pair.counted("connections") == {"soft0:1": 1, "soft1:1": 0}
