"""`moonpool down`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from moonpool.cli.options import examples


def register(app: typer.Typer) -> None:
    """Adds ``down`` to the top level of ``moonpool``."""
    app.command(epilog=examples("moonpool down", "moonpool down --timeout 600", "moonpool down --kill"))(down)


def down(
    timeout: Annotated[float, typer.Option(min=0.0, help="How many seconds to wait for the end.")] = 120.0,
    kill: Annotated[bool, typer.Option("--kill", help="Kill at once what runs, without up.grace_s.")] = False,
) -> None:
    """End what moonpool up runs on this host, and wait until it has ended. Exit code 3 when none runs."""
    from moonpool.launch.down import down as end

    began_s = time.monotonic()
    state = end(timeout_s=timeout, kill=kill)
    names = ", ".join(row.name for row in reversed(state.processes))
    print(f"ended after {time.monotonic() - began_s:.1f} s: {names}; moonpool up was pid {state.pid}")
