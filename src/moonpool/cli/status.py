"""`moonpool status`: a live table of what runs on this host."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.cli.options import AsJson, ConfigFile, examples
from moonpool.core.service.exit_codes import EXIT_UNAVAILABLE

if TYPE_CHECKING:
    from rich.console import RenderableType

    from moonpool.core.service.cluster import Cluster, MasterRow
    from moonpool.launch.snapshot import Snapshot


# Rows of the node's table: name, the counter, whether it is bytes.
_NODE_ROWS = (
    ("arena", "arena_bytes", True),
    ("free", "arena_free_bytes", True),
    ("objects", "objects", False),
    ("in objects", "object_bytes", True),
    ("pins", "pins", False),
    ("connections", "connections", False),
    ("stored", "stored_bytes_total", True),
    ("served", "served_bytes_total", True),
    ("keys looked up", "lookup_keys_total", False),
    ("keys found", "lookup_hits_total", False),
    ("evicted", "evicted_bytes_total", True),
    ("refused", "put_refused_total", False),
)


def register(app: typer.Typer) -> None:
    """Adds ``status`` to the top level of ``moonpool``."""
    app.command(
        epilog=examples(
            "moonpool status",
            "moonpool status --once",
            "moonpool status --node second",
            "moonpool status --json --node-http http://127.0.0.1:7712",
        )
    )(status)


def status(
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    as_json: AsJson = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 1.0,
    node: Annotated[str, typer.Option(metavar="NAME", help="Only this node of the host.")] = "",
    node_http: Annotated[str, typer.Option(metavar="URL", help="The node's HTTP address.")] = "",
    proxy: Annotated[str, typer.Option(metavar="URL", help="The proxy's address.")] = "",
    master: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="The master's address; default: the node's."),
    ] = "",
    config: ConfigFile = None,
) -> int:
    """Show the cluster, and what runs on this host. Exit code 3 when nothing does.

    At a terminal the tables stay and are read anew; into a pipe or a file goes one reading.
    """
    from rich.console import Console

    from moonpool.core.config.config import load
    from moonpool.launch.snapshot import take

    settings = load(config)

    def read() -> Snapshot:
        return take(settings, node_url=node_http, node_name=node, proxy_url=proxy, master=master)

    if as_json:
        import msgspec

        found = read()
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return 0 if found.anything else EXIT_UNAVAILABLE
    if once or not sys.stdout.isatty():  # a pipe or a file gets one reading, not a table that moves
        found = read()
        Console(markup=False, emoji=False).print(render(found))
        return 0 if found.anything else EXIT_UNAVAILABLE
    import time

    from rich.live import Live

    console = Console(markup=False, emoji=False)
    with Live(render(read()), console=console, refresh_per_second=4, screen=False) as live:
        while True:
            time.sleep(interval)
            live.update(render(read()))


def render(snapshot: Snapshot) -> RenderableType:
    """The tables of one reading. Other hosts chose much of the text: it is made safe first."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    snapshot = snapshot.printable()
    parts: list[RenderableType] = []
    if len(snapshot.nodes) > 1:
        parts += [Text(f"{len(snapshot.nodes)} nodes on this host"), _nodes(snapshot.nodes)]
    else:
        for node in snapshot.nodes:
            parts += _node(node)
    if snapshot.cluster is not None:
        parts += _cluster(snapshot.cluster)
    if snapshot.masters:
        parts += [Text("masters"), _masters(snapshot.masters)]
    if snapshot.proxy_answers:
        table = Table()
        for heading in ("engine", "address", "health", "requests now", "so far", "failed"):
            table.add_column(heading)
        for engine in snapshot.engines:
            health = f"{engine.health}: {engine.why}" if engine.why else engine.health
            counts = (engine.in_flight, engine.requests, engine.failures)
            table.add_row(engine.name, engine.url, health, *(f"{count:,}" for count in counts))
        parts += [Text(f"proxy {snapshot.proxy_url}"), table]
    if snapshot.up is not None:
        up = snapshot.up
        table = Table()
        for heading in ("process", "state", "pid", "restarts", "log"):
            table.add_column(heading)
        for row in up.processes:
            table.add_row(row.name, row.state, str(row.pid or "-"), str(row.restarts), row.log)
        parts += [Text(f"moonpool up, pid {up.pid}"), table]
    parts += [Text(problem, style="dim") for problem in snapshot.problems]
    return Group(*parts)


