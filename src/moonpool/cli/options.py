"""The options that several subcommands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="A TOML file; default: what MOONPOOL_CONFIG names."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", help="A 0600 file with the cluster token; never the token itself."
    ),
]
NodeSocket = Annotated[
    str | None,
    typer.Option(
        "--node", metavar="SOCKET", help="The node's socket or name; default: the host's first node."
    ),
]
Tenant = Annotated[str, typer.Option(help="Whose objects.")]
Namespace = Annotated[str, typer.Option(help="A space of keys within the tenant.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def write_text(path: str, text: str, operation: str) -> None:
    """To a file, or for "-" to standard output. Raises ConfigError."""
    from moonpool.core.errors import ConfigError

    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}", operation=operation) from error


def check_writable(path: str, operation: str) -> None:
    """Of what ``write_text`` will write, before hours of work, not after. Raises ConfigError."""
    from moonpool.core.errors import ConfigError

    folder = Path(path).absolute().parent
    if path not in ("", "-") and (Path(path).is_dir() or not folder.is_dir()):
        why = "it is a folder" if folder.is_dir() else f"there is no folder {folder}"
        raise ConfigError(f"{path} cannot be written: {why}", operation=operation)


def examples(*lines: str) -> str:
    """An epilog: each line stands on its own."""
    return "\n\n".join(("Examples:", *lines))
