"""`moonpool topology`: the machine's memory, CPUs and devices, and which are near which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from moonpool.cli.options import AsJson, examples

if TYPE_CHECKING:
    from rich.console import RenderableType

    from moonpool import _native

WIDTH_OF_FILES = 200  # columns, where output goes to a pipe or a file


def register(app: typer.Typer) -> None:
    """Adds ``topology`` to the top level of ``moonpool``."""
    app.command(epilog=examples("moonpool topology", "moonpool topology --json"))(topology)


def topology(as_json: AsJson = False) -> int:
    """Show this machine's NUMA nodes, NICs, GPUs and drives, and which NICs are near which memory.

    Near are, in this order: devices below one PCI switch, below one root port of the CPU, at one NUMA node,
    and then others. A transport with several NICs takes near ones first.
    """
    from moonpool.core.topology import as_json as described
    from moonpool.core.topology import read

    machine = read()
    if as_json:
        import json

        print(json.dumps(described(machine), indent=2))
        return 0
    import sys

    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH_OF_FILES
    Console(markup=False, emoji=False, width=width).print(render(machine))
    return 0


def render(machine: _native.Machine) -> RenderableType:
    """The tables."""
    from rich.console import Group
    from rich.text import Text

    from moonpool.core.config.units import format_size

    nodes = machine.nodes
    cpus = sum(len(node.cpus) for node in nodes)
    total = format_size(sum(node.total_bytes for node in nodes))
    title = f"{_count(len(nodes), 'NUMA node')}, {_count(cpus, 'CPU')}, {total}"
    if len(machine.allowed_cpus) < cpus:
        title += f"; this process may use CPUs {_ranges(machine.allowed_cpus)}"
    if len(machine.allowed_nodes) < len(nodes):
        title += f"; it may take memory of nodes {_ranges(machine.allowed_nodes)}"
    parts: list[RenderableType] = [Text(title), _nodes(nodes), *_nics(machine)]
    gpus = [[d.name, _node(d), d.pci, d.model] for d in machine.devices if d.kind == "gpu"]
    parts += _table(("GPU", "node", "PCI", "model"), gpus)
    drives = [
        [d.name, _node(d), d.pci or "-", d.state, format_size(d.bytes) if d.bytes else "-", d.model]
        for d in machine.devices
        if d.kind in ("nvme", "dax")
    ]
    parts += _table(("drive or DAX", "node", "PCI", "state", "size", "model"), drives)
    return Group(*parts, *_near(machine))


def _nodes(nodes: Sequence[_native.MemoryNode]) -> RenderableType:
    from moonpool.core.config.units import format_size

    rows = [
        [
            str(node.id),
            _ranges(node.cpus) or "none: memory alone",
            format_size(node.total_bytes),
            format_size(node.free_bytes),
            ", ".join(f"{other}: {distance}" for other, distance in node.distances),
        ]
        for node in nodes
    ]
    (table,) = _table(("node", "CPUs", "memory", "free", "distance to node"), rows)
    return table


def _nics(machine: _native.Machine) -> list[RenderableType]:
    from rich.text import Text

    from moonpool.core.topology import usable_nics
    from moonpool.core.topology.gids import best_gid, gid_text

    shown = usable_nics(machine)
    rows = []
    for nic in shown:
        nets = ", ".join(f"{net.name} {net.state}".strip() for net in nic.nets)
        mtu = ", ".join(dict.fromkeys(str(net.mtu) for net in nic.nets if net.mtu))
        start, end = [nic.name, _node(nic), nic.pci or "-"], [mtu or "-", nets or "-"]
        for port in nic.ports:
            gid = best_gid(port)
            state = f"{port.state or 'unreadable'}, {port.physical}".rstrip(", ")
            rate = f"{port.gbit_per_s:g} Gbit/s" if port.gbit_per_s else "-"
            layer = f"{port.link_layer} {port.number}" if len(nic.ports) > 1 else port.link_layer
            rows.append([*start, layer, state, rate, gid_text(gid) if gid else "none", *end])
        if not nic.ports:
            speed = max((net.mbit_per_s for net in nic.nets), default=-1)
            rate = f"{speed / 1000:g} Gbit/s" if speed > 0 else "-"
            rows.append([*start, "no RDMA", nic.nets[0].state if nic.nets else "-", rate, "-", *end])
    headings = ("NIC", "node", "PCI", "link", "state", "rate", "GID (index)", "MTU", "network device")
    others = [device.name for device in machine.devices if device.kind == "nic"]
    others = [name for name in others if name not in {nic.name for nic in shown}]
    return [*_table(headings, rows), *([Text(f"virtual: {', '.join(others)}")] if others else [])]


def _near(machine: _native.Machine) -> list[RenderableType]:
    """A row for each NIC, a column for each memory: a star marks the nearest."""
    from rich.text import Text

    from moonpool.core.topology import matrix, usable_nics

    near = matrix(machine)
    cells = {(memory, row.nic): row for memory, ranked in near.items() for row in ranked}
    rows = []
    for nic in usable_nics(machine):
        row = [nic.name]
        for memory in near:
            found = cells[memory, nic.name]
            row.append(f"{found.nearness} *" if found.preferred else found.nearness)
        rows.append(row)
    if not rows:
        return [Text("no NIC")]
    note = "how near; * nearest. A memory is that of NUMA node N (cpu:N) or of a GPU"
    return [*_table(("NIC", *near), rows), Text(note, style="dim")]


def _table(headings: Iterable[str], rows: Sequence[Sequence[str]]) -> list[RenderableType]:
    """None without rows."""
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return []
    table = Table()
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: ":ab:" in an address is no picture
    return [table]


def _node(device: _native.MachineDevice) -> str:
    return str(device.node) if device.node >= 0 else "?"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _ranges(numbers: Sequence[int]) -> str:
    """ "0-3,8" of ascending numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
