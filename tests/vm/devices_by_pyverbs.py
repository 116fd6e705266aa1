"""In the virtual machine: RDMA devices, their ports and GIDs, as the topology reads them from sysfs and as
the engine takes them by libibverbs, are those that pyverbs tells. The network card b1 is down."""

from __future__ import annotations

import ipaddress
from typing import Any

from moonpool import TransferEngine, _native
from moonpool.core import topology

TYPES = {"IB/RoCE v1": "IBV_GID_TYPE_ROCE_V1", "RoCE v2": "IBV_GID_TYPE_ROCE_V2"}


def compare(device: str, port: _native.RdmaPort, context: Any, enums: Any) -> set[str]:
    """The addresses of GIDs by which peers could reach the port, by pyverbs."""
    there = context.query_port(port.number)
    is_active = there.state == enums.IBV_PORT_ACTIVE
    assert (port.state == "ACTIVE") == is_active, (device, port.state, there.state)
    assert port.link_layer == "Ethernet"
    assert there.link_layer == enums.IBV_LINK_LAYER_ETHERNET
    assert port.lid == there.lid
    ours = {
        (gid.index, str(ipaddress.IPv6Address(gid.address)), getattr(enums, TYPES[gid.type]))
        for gid in port.gids
    }
    entries = [each for each in context.query_gid_table(256) if each.port_num == port.number]
    theirs = {(each.gid_index, str(ipaddress.IPv6Address(each.gid_str())), each.gid_type) for each in entries}
    assert ours == theirs, (device, ours, theirs)
    assert ours
    return {address for _, address, kind in theirs if kind == enums.IBV_GID_TYPE_ROCE_V2}


def main() -> None:
    try:
        import pyverbs.enums as enums
        from pyverbs.device import Context, get_device_list
    except ImportError as error:  # of another Python, or beside another libibverbs
        print(f"no pyverbs: {error}")
        return
    machine = topology.read()
    found = {device.name: device for device in machine.devices if device.ports}
    assert sorted(found) == sorted(each.name.decode() for each in get_device_list()), sorted(found)
    gids: dict[str, set[str]] = {}
    active = set()
    for name, device in found.items():
        context = Context(name=name)
        assert len(device.ports) == context.query_device().phys_port_cnt
        for port in device.ports:
            gids[f"{name}:{port.number}"] = compare(name, port, context, enums)
            if context.query_port(port.number).state == enums.IBV_PORT_ACTIVE:
                active.add(f"{name}:{port.number}")
        context.close()
    assert "rb1:1" not in active
    # The engine's own choice, by libibverbs: ports that are up, each by a GID of version 2 that it has.
    options = {"token": b"of this test", "transports": ["rdma"]}
    with TransferEngine("there", **options) as there, TransferEngine("here", **options) as here:
        (path,) = [row for row in here.paths(here.open(there.addresses[0])) if row.transport == "rdma"]
        assert {rail.port for rail in path.rails} <= active, (path.rails, active)
        for rail in path.rails:
            address = rail.path.removeprefix(rail.port).split()[0]
            mapped = address if ":" in address else f"::ffff:{address}"
            assert str(ipaddress.IPv6Address(mapped)) in gids[rail.port], (rail.path, gids)
    print(f"{len(found)} devices are as pyverbs has them")


if __name__ == "__main__":
    main()
