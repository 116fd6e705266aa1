"""The nodes of the pool, as the master reports them to any process with the cluster token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from moonpool.core.errors import Unavailable

if TYPE_CHECKING:
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


def read_cluster(
    master: str, token: bytes, *, tls: _native.TlsClient | None = None, timeout_s: float = 1.0
) -> Cluster:
    """Asks the master at ``master`` ("host:port"), inside ``tls`` or in plain. Raises a moonpool Error when
    it does not answer.
    """
    try:
        import moonpool._native as _native
    except ImportError as error:
        raise Unavailable(
            f"the C++ core of moonpool is not built ({error}); run: pip install .",
            operation="status",
            cause=error,
        ) from error
    client = _native.DirectoryClient(master, token, timeout_s=timeout_s, tls=tls)
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
