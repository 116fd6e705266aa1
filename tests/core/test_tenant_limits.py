"""Limits of tenants over a real node: memory that moves, what a disk keeps, and what is said of it."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool import Store, _native
from moonpool.core.config.native_settings import node_settings
from moonpool.core.config.tenants_file import (
    NativeLimits,
    TenantRow,
    TenantsFile,
    native_limits,
    tenants_text,
)
from moonpool.core.errors import InvalidArgument, Unavailable
from moonpool.core.service import metrics, tenant_keys
from moonpool.core.service.tenant_keys import TenantKeys
from moonpool.core.store.types import PutStatus
from tests.token_file import TokenFile

from .store_bed import MIB, TOKEN, until


class Node:
    """A node with the tenants a and b of 16 MiB each, and one client of each."""

    def __init__(self, folder: Path, limits: dict[str, tuple[int | None, ...]], **more: object) -> None:
        self._others = _open_files("moonpool-arena-")
        socket = str(folder / "node.sock")
        sizes = [("default", 2 * MIB), ("a", 16 * MIB), ("b", 16 * MIB)]
        rows = [_native_row(name, given) for name, given in limits.items()]
        settings = node_settings(ssd_segment_bytes=4 * MIB, ssd_clean_share=1.0)
        self.server = _native.Server(socket, sizes, TOKEN, settings, limits=rows, **more)  # type: ignore[arg-type]
        self.server.start()
        self.stores = {name: Store(socket, tenant=name, token=TOKEN, timeout_s=20.0) for name in ("a", "b")}

    def put(self, tenant: str, count: int, of: str = "k") -> None:
        """Objects of 512 KiB, each with other bytes; each is read again at once."""
        store = self.stores[tenant]
        for number in range(count):
            content = bytes([number % 256, ord(tenant)]) * (MIB // 4)
            assert store.put(f"{of}{number}", content)
            assert store.get(f"{of}{number}") == content

    def fill_disk(self, tenant: str) -> None:
        """Puts until the tenant's oldest go from its disk; when that is, is the writer's matter."""

        rounds = itertools.count()

        def dropped() -> bool:
            self.put(tenant, 8, f"more-{next(rounds)}-")
            return self.of(tenant, "ssd_dropped_total") > 0

        self.put(tenant, 60)
        until(dropped, 60.0)

    def hits(self, tenant: str, count: int, of: str = "k") -> int:
        found = 0
        for number in range(count):  # one at a time: what is read is pinned
            content = self.stores[tenant].get(f"{of}{number}")
            found += content is not None
            assert content is None or content == bytes([number % 256, ord(tenant)]) * (MIB // 4)
        return found

    def of(self, tenant: str, name: str) -> int:
        return self.server.metrics()[f'tenant_{name}{{tenant="{tenant}"}}']

    def memory(self, tenant: str) -> int:
        """What the kernel gives the tenant's arena."""
        files = [os.stat(path) for path in _open_files(f"moonpool-arena-{tenant} ") - self._others]
        (blocks,) = {file.st_ino: file.st_blocks for file in files}.values()  # its client has it, too
        return blocks * 512

    def close(self) -> None:
        for store in self.stores.values():
            store.close()
        self.server.stop()


def _native_row(name: str, given: tuple[int | None, ...]) -> NativeLimits:
    first, second, third, fourth, fifth = (*given, *(None,) * (5 - len(given)))
    return (name, first, second, third, fourth, fifth)


def _open_files(name: str) -> set[Path]:
    return {path for path in Path("/proc/self/fd").iterdir() if name in _target(path)}


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


@contextmanager
def node(folder: Path, limits: dict[str, tuple[int | None, ...]], **more: object) -> Iterator[Node]:
    made = Node(folder, limits, **more)
    try:
        yield made
        assert made.server.check_integrity()
    finally:
        made.close()


def test_a_tenant_that_floods_keeps_no_other_from_its_minimum(tmp_path: Path) -> None:
    limits = {"a": (4 * MIB, 28 * MIB, None, None), "b": (8 * MIB, None, None, None)}
    with node(tmp_path, limits) as bed:
        bed.put("a", 60)
        # What b does not use is lent, but for its minimum.
        assert bed.of("a", "dram_bytes") == bed.memory("a") == 24 * MIB
        assert bed.of("b", "dram_bytes") == bed.memory("b") == 8 * MIB
        bed.put("b", 7)
        assert bed.hits("b", 7) == 7
        bed.put("a", 60)
        assert bed.hits("b", 7) == 7
        assert bed.of("b", "evicted_total") == 0
        # More than its minimum it gets from a, until it is at its maximum.
        bed.put("b", 60)
        assert bed.of("b", "dram_bytes") == bed.memory("b") == 16 * MIB
        assert bed.memory("a") == 16 * MIB
        assert bed.of("a", "evicted_for_others_total") > 0
        assert bed.hits("a", 60) > 0


