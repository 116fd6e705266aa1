"""`moonpool node`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.options import ConfigFile, TokenFile, examples
from moonpool.cli.shown_defaults import command_of


def register(app: typer.Typer) -> None:
    app.command(
        cls=command_of("node"),
        epilog=examples(
            "moonpool node --dram 2GiB",
            "moonpool node --dram 2GiB --ssd /var/lib/moonpool/ssd:100GiB",
            "moonpool node --dram 512MiB --name second --http 127.0.0.1:7712",
            "moonpool node --dram 64GiB --listen 0.0.0.0:7710 --master 10.0.0.1:7700 --token-file token",
        ),
    )(node)


def node(
    dram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="DRAM for blocks, for example 2GiB.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Names the node and its socket, node-NAME.sock.")] = None,
    socket: Annotated[
        str | None, typer.Option(metavar="PATH", help="The socket, instead of by name.")
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT|off", help="Address of /metrics, /health and /stat.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT|off", help="Address of the wire, for other hosts.")
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="How others reach it, where that is another address."),
    ] = None,
    host_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Which host this is, instead of the machine's own id.")
    ] = None,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The master of the cluster to join.")
    ] = None,
    ssd: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR:SIZE", help="Directory for what does not fit into DRAM; repeatable."),
    ] = None,
    events: Annotated[
        str | None, typer.Option(metavar="tcp://HOST:PORT", help="Publish KV events there, for routers.")
    ] = None,
    events_replay: Annotated[
        str | None, typer.Option(metavar="tcp://HOST:PORT", help="Where they are told again.")
    ] = None,
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> None:
    """Run a node: it owns a DRAM arena and serves it to the engines of this host, and with a master to other
    hosts, until SIGTERM.
    """
    from moonpool.core.config import logs
    from moonpool.core.config.config import load
    from moonpool.core.config.units import format_size
    from moonpool.core.printable import printable
    from moonpool.core.service.node import Node, run

    settings = load(
        config,
        arguments={
            "node.dram": dram,
            "node.name": name,
            "node.socket": socket,
            "node.http": http,
            "node.listen": listen,
            "node.advertise": advertise,
            "node.host_id": host_id,
            "node.ssd": ssd or None,
            "node.events": events,
            "node.events_replay": events_replay,
            "cluster.master": master,
            "cluster.token_file": None if token_file is None else str(token_file),
        },
    )

    logs.set_up(settings)

    def on_ready(ready: Node) -> None:
        place = f", {ready.http_url}/metrics" if ready.http_url else ""
        place += f", wire {', '.join(ready.wire)}" if ready.wire else ""
        if ready.addresses.master:
            why = ready.why_not_joined()
            place += f", master {ready.addresses.master}" + (f" NOT JOINED: {why}" if why else " joined")
        place += f", SSD {', '.join(settings.node.ssd)}" if settings.node.ssd else ""
        size = format_size(settings.node.dram)
        short = ready.why_memory_short()
        place += f"; {short}" if short else ""
        line = f"moonpool node {settings.node.name}: {size} of DRAM at {ready.socket}{place}"
        print(printable(line), flush=True)

    run(settings, on_ready=on_ready)
