"""`moonpool node`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.core.cli.options import ConfigFile, TokenFile, examples


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "moonpool node --dram 2GiB",
            "moonpool node --dram 512MiB --name second --http 127.0.0.1:7712",
            "moonpool node --http off",
        )
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
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> None:
    """Run a node: it owns a DRAM arena and serves it to the engines of this host, until SIGTERM."""
    from moonpool.core.config import load
    from moonpool.core.node import Node, run
    from moonpool.core.units import format_size

    settings = load(
        config,
        arguments={
            "node.dram": dram,
            "node.name": name,
            "node.socket": socket,
            "node.http": http,
            "cluster.token_file": None if token_file is None else str(token_file),
        },
    )

    def on_ready(ready: Node) -> None:
        place = f", {ready.http_url}/metrics" if ready.http_url else ""
        size = format_size(settings.node.dram)
        print(f"moonpool node {settings.node.name}: {size} of DRAM at {ready.socket}{place}", flush=True)

    run(settings, on_ready=on_ready)
