"""`moonpool config`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.options import AsJson, ConfigFile, examples


def register(app: typer.Typer) -> None:
    """Adds the group ``config`` with its commands ``show`` and ``schema``."""
    group = typer.Typer(
        help="Show the configuration, or its schema.",
        no_args_is_help=True,
        epilog=examples("moonpool config show", "moonpool config schema > moonpool.schema.json"),
    )
    group.command(
        epilog=examples(
            "moonpool config show",
            "MOONPOOL_NODE_DRAM=2GiB moonpool config show --config moonpool.toml",
        )
    )(show)
    group.command(
        epilog=examples("moonpool config schema > moonpool.schema.json", "moonpool config schema --markdown")
    )(schema)
    app.add_typer(group, name="config")


def show(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Print each value and where it came from: a default, a file, the environment."""
    from moonpool.core.config.config import load

    rows = list(load(config).rows())
    if as_json:
        import json

        print(
            json.dumps(
                [{"key": key, "value": _json(value), "origin": origin} for key, value, origin in rows],
                indent=2,
            )
        )
        return
    width = max(len(f"{key} = {value}") for key, value, _ in rows if len(value) < 40)
    for key, value, origin in rows:
        print(f"{f'{key} = {value}':{width}}  # {origin}")


def _json(shown: str) -> object:
    """A value as ``rows`` shows it, which is JSON but for a secret's place-holder."""
    import json

    try:
        return json.loads(shown)
    except ValueError:
        return shown


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables of all keys instead.")] = False,
) -> None:
    """Print the JSON schema of the configuration file."""
    import json

    from moonpool.core.config.schema import json_schema
    from moonpool.core.config.schema import markdown as tables

    print(tables() if markdown else json.dumps(json_schema(), indent=2))