def test_a_tenant_at_its_maximum_evicts_its_own(tmp_path: Path) -> None:
    with node(tmp_path, {"a": (None, 4 * MIB, None, None)}) as bed:
        bed.put("a", 20)
        assert bed.memory("a") == bed.of("a", "dram_max_bytes") == 4 * MIB
        assert 0 < bed.hits("a", 20) <= 8
        assert bed.stores["a"].get("k19") is not None
        bed.put("b", 15)
        assert bed.hits("b", 15) == 15
        assert bed.memory("b") == 16 * MIB


def test_without_limits_nothing_moves(tmp_path: Path) -> None:
    with node(tmp_path, {}) as bed:
        bed.put("a", 40)
        bed.put("b", 4)
        assert bed.memory("a") == bed.memory("b") == 16 * MIB
        assert bed.of("b", "dram_min_bytes") == bed.of("b", "dram_max_bytes") == 16 * MIB


def test_pins_have_a_maximum(tmp_path: Path) -> None:
    with node(tmp_path, {"a": (None, None, None, MIB)}) as bed:
        bed.put("a", 4)
        bed.put("b", 4)
        keys = [f"k{number}" for number in range(4)]
        a, b = bed.stores["a"], bed.stores["b"]
        found, pin = a.exists(keys, pin=True)
        assert sum(each == found[0] for each in found) == 2  # the others are as good as not there
        assert pin is not None
        assert b.exists(keys, pin=True)[0] == [found[0]] * 4
        a.release(pin)
        until(lambda: bed.of("a", "pinned_bytes") == 0)
        assert a.get(keys[3]) is not None


def test_bytes_a_second_have_a_maximum(tmp_path: Path) -> None:
    with node(tmp_path, {}, listen=["127.0.0.1:0"]) as bed:
        near = bed.stores["a"]
        far = Store(f"tcp://{bed.server.addresses[0]}", tenant="a", token=TOKEN, timeout_s=20.0)
        with far:
            assert near.put("small", b"s" * 96)
            bed.server.set_limits([_native_row("a", (None, None, None, None, 1))])
            bed.put("a", 1)  # one object may be larger than what a second brings: the debt is paid in days
            refused = near.put("k1", b"x" * MIB)
            assert not refused
            assert "more than its 1 bytes a second at this node" in refused.reason
            assert not far.put("k1", b"x" * MIB)
            assert far.get("k0") is None
            # By objects of that size clients tell whether larger ones are whole, and remove what is not.
            assert far.put("small", b"s" * 96).status is PutStatus.EXISTS
            assert bytes(far.get("small") or b"") == b"s" * 96
            assert bed.hits("a", 1) == 1  # a process of the node's host reads its memory
            bed.put("b", 4)
            assert bed.of("a", "over_rate_total") >= 3
            assert bed.of("b", "over_rate_total") == 0
            bed.server.set_limits([_native_row("a", (None, None, None, None, 1 << 40))])
            assert far.get("k0") is not None
            assert far.put("k1", b"x" * MIB)
            assert near.put("k2", b"x" * MIB)


def test_a_disk_has_so_much_of_a_tenant_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    disk = [(str(tmp_path / "ssd"), 128 * MIB)]
    limits = {"a": (None, None, 6 * MIB, None)}
    with node(tmp_path, limits, ssd=disk) as bed:
        bed.put("b", 30)
        bed.fill_disk("a")
        until(lambda: bed.of("b", "ssd_bytes") > 15 * MIB)
        assert 2 * MIB < bed.of("a", "ssd_bytes") <= 6 * MIB
        on_disk_of_b = bed.hits("b", 30)
        assert on_disk_of_b == 30
    with node(tmp_path, limits, ssd=disk) as bed:  # what is on the disk counts after a restart
        assert 0 < bed.of("a", "ssd_bytes") <= 6 * MIB
        bed.put("a", 20, "other")
        assert bed.of("a", "ssd_bytes") <= 6 * MIB
        bed.server.set_limits([_native_row("a", (None, None, 0))])
        until(lambda: bed.of("a", "ssd_bytes") == 0)
        assert bed.of("b", "ssd_bytes") > 0


