"""`moonpool node`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.options import ConfigFile, TokenFile, examples
from moonpool.cli.settings_options import command_of, given

OPTIONS = {
    "node.dram": "SIZE",
    "node.name": "NAME",
    "node.socket": "PATH",
    "node.http": "HOST:PORT|off",
    "node.listen": "HOST:PORT|off",
    "node.advertise": "HOST:PORT",
    "node.host_id": "ID",
    "cluster.master": "HOST:PORT[,STANDBY][;HOST:PORT...]",
    "node.ssd": "DIR:SIZE",
    "node.events": "tcp://HOST:PORT",
    "node.events_replay": "tcp://HOST:PORT",
}


def register(app: typer.Typer) -> None:
    """Adds ``node``, with an option for each setting of OPTIONS."""
    app.command(
        cls=command_of(OPTIONS),
        epilog=examples(
            "moonpool node --dram 2GiB",
            "moonpool node --dram 2GiB --ssd /var/lib/moonpool/ssd:100GiB",
            "moonpool node --dram 512MiB --name second --http 127.0.0.1:7712",
            "moonpool node --dram 2GiB --take-over",
            "moonpool node --dram 64GiB --listen 0.0.0.0:7710 --master 10.0.0.1:7700 --token-file token",
        ),
    )(node)


def node(
    ctx: typer.Context,
    config: ConfigFile = None,
    token_file: TokenFile = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Replace the node that runs under this name, with its content; no call of a client fails.",
        ),
    ] = False,
) -> None:
    """Run a node: it owns a DRAM arena and serves it to the engines of this host, and with a master to other
    hosts, until SIGTERM.
    """
    from moonpool.core.config import logs
    from moonpool.core.config.config import load
    from moonpool.core.config.units import format_size
    from moonpool.core.printable import printable
    from moonpool.core.service.node import Node, run

    settings = load(config, arguments=given(ctx, token_file))
    logs.set_up(settings)

    def on_ready(ready: Node) -> None:
        place = f", {ready.http_url}/metrics" if ready.http_url else ""
        place += f", wire {', '.join(ready.wire)}" if ready.wire else ""
        if ready.addresses.master:
            why = ready.why_not_joined()
            place += f", master {ready.addresses.master}" + (f" NOT JOINED: {why}" if why else " joined")
        place += f", SSD {', '.join(settings.node.ssd)}" if settings.node.ssd else ""
        size = format_size(ready.config.node.dram)
        short = ready.why_memory_short()
        place += f"; {short}" if short else ""
        line = f"moonpool node {settings.node.name}: {size} of DRAM at {ready.socket}{place}"
        print(printable(line), flush=True)

    run(settings, on_ready=on_ready, take_over=take_over)