def _node(node: Mapping[str, Any]) -> list[RenderableType]:
    """All that one node counts."""
    from rich.table import Table
    from rich.text import Text

    from moonpool.core.config.units import format_duration, format_size

    uptime = f", up {format_duration(node['uptime_s'])}" if "uptime_s" in node else ""
    table = Table(show_header=False)
    counters = node.get("metrics", {})
    for label, name, in_bytes in _NODE_ROWS:
        if name in counters:
            table.add_row(label, format_size(counters[name]) if in_bytes else f"{counters[name]:,}")
        if name == "lookup_hits_total":
            table.add_row("hit rate", _hit_rate(counters))
    return [Text(f"node {node.get('name', '')} {node.get('socket', '')}{uptime}"), table]


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A line for each of several nodes."""
    from rich.table import Table

    from moonpool.core.config.units import format_size

    table = Table()
    for heading in ("node", "DRAM used", "objects", "hit rate", "stored", "served", "evicted"):
        table.add_column(heading, justify="left" if heading == "node" else "right")
    for node in nodes:
        counters = node.get("metrics", {})
        size, free = counters.get("arena_bytes", 0), counters.get("arena_free_bytes", 0)
        moved = (counters.get(f"{name}_bytes_total", 0) for name in ("stored", "served", "evicted"))
        table.add_row(
            str(node.get("name", "")),
            f"{format_size(size - free)} of {format_size(size)}",
            f"{counters.get('objects', 0):,}",
            _hit_rate(counters),
            *map(format_size, moved),
        )
    return table


def _hit_rate(counters: Mapping[str, int]) -> str:
    """Keys found of those looked up; "-" before the first."""
    asked = counters.get("lookup_keys_total", 0)
    return f"{counters.get('lookup_hits_total', 0) / asked:.1%}" if asked else "-"


def _masters(masters: Sequence[MasterRow]) -> RenderableType:
    """Which master serves, since when (UTC), and how far its standby is."""
    import time

    from rich.table import Table
    from rich.text import Text

    table = Table()
    has_ranges = any(row.range not in ("", "0/1") for row in masters)
    for heading in (
        "master",
        *(["range"] if has_ranges else []),
        "role",
        "term",
        "the other one",
        "nodes",
        "keys",
    ):
        table.add_column(heading, overflow="fold")
    for row in masters:
        address = f"{row.address} (learned)" if row.learned else row.address
        if not row.role:
            place = ["-"] if has_ranges else []
            table.add_row(address, *place, Text("does not answer", "red"), "-", row.why, "-", "-")
            continue
        other = "none"
        if row.other or row.attached:
            if not row.attached:
                state = "does not answer"
            elif not row.is_whole:
                state = "does not know all yet"
            else:
                state = f"{row.lag_s:.1f} s behind" if row.lag_s >= 0.1 else "knows all"
            other = f"{row.other}: {state}"
        role = Text(row.role, "red" if row.role == "superseded" else "")
        place = [row.range] if has_ranges else []
        term = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row.term / 1000))
        table.add_row(address, *place, role, term, other, f"{row.nodes:,}", f"{row.keys:,}")
    return table


def _cluster(cluster: Cluster) -> list[RenderableType]:
    """The nodes of all hosts, as the master sees them."""
    from rich.table import Table
    from rich.text import Text

    from moonpool.core.config.units import format_size

    alive = sum(node.state == "alive" for node in cluster.nodes)
    joining = sum(node.state == "joining" for node in cluster.nodes)
    suspect = len(cluster.nodes) - alive - joining
    title = f"cluster of master {cluster.master}: {alive} alive, {suspect} suspect"
    if joining:
        title += f", {joining} joining"
    table = Table()
    has_ssd = any(node.ssd_bytes for node in cluster.nodes)
    for heading in (
        "node",
        "host",
        "address",
        "state",
        "DRAM used",
        *(["SSD used"] if has_ssd else []),
        "keys",
    ):
        table.add_column(heading, overflow="fold")
    for node in cluster.nodes:
        silent = f" for {node.silent_s:.0f} s" if node.state == "suspect" else ""
        sizes = [
            f"{format_size(size - free)} of {format_size(size)}" if size else "-"
            for size, free in (
                (node.dram_bytes, node.dram_free_bytes),
                *([(node.ssd_bytes, node.ssd_free_bytes)] if has_ssd else []),
            )
        ]
        state = Text(node.state + silent, "green" if node.state == "alive" else "red")
        table.add_row(node.name, node.host_id[:12], node.address or "-", state, *sizes, f"{node.objects:,}")
    return [Text(title), table]
