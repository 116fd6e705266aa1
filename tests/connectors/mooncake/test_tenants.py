"""A segment whose tenant has a key and a salt of its own (docs/security.md, keys of tenants)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mooncake.store import MooncakeDistributedStore

import moonpool
from moonpool.core.config.tenants_file import TenantRow, tenants_text
from moonpool.core.service import tenant_keys
from tests.core.master_bed import MasterProcess
from tests.core.store_bed import MIB, until
from tests.token_file import TokenFile

SALT = "the-salt-of-tenant-a"
WRITER = TenantRow(name="a", role="writer", keys=("the-key-of-writer-a",), salt=SALT)
READER = TenantRow(name="a", role="reader", keys=("the-key-of-reader-a",), salt=SALT)


def test_a_segment_serves_keys_of_tenants_and_tells_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: Callable[[int], list[str]]
) -> None:
    monkeypatch.setattr(tenant_keys, "FOLLOW_S", 0.05)
    file = TokenFile(tmp_path / "tenants.toml", tenants_text([WRITER, READER]).encode())
    monkeypatch.setenv("MOONPOOL_CLUSTER_TENANTS_FILE", str(file.path))
    one, other = keys(2)
    master = MasterProcess()
    store = MooncakeDistributedStore()
    try:
        given = ("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, 0, "tcp", "", master.address)
        assert store.setup(*given, tenant_id="a") == 0
        socket = store._access.socket
        assert socket.exists()
        assert not Path(f"{socket}.token").exists()
        assert store.put(one, b"bytes") == 0
        (found,) = store.get_replica_desc(one)
        assert found.get_memory_descriptor().buffer_descriptor.size == 5

        def open_with(row: TenantRow) -> moonpool.Store:
            key = row.keys[0].encode()
            return moonpool.Store(str(socket), tenant="a", namespace="mooncake", token=key, timeout_s=20.0)

        with open_with(WRITER) as writer, open_with(READER) as reader:
            assert bytes(reader.get(one)) == b"bytes"
            assert writer.put(other, b"more")
            assert store.get(other) == b"more"
        file.replace(tenants_text([WRITER]).encode())
        until(lambda: _is_refused(open_with, READER), 60.0)
        open_with(WRITER).close()
    finally:
        store.close()
        master.close()


def _is_refused(open_with: Callable[[TenantRow], Any], row: TenantRow) -> bool:
    try:
        open_with(row).close()
    except moonpool.AuthError:
        return True
    return False
