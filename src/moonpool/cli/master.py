"""`moonpool master`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.options import ConfigFile, TokenFile, examples
from moonpool.cli.shown_defaults import command_of


def register(app: typer.Typer) -> None:
    app.command(
        cls=command_of("master"),
        epilog=examples(
            "moonpool master",
            "moonpool master --listen 0.0.0.0:7700 --token-file /etc/moonpool/token",
        ),
    )(master)


def master(
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where nodes and clients connect.")
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT|off", help="Address of the admin pages and /metrics.")
    ] = None,
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> None:
    """Run the master: it knows which nodes are in the pool and what each one holds, until SIGTERM."""
    from moonpool.core.config.config import load
    from moonpool.core.config.logs import set_up
    from moonpool.core.service.master import Master, run

    settings = load(
        config,
        arguments={
            "master.listen": listen,
            "master.http": http,
            "cluster.token_file": None if token_file is None else str(token_file),
        },
    )
    set_up(settings)

    def on_ready(ready: Master) -> None:
        place = f", {ready.http_url}/metrics" if ready.http_url else ""
        print(f"moonpool master at {', '.join(ready.addresses)}{place}", flush=True)

    run(settings, on_ready=on_ready)
