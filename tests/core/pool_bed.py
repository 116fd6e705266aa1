"""A master, or one of each range, and nodes in one process, a host each: what a store over several nodes is
tested with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moonpool import Store, _native
from moonpool.core.config.native_settings import master_settings, node_settings

from .store_bed import MIB, TOKEN, until

PATIENCE_S = 30.0  # of which the master gets a quarter


class Pool:
    """A master of each range and nodes with a host each; ``store(name)`` is a client of that node."""

    def __init__(self, folder: Path, ranges: int = 1) -> None:
        self.folder = folder
        # Nodes end here by stop(), which the master hears at once: silence is a machine that pauses.
        settings = master_settings(suspect_after_s=PATIENCE_S, gone_after_s=2 * PATIENCE_S)
        self.masters: list[_native.MasterServer] = []
        for index in range(ranges):
            master = _native.MasterServer(["127.0.0.1:0"], TOKEN, settings, range=(index, ranges))
            master.start()
            self.masters.append(master)
            # Versions begin with the ms of the start: all of a range are later than those of the one before.
            started_ms = time.time_ns() // 1_000_000
            until(lambda started_ms=started_ms: time.time_ns() // 1_000_000 > started_ms)
        self.master = self.masters[0]
        self.nodes: dict[str, _native.Server] = {}
        self.stores: list[Store] = []

    def node(
        self,
        name: str,
        mib: int = 16,
        *,
        called: str = "",
        host: str = "",
        ssd: str = "",
        masters: Sequence[str] = (),
        joins: int = 0,
        **settings: Any,
    ) -> _native.Server:
        """``ssd``: a directory. ``masters``: addresses by which it reaches them; ``joins``: how many of them,
        by default all. ``settings``: of the section [node].
        """
        server = _native.Server(
            str(self.folder / f"{name}.sock"),
            [("default", mib * MIB)],
            TOKEN,
            node_settings(pins_share_max=1.0, **settings),  # a node is filled with pins here
            name=called or name,
            host_id=host or f"host-{name}",
            listen=["127.0.0.1:0"],
            master=";".join(masters or [master.addresses[0] for master in self.masters]),
            ssd=[(ssd, 256 * MIB)] if ssd else [],
        )
        server.start()
        self.nodes[name] = server
        until(lambda: server.metrics()["masters_joined"] == (joins or len(self.masters)))
        return server

    def store(self, name: str) -> Store:
        # Of the 2 s of a user the master gets half a second; what is late then is unknown, or has no copies.
        self.stores.append(Store(str(self.folder / f"{name}.sock"), token=TOKEN, timeout_s=PATIENCE_S))
        return self.stores[-1]

    def total(self, metric: str) -> int:
        return sum(server.metrics()[metric] for server in self.nodes.values())

    def told(self) -> None:
        """Waits until the directory knows of every object, and of no other."""

        def level() -> bool:
            # The counts alone are level, too, while one object's row and another's removal are on their way.
            masters = [master.metrics() for master in self.masters]
            rows = ("rows_added_total", "rows_removed_total", "rows_void_total")
            applied = sum(master[name] for master in masters for name in rows)
            return (
                self.total("master_rows_waiting") == 0
                and self.total("master_rows_sent_total") == applied
                and sum(master["directory_rows"] for master in masters) == self.total("objects")
            )

        until(level)

    def close(self) -> None:
        for store in self.stores:
            store.close()
        for server in self.nodes.values():
            server.stop()
        for master in self.masters:
            master.stop()


def fill(store: Store, name: str, n: int) -> object:
    """n objects of 1 MiB that no node can evict while the answer is kept."""
    keys = [f"{name}{i}" for i in range(n)]
    for key in keys:
        store.put(key, bytes(MIB))
    _, pin = store.exists(keys, pin=True)
    return pin


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path)
    yield made
    assert all(server.check_integrity() for server in made.nodes.values())
    made.close()
