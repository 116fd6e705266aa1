"""A cluster as `moonpool up` starts one: a master and two nodes that count as two hosts, and what they
survive.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool import Store

from ..core.store_bed import until
from .hosts import TWO_HOSTS
from .up_bed import Command

pytest.importorskip("moonpool._native")


class Cluster:
    """The running command, and a store over each node."""

    def __init__(self, folder: Path) -> None:
        file = folder / "up.toml"
        file.write_text(TWO_HOSTS)
        self._folder = folder
        self.command = Command(file)
        self.command.until("all is up")
        self.a = Store(str(folder / "node-a.sock"))
        self.b = Store(str(folder / "node-b.sock"))

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._folder / "up.json").read_text())
        return found

    def metrics(self, node: int) -> dict[str, int]:
        url = self.state()["nodes"][node]["url"]
        found: dict[str, int] = json.load(urllib.request.urlopen(f"{url}/stat", timeout=10))["metrics"]
        return found

    def kill(self, process: dict[str, Any]) -> None:
        """kill -9, and until it was started again and is ready."""
        ready = f"{process['name']}: ready after"
        times = self.command.said.count(ready)
        os.kill(process["pid"], signal.SIGKILL)
        self.command.until(ready, times=times + 1)


@pytest.fixture
def cluster(runtime: Path) -> Iterator[Cluster]:
    made = Cluster(runtime)
    yield made
    made.a.close()
    made.b.close()
    made.command.kill()


def get(store: Store, key: str) -> bytes | None:
    """What the store has of ``key``, once it has it: the directory learns of a put a little later."""
    view = until(lambda: store.get(key))
    return None if view is None else bytes(view)


def test_what_one_node_stores_the_other_reads_over_tcp(cluster: Cluster) -> None:
    data = os.urandom(1 << 20)
    assert cluster.a.put("key", data)
    assert get(cluster.b, "key") == data
    until(lambda: cluster.metrics(0)["tcp_sent_bytes_total"] == len(data))
    assert cluster.metrics(1)["served_bytes_total"] == 0
    prefix = cluster.b.longest_prefix(["key", "no"])
    assert (prefix.blocks, prefix.holders) == (1, ("a",))
    state = cluster.state()
    assert state["master"]["state"] == "ready"
    cluster.command.process.send_signal(signal.SIGTERM)
    assert cluster.command.wait() == 0
    assert not Path(state["nodes"][0]["socket"]).exists()


def test_a_copy_on_another_host_survives_its_first_node(cluster: Cluster) -> None:
    data = os.urandom(4096)
    put = cluster.a.put("key", data, replicas=2)
    assert (bool(put), put.replicas) == (True, 2)
    cluster.kill(cluster.state()["nodes"][0])
    assert get(cluster.b, "key") == data
    assert cluster.metrics(0)["objects"] == 0


def test_a_master_that_was_killed_finds_everything_again(cluster: Cluster) -> None:
    assert cluster.a.put("before", b"1")
    assert get(cluster.b, "before") == b"1"
    cluster.kill(cluster.state()["master"])
    assert cluster.a.get("before") == b"1"
    assert cluster.a.put("after", b"2")
    assert get(cluster.b, "after") == b"2"
    assert get(cluster.b, "before") == b"1"
    assert [node["restarts"] for node in cluster.state()["nodes"]] == [0, 0]
    assert cluster.state()["master"]["restarts"] == 1
