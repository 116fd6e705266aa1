"""One reading of the topology, as rows and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from moonpool import _native


class Near(NamedTuple):
    """How near a NIC is to some memory.

    nearness: "switch" (below one PCI switch), "root port" (below one port of the CPU), "node", or "far".
    distance: of the two NUMA nodes, 10 for one and the same; -1: one of them is unknown.
    preferred: as near as the nearest.
    """

    nic: str
    nearness: str
    distance: int
    preferred: bool

    @property
    def rank(self) -> tuple[str, int]:
        """The same for NICs that are as near."""
        return self.nearness, self.distance


def read(root: str = "") -> _native.Machine:
    """This machine, or the one whose /sys and /proc lie below ``root``. What cannot be read is left out."""
    from moonpool import _native

    return _native.Machine(root)


def usable_nics(machine: _native.Machine) -> list[_native.MachineDevice]:
    """The NICs that bytes could leave by: those with RDMA or a place in the machine; without any, as in a
    container, all. Bridges and cables of containers are none."""
    nics = [device for device in machine.devices if device.kind == "nic"]
    return [nic for nic in nics if nic.ports or nic.pci] or nics


def memories(machine: _native.Machine) -> list[str]:
    """The rows of the matrix: "cpu:N" for memory of NUMA node N, "gpuN" for that of a GPU."""
    nodes = [f"cpu:{node.id}" for node in machine.nodes]
    return nodes + [device.name for device in machine.devices if device.kind == "gpu"]


def matrix(machine: _native.Machine) -> dict[str, list[Near]]:
    """For each memory the NICs, the near ones first."""
    usable = {nic.name for nic in usable_nics(machine)}
    rows = {f"cpu:{node.id}": machine.near_node(node.id, "nic") for node in machine.nodes}
    for device in machine.devices:
        if device.kind == "gpu":
            rows[device.name] = machine.near_device(device, "nic")
    found = {}
    for memory, ranked in rows.items():
        kept = [row for row in ranked if row[0].name in usable]
        found[memory] = [
            Near(nic.name, nearness, distance, (nearness, distance) == kept[0][1:3])
            for nic, nearness, distance, _ in kept
        ]
    return found


def as_json(machine: _native.Machine) -> dict[str, Any]:
    """All of it, for `moonpool topology --json`. Sizes in bytes; node -1: unknown."""
    near = {
        memory: [{**row._asdict(), "distance": row.distance if row.distance >= 0 else None} for row in rows]
        for memory, rows in matrix(machine).items()
    }
    return {
        "nodes": [_node(node) for node in machine.nodes],
        "allowed_cpus": machine.allowed_cpus,
        "allowed_nodes": machine.allowed_nodes,
        "nics": [_nic(device) for device in machine.devices if device.kind == "nic"],
        "gpus": [_device(device) for device in machine.devices if device.kind == "gpu"],
        "nvme": [_drive(device) for device in machine.devices if device.kind == "nvme"],
        "dax": [_drive(device) for device in machine.devices if device.kind == "dax"],
        "near": near,
    }


def _node(node: _native.MemoryNode) -> dict[str, Any]:
    return {
        "id": node.id,
        "cpus": node.cpus,
        "total_bytes": node.total_bytes,
        "free_bytes": node.free_bytes,
        "distances": {str(other): distance for other, distance in node.distances},
    }


def _device(device: _native.MachineDevice) -> dict[str, Any]:
    found = {"name": device.name, "node": device.node, "pci": device.pci, "bridges": device.bridges}
    return {**found, "model": device.model}


def _drive(device: _native.MachineDevice) -> dict[str, Any]:
    return {**_device(device), "state": device.state, "bytes": device.bytes}


def _nic(device: _native.MachineDevice) -> dict[str, Any]:
    ports = [
        {
            "number": port.number,
            "state": port.state,
            "physical": port.physical,
            "link_layer": port.link_layer,
            "gbit_per_s": port.gbit_per_s,
            "lid": port.lid,
            "gids": [
                {"index": gid.index, "address": gid.address, "type": gid.type, "net": gid.net}
                for gid in port.gids
            ],
        }
        for port in device.ports
    ]
    nets = [
        {
            "name": net.name,
            "state": net.state,
            "mbit_per_s": net.mbit_per_s if net.mbit_per_s >= 0 else None,
            "mtu": net.mtu,
        }
        for net in device.nets
    ]
    return {**_device(device), "ports": ports, "nets": nets}