def test_a_clean_stop_writes_what_is_newest_though_the_disk_has_its_most(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    disk = [(str(tmp_path / "ssd"), 128 * MIB)]
    limits = {"a": (None, None, 6 * MIB, None)}
    with node(tmp_path, limits, ssd=disk) as bed:
        bed.fill_disk("a")
        bed.put("a", 8, "last")
    with node(tmp_path, limits, ssd=disk) as bed:
        assert bed.of("a", "ssd_bytes") <= 6 * MIB
        assert bed.hits("a", 8, "last") == 8


@pytest.mark.parametrize("ssd_max", [0, MIB])
def test_what_waits_for_the_disk_does_not_grow_with_puts(tmp_path: Path, ssd_max: int) -> None:
    (tmp_path / "ssd").mkdir()
    limits = {"a": (None, None, ssd_max, None)}
    with node(tmp_path, limits, ssd=[(str(tmp_path / "ssd"), 128 * MIB)]) as bed:
        for number in range(1, 6001):  # three quarters of them go from memory
            assert bed.stores["a"].put(f"k{number}", b"x" * (8 << 10))
            if number % 1000 == 0:
                rows = bed.server.metrics()
                assert rows["ssd_dirty_objects"] <= (2 * rows["objects"] + 1024 if ssd_max else 0)
        assert bed.of("a", "evicted_total") > 3000
        assert bed.of("a", "ssd_bytes") <= ssd_max


def _row(name: str, **limits: int) -> TenantRow:
    return TenantRow(name=name, role="writer", keys=(f"the-key-of-tenant-{name}",), **limits)


def test_limits_follow_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_keys, "FOLLOW_S", 0.02)
    rows = [_row("a", dram_min=4 * MIB), _row("b", dram_min=4 * MIB)]
    file = TokenFile(tmp_path / "tenants.toml", tenants_text(rows).encode())
    limits = {name: tuple(given) for name, *given in native_limits(rows)}
    with node(tmp_path, limits) as bed, caplog.at_level(logging.INFO):
        log = logging.getLogger("moonpool.node")
        followed = TenantKeys(TenantsFile(str(file.path)), bed.server, log, bed.server.set_limits)
        bed.put("a", 14)
        file.replace(tenants_text([_row("a", dram_max=4 * MIB), rows[1]]).encode())
        until(lambda: bed.of("a", "dram_bytes") == 4 * MIB)
        assert bed.memory("a") == 4 * MIB
        # Minimums that the node cannot keep: the limits from before stay, the keys are the new ones.
        file.replace(tenants_text([_row("a", dram_min=40 * MIB), rows[1]]).encode())
        until(lambda: "44.0 MiB in all, and node.dram and node.tenants give" in caplog.text)
        assert "the tenants' limits from before are in use" in caplog.text
        assert bed.of("a", "dram_max_bytes") == 4 * MIB
        file.replace(tenants_text([_row("a"), rows[1]]).encode())
        until(lambda: bed.of("a", "dram_max_bytes") == 16 * MIB)
        followed.close()


def test_limits_that_a_busy_node_did_not_take_are_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_keys, "FOLLOW_S", 0.02)
    file = TokenFile(tmp_path / "tenants.toml", tenants_text([_row("a", dram_min=4 * MIB)]).encode())
    tries = []
    with node(tmp_path, {"a": (4 * MIB, None, None, None)}) as bed, caplog.at_level(logging.INFO):

        def busy_at_first(rows: Sequence[NativeLimits]) -> None:
            tries.append(rows)
            if len(tries) < 4:
                raise Unavailable("the node did not take the tenants' limits in time")
            bed.server.set_limits(rows)

        log = logging.getLogger("moonpool.node")
        followed = TenantKeys(TenantsFile(str(file.path)), bed.server, log, busy_at_first)
        file.replace(tenants_text([_row("a", dram_max=4 * MIB)]).encode())
        until(lambda: bed.of("a", "dram_max_bytes") == 4 * MIB)
        followed.close()
    assert len(tries) == 4
    assert caplog.text.count("in time; that is tried again; the tenants' limits from before are in use") == 1
    assert caplog.text.count("1 rows of tenants are in force") == 1


def test_limits_that_need_a_restart_are_said(tmp_path: Path) -> None:
    with node(tmp_path, {"a": (4 * MIB, None, None, None)}) as bed:
        bed.server.set_limits([_native_row("a", (4 * MIB, 64 * MIB)), _native_row("b", (4 * MIB,))])
        said = [text for _, kind, _, text, _ in bed.server.take_notes() if kind == "limits_later"]
        assert len(said) == 2
        assert said[0].startswith("dram_max of tenant a is above the 16.0 MiB")
        assert said[1].startswith("dram_min and dram_max of tenant b, which had neither when this process")
        assert "they come into force when another process takes over (moonpool node --take-over)" in said[1]


def test_a_node_does_not_start_with_minimums_that_it_cannot_keep(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"dram_min.* 20.0 MiB in all.* give those tenants 16.0 MiB"):
        Node(tmp_path, {"a": (20 * MIB, None, None, None)})


def test_metrics_by_tenant(tmp_path: Path) -> None:
    with node(tmp_path, {"a": (4 * MIB, None, None, None)}) as bed:
        page = metrics.exposition(bed.server).decode()
        assert 'moonpool_node_tenant_dram_min_bytes{tenant="a"} 4.194304e+06' in page
        assert 'moonpool_node_tenant_refused_total{tenant="b"} 0.0' in page
        for name in bed.server.metrics():
            bare, _ = metrics.split_labels(name)
            assert not bare.startswith("tenant") or bare in metrics.DESCRIPTIONS, bare


def test_metrics_of_many_tenants_are_bounded(tmp_path: Path) -> None:
    sizes = [(f"t{number}", MIB) for number in range(300)] + [('quote"d', MIB)]
    server = _native.Server(str(tmp_path / "n.sock"), sizes, TOKEN, node_settings())
    server.start()
    rows = server.metrics()
    server.stop()
    assert (rows["tenants"], rows["tenants_shown"]) == (301, 256)
    assert sum(name.startswith("tenant_dram_bytes{") for name in rows) == 256
