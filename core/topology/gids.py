"""GIDs, the addresses of RDMA ports: which of a table a transport would take, and their text for people."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool import _native

ROCE_V2 = "RoCE v2"


def is_ethernet(port: _native.RdmaPort) -> bool:
    """Whether it speaks RoCE and not InfiniBand. A layer that cannot be read counts by its GIDs."""
    if port.link_layer:
        return port.link_layer == "Ethernet"
    return any("RoCE" in gid.type for gid in port.gids)


def ip_of(gid: _native.Gid) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a RoCE GID stands for; None for a text that is no GID."""
    try:
        found = ipaddress.IPv6Address(gid.address)
    except ValueError:
        return None
    return found.ipv4_mapped or found


def is_routable(gid: _native.Gid) -> bool:
    """Whether it can reach another subnet: no link-local address."""
    address = ip_of(gid)
    return address is not None and not address.is_link_local


def best_gid(port: _native.RdmaPort) -> _native.Gid | None:
    """The GID for peers: for RoCE of version 2, IPv4 before IPv6 before link-local; for InfiniBand the first.
    None: the port has none that serves."""
    if not is_ethernet(port):
        return port.gids[0] if port.gids else None
    second = [gid for gid in port.gids if gid.type == ROCE_V2 and ip_of(gid) is not None]
    return min(second, key=_order, default=None)


def _order(gid: _native.Gid) -> tuple[bool, bool, int]:
    address = ip_of(gid)
    return not is_routable(gid), not isinstance(address, ipaddress.IPv4Address), gid.index


def gid_text(gid: _native.Gid) -> str:
    """ "10.0.0.7 (3)": the address and its index."""
    return f"{ip_of(gid) or gid.address} ({gid.index})"
