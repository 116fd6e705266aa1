"""A master and two nodes whose tenants have keys of their own: what their separation is tested with."""

from __future__ import annotations

import os
from pathlib import Path

from moonpool import Store, _native
from moonpool.core.config.native_settings import master_settings, node_settings
from moonpool.core.config.tenants_file import TenantRow, native_rows, salts_of
from moonpool.core.store.keys import Space

from .store_bed import MIB, TOKEN, until
from .wire_client import AUTH, WELCOME, Wire, auth, mac, text16

SALTS = {"a": "the-salt-of-tenant-a", "b": "the-salt-of-tenant-b"}


def key_of(tenant: str, role: str, number: int = 1) -> bytes:
    return f"the key {number} of {role} {tenant}".encode()


def row(tenant: str, role: str, *numbers: int) -> TenantRow:
    keys = tuple(key_of(tenant, role, number).decode().replace(" ", "-") for number in numbers or (1,))
    return TenantRow(name=tenant, role=role, keys=keys, salt=SALTS[tenant])  # type: ignore[arg-type]


ROWS = [row("a", "reader"), row("a", "writer"), row("a", "admin"), row("b", "writer"), row("b", "admin")]


class TenantsPool:
    """Nodes "one" and "two", each of a host of its own, that serve the tenants a and b."""

    def __init__(self, folder: Path, *, relay: str = "never", salts: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.salts = salts_of(ROWS) if salts is None else salts
        settings = master_settings(suspect_after_s=30.0, gone_after_s=60.0)
        self.master = _native.MasterServer(["127.0.0.1:0"], TOKEN, settings)
        self.nodes: dict[str, _native.Server] = {}
        self.relay = relay
        self.set_rows(ROWS)
        self.master.start()
        for name in ("one", "two"):
            self.node(name)

    @property
    def address(self) -> str:
        return self.master.addresses[0]

    def node(self, name: str, token: bytes = TOKEN) -> _native.Server:
        server = _native.Server(
            str(self.folder / f"{name}.sock"),
            [("default", 2 * MIB), ("a", 16 * MIB), ("b", 16 * MIB)],
            token,
            node_settings(relay=self.relay),
            name=name,
            host_id=f"host-{name}",
            listen=["127.0.0.1:0"],
            master=self.address,
            salts=self.salts,
        )
        server.set_tenants(native_rows(ROWS))
        server.start()
        self.nodes[name] = server
        until(lambda: token != TOKEN or server.metrics()["masters_joined"] == 1)
        return server

    def set_rows(self, rows: list[TenantRow]) -> None:
        for server in (self.master, *self.nodes.values()):
            server.set_tenants(native_rows(rows))

    def place(self, node: str, *, far: bool = False) -> str:
        return f"tcp://{self.nodes[node].addresses[0]}" if far else str(self.folder / f"{node}.sock")

    def store(self, tenant: str, token: bytes, node: str = "one", *, far: bool = False) -> Store:
        return Store(self.place(node, far=far), tenant=tenant, token=token, timeout_s=20.0)

    def directory(self, tenant: str, token: bytes) -> _native.DirectoryClient:
        return _native.DirectoryClient(self.address, token, tenant, timeout_s=10.0)

    def told(self, rows: int) -> None:
        """Waits until the master knows of so many copies."""
        until(lambda: self.master.metrics()["directory_rows"] == rows)

    def close(self) -> None:
        for server in self.nodes.values():
            assert server.check_integrity()
            server.stop()
        self.master.stop()


def to_master_by_node(path: str, tenant: bytes, key: bytes) -> Wire:
    """A connection to a node's socket for questions to its master."""
    wire = Wire.dial(path)
    greeting = wire.receive().body
    nonce = os.urandom(32)
    proof = mac(b"client", key, greeting[:32], nonce, greeting[32:], tenant + b"\0directory")
    wire.send(AUTH, auth(tenant, nonce, proof) + text16(b"directory"), request_id=1)
    welcome = wire.receive()
    assert welcome.kind == WELCOME, welcome
    return wire


def secret(tenant: str, role: str, number: int = 1) -> bytes:
    """As the row has it."""
    return key_of(tenant, role, number).replace(b" ", b"-")


def hash_without_salt(tenant: str, key: bytes) -> bytes:
    """What any process can compute that knows the tenant, the default namespace and the key."""
    space = Space(tenant, "default", b"")
    return _native.key_hash(space.tenant, space.namespace, space.fingerprint, key)
