"""The wall clock of hosts jumps, by years and back: nobody is suspected, nothing expires, no wait ends early.

A small preloaded library lies about CLOCK_REALTIME to the processes of a host. The monotonic clock jumps on
no living system; what the master makes of a tick that comes late is tested without processes (tests/native).
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from .bed import Cluster, until
from .hosts import Host
from .puppet import unless_lost

SOURCE = Path(__file__).with_name("clock_shim.c")
JUMPS = (3600, -3600, 10 * 365 * 86400, -5 * 365 * 86400, 0)


class WallClock:
    """Of all processes that start in the host after this."""

    def __init__(self, host: Host, library: Path) -> None:
        place = host.path("/tmp/clock")
        shutil.copy(library, host.path("/tmp/clock_shim.so"))
        place.write_bytes(struct.pack("<q", 0))
        with place.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 8)
        host.env |= {"LD_PRELOAD": "/tmp/clock_shim.so", "CLOCK_SHIM": "/tmp/clock"}

    def jump(self, seconds: int) -> None:
        """The clock is off by so many seconds from now on."""
        self._shared[:8] = struct.pack("<q", seconds)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    out = tmp_path_factory.mktemp("shim") / "clock_shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", out, SOURCE, "-ldl"], check=True)
    return out


@pytest.fixture
def clocks(cluster: Cluster, library: Path) -> dict[str, WallClock]:
    return {name: WallClock(cluster.host(name), library) for name in ("m", "a", "b")}


def test_the_library_lies(cluster: Cluster, clocks: dict[str, WallClock]) -> None:
    program = "import time; m = time.monotonic(); print(int(time.time()), m < 1e8)"
    shown = []
    for seconds in (0, 10**9):
        clocks["a"].jump(seconds)
        process = cluster.host("a").start("now", [sys.executable, "-c", program])
        assert process.wait() == 0
        shown.append(process.text().splitlines()[-1].split())  # nsenter, still outside, finds no library
    assert 10**9 <= int(shown[1][0]) - int(shown[0][0]) < 10**9 + 60
    assert shown[1][1] == "True"


def test_clocks_jump_and_nobody_notices(cluster: Cluster, clocks: dict[str, WallClock]) -> None:
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    on_a.put(["a"], 10_000)
    on_b.put(["b"], 10_000)
    cluster.found(["a", "b"])
    assert on_a.longest_prefix(["a", "b"])["blocks"] == 2  # a pin at each, held throughout
    epochs = {row.name: row.incarnation for row in cluster.members()}
    joins = [node.metric("master_joins_total") for node in (a, b)]
    for host in ("m", "a", "b"):
        for seconds in JUMPS:
            clocks[host].jump(seconds)
            beats = [node.metric("master_beats_total") for node in (a, b)]
            until(lambda beats=beats: b.metric("master_beats_total") > beats[1] + 3)
            until(lambda beats=beats: a.metric("master_beats_total") > beats[0] + 3)
            assert cluster.states() == {a.name: "alive", b.name: "alive"}
            assert on_a.has(["a", "b"], 10_000)
            assert on_b.has(["a", "b"], 10_000)
            assert on_a.put([f"{host}{seconds}"], 1000, replicas=2)[0][2] == 2
    assert [node.metric("master_joins_total") for node in (a, b)] == joins
    assert {row.name: row.incarnation for row in cluster.members()} == epochs
    assert [node.metric("objects_pinned") for node in (a, b)] == [1, 1]
    assert on_a.pinned(["a", "b"]) == on_b.get(["a", "b"])


def test_timeouts_do_not_follow_the_wall_clock(cluster: Cluster, clocks: dict[str, WallClock]) -> None:
    """A client waits for a host that is silent while its clock jumps ahead by a year, and back."""
    a, b = cluster.start("a", "b")
    on_a, on_b = cluster.puppet(a.host, timeout_s=1.0), cluster.puppet(b.host)
    on_b.put(["b"], 1000)
    cluster.found(["b"])
    for seconds in (365 * 86400, -365 * 86400):
        b.process.stop()
        on_a.begin("get", names=["b"], size=1000, options={})
        clocks["a"].jump(seconds)
        unless_lost(on_a.end)
        print(f"{on_a.seconds:.3f} s")
        assert on_a.seconds < 5
        b.process.resume()
        until(lambda: on_a.has(["b"], 1000))
