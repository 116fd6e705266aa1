"""RDMA: devices, their nodes in /dev, libibverbs and its drivers, ports, GIDs, MTU; and NICs of EFA, which
need libfabric. All is read from /sys; no device is opened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moonpool.core.doctor.finding import Finding, absent, broken, weak, works
from moonpool.core.doctor.host import Host
from moonpool.core.topology.gids import best_gid, gid_text, is_ethernet, is_routable

if TYPE_CHECKING:
    from moonpool import _native

LIBRARY = "libibverbs.so.1"
ROCE_MTU_GOOD = 4200  # of a network device: RoCE frames then carry 4,096 bytes
FABRIC = "libfabric.so.1"
NVIDIA, BROADCOM, AMAZON = "0x15b3", "0x14e4", "0x1d0f"  # vendors by PCI id
EFA_IDS = "0xefa"  # of Amazon's PCI devices; its others are no EFA
# Where the text files lie by which libibverbs finds the drivers of devices.
DRIVERS = "/etc/libibverbs.d"


def check(host: Host) -> Iterator[Finding]:
    """All checks of this file."""
    nics = [device for device in host.machine.devices if device.kind == "nic" and device.ports]
    if not nics:
        yield from _no_devices(host)
        return
    yield from _library(host, nics)
    for nic in nics:
        yield from _node_in_dev(host, nic)
    efa = [nic for nic in nics if not any(map(_carries_rdma, nic.ports))]
    if efa:
        yield _libfabric(host, efa)
    nics = [nic for nic in nics if nic not in efa]
    active = [nic for nic in nics if any(port.state == "ACTIVE" for port in nic.ports)]
    if nics and not active:
        yield broken(
            "RDMA ports",
            f"no port of {_names(nics)} is active: transfers go over TCP",
            "see each port below",
        )
    for nic in nics:
        for port in nic.ports:
            yield _port(nic, port)
    yield from _speeds(active)
    yield from _mtus(active)


def _no_devices(host: Host) -> Iterator[Finding]:
    for function in host.names("/sys/bus/pci/devices"):
        if module := _rdma_module(host, function):
            yield weak(
                "RDMA devices",
                f"the network card at {function} can do RDMA, and the kernel shows no RDMA device",
                f"modprobe {module} ib_uverbs",
            )
            return
    yield absent("RDMA devices", "none: transfers between hosts go over TCP")


def _rdma_module(host: Host, function: str) -> str:
    """The kernel module that gives a PCI function RDMA; "": it is no network card that has it."""
    base = f"/sys/bus/pci/devices/{function}"
    if not host.text(f"{base}/class").startswith("0x02"):
        return ""
    vendor = host.text(f"{base}/vendor")
    if vendor == NVIDIA:
        return "mlx5_ib"
    if vendor == BROADCOM and host.exists(f"/sys/bus/pci/drivers/bnxt_en/{function}"):
        return "bnxt_re"  # the maker's older cards have other drivers, and no RDMA
    if vendor == AMAZON and host.text(f"{base}/device").startswith(EFA_IDS):
        return "efa"
    return ""


def _carries_rdma(port: _native.RdmaPort) -> bool:
    """Whether it is InfiniBand or RoCE. Of a NIC of EFA the kernel knows neither, and such NICs have no
    connections as the transport rdma makes them."""
    return port.link_layer in ("", "InfiniBand", "Ethernet")


def _libfabric(host: Host, nics: list[_native.MachineDevice]) -> Finding:
    """What the transport efa needs beside the devices."""
    why = host.open_library(FABRIC)
    if not why:
        return works("libfabric", f"{FABRIC} opens, for {_names(nics)}")
    return broken(
        "libfabric",
        f"this machine has {_names(nics)} of EFA, and {FABRIC} cannot be opened: {why}",
        "install Amazon's EFA installer, or apt-get install libfabric1, in the container, too",
    )


def _library(host: Host, nics: list[_native.MachineDevice]) -> Iterator[Finding]:
    why = host.open_library(LIBRARY)
    if why:
        yield broken(
            "libibverbs",
            f"{LIBRARY} cannot be opened: {why}",
            "apt-get install libibverbs1 ibverbs-providers (rdma-core elsewhere), in the container, too",
        )
        return
    yield works("libibverbs", f"{LIBRARY} opens")
    drivers = host.names(DRIVERS)
    missing = {nic.name: driver for nic in nics if (driver := _driver(nic.name)) + ".driver" not in drivers}
    if drivers and missing:
        yield broken(
            "libibverbs",
            f"libibverbs has no driver {', '.join(sorted(set(missing.values())))} for {', '.join(missing)}",
            "apt-get install ibverbs-providers (rdma-core elsewhere)",
        )


def _driver(device: str) -> str:
    """ "mlx5" of "mlx5_0"; "rxe" of other names, which a person chooses for devices of soft RoCE."""
    known = re.match(r"mlx4|mlx5|bnxt_re|efa|irdma|hns|siw|qedr|cxgb4|erdma|mana", device)
    return known[0] if known else "rxe"


def _node_in_dev(host: Host, nic: _native.MachineDevice) -> Iterator[Finding]:
    folder = "/sys/class/infiniband_verbs"
    for name in host.names(folder):
        if host.text(f"{folder}/{name}/ibdev") != nic.name:
            continue
        node = f"/dev/infiniband/{name}"
        if not host.exists(node):
            yield broken(
                "RDMA device nodes",
                f"{node}, by which {nic.name} is opened, is not there",
                "run the container with --device=/dev/infiniband (Kubernetes: an RDMA device plugin)",
            )
        elif not host.is_usable(node):
            yield broken(
                "RDMA device nodes",
                f"this user may not read and write {node}, by which {nic.name} is opened",
                f"chmod 666 {node}, for good by a rule of udev, or join the group that owns it",
            )
        else:
            yield works("RDMA device nodes", f"{node} ({nic.name})")
        return
    yield broken(
        "RDMA device nodes",
        f"the kernel gives programs no access to {nic.name}",
        "modprobe ib_uverbs; in a container give it /sys and --device=/dev/infiniband",
    )


def _port(nic: _native.MachineDevice, port: _native.RdmaPort) -> Finding:
    where = f"{nic.name} port {port.number}"
    net = next((gid.net for gid in port.gids if gid.net), nic.nets[0].name if nic.nets else "")
    if port.state != "ACTIVE":
        return weak("RDMA ports", *_inactive(where, port, net))
    if not is_ethernet(port):
        if port.lid == 0:
            return broken("RDMA ports", f"{where} has no LID", "run a subnet manager (opensm) in this fabric")
        return works("RDMA ports", f"{where}: InfiniBand, {port.gbit_per_s:g} Gbit/s, LID {port.lid}")
    best = best_gid(port)
    if best is None:
        has_other = any(gid.type for gid in port.gids)
        return broken(
            "GIDs",
            f"{where} has no GID of RoCE v2" + (", only of RoCE v1" if has_other else ""),
            f"ip link set {net or 'NET'} up, and give it an address: "
            f"ip address add 10.0.0.1/24 dev {net or 'NET'}",
        )
    if not is_routable(best):
        return weak(
            "GIDs",
            f"{where} has only the link-local GID {gid_text(best)}: peers of other subnets do not reach it",
            f"ip address add 10.0.0.1/24 dev {best.net or net or 'NET'}",
        )
    return works("RDMA ports", f"{where}: RoCE v2, {port.gbit_per_s:g} Gbit/s, GID {gid_text(best)}")


def _inactive(where: str, port: _native.RdmaPort, net: str) -> tuple[str, str]:
    """(what, remedy) of a port that is not active."""
    state = f"{where} is {port.state or 'unreadable'}"
    if port.physical:
        state += f" ({port.physical})"
    if port.state in ("INIT", "ARMED"):
        return f"{state}: no subnet manager has set it up", "run a subnet manager (opensm) in this fabric"
    if port.physical == "Polling":
        return f"{state}: nothing answers at the other end of the cable", "check cable, transceiver, switch"
    if net:
        return state, f"ip link set {net} up, then check its cable"
    return state, "check its cable and that its driver is loaded"


def _speeds(nics: list[_native.MachineDevice]) -> Iterator[Finding]:
    """Ports slower than others of the same model."""
    fastest: dict[str, float] = {}
    for nic in nics:
        for port in nic.ports:
            key = f"{nic.model} {port.link_layer}"
            fastest[key] = max(fastest.get(key, 0.0), port.gbit_per_s)
    for nic in nics:
        for port in nic.ports:
            best = fastest[f"{nic.model} {port.link_layer}"]
            if nic.model and port.state == "ACTIVE" and port.gbit_per_s < best:
                yield weak(
                    "RDMA speed",
                    f"{nic.name} port {port.number} runs at {port.gbit_per_s:g} Gbit/s, others of its model "
                    f"at {best:g}",
                    "check cable and transceiver, and the speed of the switch's port",
                )


def _mtus(nics: list[_native.MachineDevice]) -> Iterator[Finding]:
    """Of RoCE, whose frames the network device's MTU limits."""
    mtus = {}
    for nic in nics:
        for port in nic.ports:
            used = best_gid(port)
            if not is_ethernet(port) or port.state != "ACTIVE" or used is None:
                continue
            net = next((net for net in nic.nets if net.name == used.net), None)
            if net is not None and net.state == "down":
                remedy = f"ip link set {net.name} up"
                yield broken("RDMA ports", f"{net.name}, the network device of {nic.name}, is down", remedy)
            elif net is not None and net.mtu:
                mtus[nic.name] = (net.name, net.mtu)
    if not mtus:
        return
    largest = max(mtu for _, mtu in mtus.values())
    low = {nic: row for nic, row in mtus.items() if row[1] < min(largest, ROCE_MTU_GOOD)}
    if low:
        shown = ", ".join(f"{net} ({nic}) has {mtu}" for nic, (net, mtu) in low.items())
        what = f"NICs have different MTUs: {shown}, others {largest}; a rail has that of its smaller end"
        yield weak("MTU", what, _set_mtu(low, largest))
    elif largest < ROCE_MTU_GOOD:
        what = f"an MTU of {largest} makes RoCE send frames of {_roce_payload(largest):,} bytes and not 4,096"
        remedy = f"{_set_mtu(mtus, ROCE_MTU_GOOD)}, the same at switches and all peers"
        yield weak("MTU", what, remedy)
    else:
        yield works("MTU", f"RoCE frames carry 4,096 bytes at all of {', '.join(mtus)}")


def _set_mtu(nics: dict[str, tuple[str, int]], mtu: int) -> str:
    return "; ".join(f"ip link set {net} mtu {mtu}" for net, _ in nics.values())


def _roce_payload(mtu: int) -> int:
    """What a RoCE frame carries: a power of two below the MTU without the headers."""
    return next((size for size in (4096, 2048, 1024, 512) if size + 68 <= mtu), 256)


def _names(nics: list[_native.MachineDevice]) -> str:
    return ", ".join(nic.name for nic in nics)
