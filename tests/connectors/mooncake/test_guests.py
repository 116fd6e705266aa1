"""Guests without a node, and the share of the disk that each segment's SSD takes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mooncake import _ssd
from mooncake.store import MooncakeDistributedStore

from tests.core.master_bed import MasterProcess
from tests.core.store_bed import MIB, until

HOST, P2P = "127.0.0.1", "P2PHANDSHAKE"


def test_a_guest_whose_node_is_gone_is_told_to_wait(keys: Callable[[int], list[str]]) -> None:
    """-200 at once, and as long as there is none: not -900, for which nobody slows down."""
    names = keys(40)
    there = MasterProcess()
    try:
        owner, guest = MooncakeDistributedStore(), MooncakeDistributedStore()
        assert owner.setup(HOST, P2P, 16 * MIB, 0, "tcp", "", there.address) == 0
        assert guest.setup(HOST, P2P, 0, 0, "tcp", "", there.address) == 0
        assert guest.put(names[0], b"x") == 0
        owner.close()
        array = np.ones(8, np.uint8)
        at = array.ctypes.data
        for key in names[1:]:
            assert guest.put(key, b"x") == -200
            assert guest.put_from(key, at, 8) == -200
            assert guest.batch_put_from([key, key], [at, at], [8, 8]) == [-200, -200]
            assert guest.upsert(key, b"x") == -200
        assert guest.put_batch(names, [b"x"] * len(names)) == -200
        assert guest.is_exist(names[0]) == -1
        again = MooncakeDistributedStore()
        assert again.setup(HOST, P2P, 16 * MIB, 0, "tcp", "", there.address) == 0
        assert until(lambda: guest.put(names[1], b"x") == 0)
        for store in (again, guest):
            store.close()
    finally:
        there.close()


def test_a_second_ssd_has_room_beside_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MOONPOOL_SSD_SIZE: the first took 80 % of the disk at once."""
    disk, used = 100 << 30, 0
    monkeypatch.setattr(
        "mooncake._ssd.shutil.disk_usage",
        lambda _: shutil._ntuple_diskusage(disk, used, disk - used),
    )
    monkeypatch.delenv("MOONPOOL_SSD_SIZE")
    sizes = []
    for _ in range(4):
        sizes.append(_ssd.ssd_bytes(tmp_path))
        used += sizes[-1]
    assert sizes[0] == disk // 5
    assert min(sizes) >= disk // 10
    disk, used = 10 << 40, 0
    assert _ssd.ssd_bytes(tmp_path) == 64 << 30
    monkeypatch.setenv("MOONPOOL_SSD_SIZE", "9TiB")
    assert _ssd.ssd_bytes(tmp_path) == int(disk * 0.8)
