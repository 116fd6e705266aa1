"""`moonpool master`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.options import ConfigFile, TokenFile, examples
from moonpool.cli.settings_options import command_of, given

OPTIONS = {
    "master.listen": "HOST:PORT",
    "master.http": "HOST:PORT|off",
    "master.range": "INDEX/COUNT",
    "master.standby_of": "HOST:PORT",
    "master.take_over_after_s": "SECONDS",
    "master.election": "URL",
}


def register(app: typer.Typer) -> None:
    """Adds ``master``, with an option for each setting of OPTIONS."""
    app.command(
        cls=command_of(OPTIONS),
        epilog=examples(
            "moonpool master",
            "moonpool master --listen 0.0.0.0:7700 --token-file /etc/moonpool/token",
            "moonpool master --listen 0.0.0.0:7700 --token-file token --standby-of 10.0.0.1:7700",
            "moonpool master --listen 10.0.0.1:7700 --token-file token --election etcd://10.0.0.9:2379",
            "moonpool master --listen 10.0.0.1:7700 --token-file token --range 0/4",
        ),
    )(master)
    app.command(
        epilog=examples(
            "moonpool promote", "moonpool promote --graceful", "moonpool promote --url http://127.0.0.1:7701"
        )
    )(promote)


def promote(
    url: Annotated[
        str,
        typer.Option(metavar="URL", help="Its HTTP address; default: as master.http says."),
    ] = "",
    graceful: Annotated[
        bool,
        typer.Option("--graceful", help="Only where the owner is there and hands over."),
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Make a standby master the owner of the directory.

    Where its owner is there, that hands over and becomes the standby: removals wait for some milliseconds,
    and none fails. So an owner can be stopped for an upgrade. Where the owner is lost, ask for it only if
    that is dead, or will be restarted as a standby: while it runs out of sight, both order removals, and
    what one side removed the other may serve until they meet again.
    """
    import http.client

    import msgspec

    from moonpool.core.config.cluster_token import secrets_of
    from moonpool.core.config.config import load
    from moonpool.core.errors import Unavailable
    from moonpool.core.service.http_get import exchange
    from moonpool.core.service.http_tls import client_context, scheme

    settings = load(config)
    place = f"{(url or f'{scheme(settings)}://{settings.master.http}').rstrip('/')}/promote"
    tls = client_context(settings) if place.startswith("https:") else None
    place += "?graceful" if graceful else ""
    headers = {"Authorization": f"Bearer {secrets_of(settings.read_admin_token())[0].decode('ascii')}"}
    try:
        answer = exchange("POST", place, headers=headers, timeout_s=10.0, tls=tls)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(
            f"no standby answers at {place} ({error}); give its HTTP address: --url", operation="promote"
        ) from error
    if answer.status != 200:
        raise Unavailable(
            f"{place} answered {answer.status}: {answer.body.decode(errors='replace').strip()}",
            operation="promote",
        )
    taken = msgspec.json.decode(answer.body)["taken_over"]
    print("it has taken over" if taken else "it was the owner already, and still is")


def master(ctx: typer.Context, config: ConfigFile = None, token_file: TokenFile = None) -> None:
    """Run the master: it knows which nodes are in the pool and what each one holds, until SIGTERM."""
    from moonpool.core.config.config import load
    from moonpool.core.config.logs import set_up
    from moonpool.core.service.master import Master, run

    settings = load(config, arguments=given(ctx, token_file))
    set_up(settings)

    def on_ready(ready: Master) -> None:
        place = f", {ready.http_url}/metrics" if ready.http_url else ""
        owner = settings.master.standby_of
        standby = f", standby of {owner}" if owner else ""
        part = settings.master.range
        of_range = f", range {part}" if part != "0/1" else ""
        print(f"moonpool master at {', '.join(ready.addresses)}{place}{of_range}{standby}", flush=True)

    run(settings, on_ready=on_ready)
