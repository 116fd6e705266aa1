"""`moonpool logs`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.options import ConfigFile, examples


def register(app: typer.Typer) -> None:
    """Adds ``logs`` to the top level of ``moonpool``."""
    app.command(
        epilog=examples(
            "moonpool logs",
            "moonpool logs -f",
            "moonpool logs engine-0 proxy",
            "moonpool logs -f -n 20 engine-0",
        )
    )(logs)


def logs(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these processes; default: all.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until moonpool up ends.")
    ] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="The last lines of each; default: all.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Print the logs of what moonpool up runs on this host, or ran last. Exit code 3 when there are none.

    The log called up has what moonpool up -d itself said.
    """
    from moonpool.core.config.config import load
    from moonpool.launch import log_files

    found = log_files.log_files(load(config), names or ())
    width = max(map(len, found))

    def show(name: str, line: str) -> None:
        print(line if len(found) == 1 else f"{name:{width}} | {line}", flush=follow)

    files = {name: log_files.LogFile(path) for name, path in found.items()}
    for name, file in files.items():
        for line in file.last(lines):
            show(name, line)
    if follow:
        log_files.follow(files, show)
