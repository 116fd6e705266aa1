"""`moonpool master`."""

from __future__ import annotations

import typer

from moonpool.cli.options import ConfigFile, TokenFile, examples
from moonpool.cli.settings_options import command_of, given

OPTIONS = {"master.listen": "HOST:PORT", "master.http": "HOST:PORT|off"}


def register(app: typer.Typer) -> None:
    """Adds ``master``, with an option for each setting of OPTIONS."""
    app.command(
        cls=command_of(OPTIONS),
        epilog=examples(
            "moonpool master",
            "moonpool master --listen 0.0.0.0:7700 --token-file /etc/moonpool/token",
        ),
    )(master)


def master(ctx: typer.Context, config: ConfigFile = None, token_file: TokenFile = None) -> None:
    """Run the master: it knows which nodes are in the pool and what each one holds, until SIGTERM."""
    from moonpool.core.config.config import load
    from moonpool.core.config.logs import set_up
    from moonpool.core.service.master import Master, run

    settings = load(config, arguments=given(ctx, token_file))
    set_up(settings)

    def on_ready(ready: Master) -> None:
        place = f", {ready.http_url}/metrics" if ready.http_url else ""
        print(f"moonpool master at {', '.join(ready.addresses)}{place}", flush=True)

    run(settings, on_ready=on_ready)
