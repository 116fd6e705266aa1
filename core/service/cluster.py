"""The nodes of the pool and its masters, as these report to any process with the cluster token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from moonpool.core.errors import Error
from moonpool.core.service.native_core import native_core

if TYPE_CHECKING:
    from types import ModuleType

    from moonpool import _native


class ClusterNode(msgspec.Struct, frozen=True):
    """A node of the cluster; sizes in bytes, of all its tenants. state: alive, joining or suspect."""

    name: str
    host_id: str
    state: str
    address: str
    silent_s: float
    dram_bytes: int
    dram_free_bytes: int
    ssd_bytes: int
    ssd_free_bytes: int
    objects: int


class Cluster(msgspec.Struct, frozen=True):
    """One reading of the membership at ``master``."""

    master: str
    nodes: list[ClusterNode]


class MasterRow(msgspec.Struct, frozen=True):
    """One master. ``role``: owner, standby, acting or superseded; "" where it does not answer, for the reason
    ``why``. ``other``: of an owner the name of its standby, of a standby the address of its owner; "" where
    there is none. ``attached``: that one is there. ``lag_s``: for how long the standby has owed its word, s.
    ``range``: of the shards, as master.range. ``term``: when it began to order removals, ms since 1970; its
    versions are later than those of earlier terms. ``learned``: it is not among the addresses that were asked
    for; another master names it, as it does to nodes and clients.
    """

    address: str
    role: str = ""
    other: str = ""
    attached: bool = False
    is_whole: bool = False
    lag_s: float = 0.0
    nodes: int = 0
    keys: int = 0
    why: str = ""
    range: str = ""
    term: int = 0
    learned: bool = False


def read_masters(
    addresses: str, token: bytes, *, tls: _native.TlsClient | None = None, timeout_s: float = 1.0
) -> list[MasterRow]:
    """Asks each of the masters at ``addresses`` ("host:port", several with commas between, and semicolons
    between ranges), also those that serve no clients, for at most ``timeout_s`` each; then those that these
    name beside them. Raises nothing for one that does not answer; Unavailable where the C++ core is not
    built.
    """
    core = native_core("status")
    listed = [address.strip() for address in addresses.replace(";", ",").split(",")]
    rows, named, own = [], [], set()
    for address in listed:
        row, state = _read_master(core, address, token, timeout_s, tls)
        rows.append(row)
        if state is not None:
            own.add(state.own_address)  # the same master by another name
            named += state.masters
    for address in dict.fromkeys(named):
        if address not in own and address not in listed:
            row, _ = _read_master(core, address, token, timeout_s, tls)
            rows.append(msgspec.structs.replace(row, learned=True))
    return rows


def _read_master(
    core: ModuleType, address: str, token: bytes, timeout_s: float, tls: _native.TlsClient | None
) -> tuple[MasterRow, _native.MasterState | None]:
    """The state is None where it does not answer."""
    try:
        state: _native.MasterState = core.master_state(address, token, timeout_s=timeout_s, tls=tls)
    except Error as error:
        return MasterRow(address, why=str(error)), None
    row = MasterRow(
        address,
        role=state.role,
        other=state.other,
        attached=state.attached,
        is_whole=state.is_whole,
        lag_s=state.lag_s,
        nodes=state.nodes,
        keys=state.keys,
        range="{}/{}".format(*state.range),
        term=state.term,
    )
    return row, state


def read_cluster(
    master: str, token: bytes, *, tls: _native.TlsClient | None = None, timeout_s: float = 1.0
) -> Cluster:
    """Asks the master at ``master`` ("host:port"; of several as in cluster.master), inside ``tls`` or in
    plain. Raises a moonpool Error when it does not answer.
    """
    client = native_core("status").DirectoryClient(master, token, timeout_s=timeout_s, tls=tls)
    try:
        _, members = client.members(fresh=True)
    finally:
        client.close()
    return Cluster(
        master,
        [
            ClusterNode(
                name=member.name,
                host_id=member.host_id,
                state=member.state,
                address=member.address,
                silent_s=member.silent_s,
                dram_bytes=sum(tenant.arena_bytes for tenant in member.tenants),
                dram_free_bytes=sum(tenant.free_bytes for tenant in member.tenants),
                ssd_bytes=member.ssd_bytes,
                ssd_free_bytes=member.ssd_free_bytes,
                objects=sum(tenant.objects for tenant in member.tenants),
            )
            for member in members
        ],
    )
