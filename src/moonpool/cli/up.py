"""`moonpool up`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli.options import ConfigFile, TokenFile, examples

if TYPE_CHECKING:
    from moonpool.launch.supervisor import Event


def register(app: typer.Typer) -> None:
    """Adds ``up`` to the top level of ``moonpool``."""
    app.command(
        epilog=examples(
            "moonpool up --config up.toml",
            "moonpool up --model Qwen/Qwen3-0.6B --engines 2 --dram 4GiB",
            "moonpool up --model Qwen/Qwen3-0.6B --engines 2 --nodes 2",
            "moonpool up --nodes 2",
            "moonpool up --mock 2",
            "moonpool up --config up.toml --log-dir logs",
            "moonpool up -d --mock 2",
        )
    )(up)


def up(
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="Start vLLM engines with this model.")] = None,
    engines: Annotated[int, typer.Option(min=1, help="How many engines to start with --model.")] = 1,
    mock: Annotated[
        int, typer.Option(min=0, help="Start so many engines without a model, to try the proxy.")
    ] = 0,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="How many nodes to start; several get a master.")
    ] = None,
    dram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="DRAM of each node, for example 2GiB.")
    ] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of the proxy.")] = None,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="One log per process goes here.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="End once all is up; it runs on until moonpool down.")
    ] = False,
    token_file: TokenFile = None,
) -> None:
    """Run nodes, engines and the proxy; restart what dies; take all of it down together."""
    import os

    from moonpool.core.config import logs
    from moonpool.core.config.config import load
    from moonpool.core.config.config_sources import default_file
    from moonpool.core.config.sections import Engine, UpNode
    from moonpool.core.service.exit_codes import guarded
    from moonpool.core.service.processes import run_kept
    from moonpool.launch.detached import run_detached
    from moonpool.launch.log_files import own_log
    from moonpool.launch.up import only_one, run
    from moonpool.launch.up_plan import plan

    if mock and model is not None:
        raise typer.BadParameter("--mock starts engines without a model; give it or --model")
    wanted = [Engine(engine="mock")] * mock if mock else None
    settings = load(
        config,
        arguments={
            "node.dram": dram,
            "proxy.listen": listen,
            "up.log_dir": None if log_dir is None else str(log_dir),
            "cluster.token_file": None if token_file is None else str(token_file),
            "up.engine": wanted if model is None else [Engine(model=model)] * engines,
            "up.node": None if nodes is None else [UpNode()] * nodes,
            "up.master": True if nodes is not None and nodes > 1 else None,
            "up.proxy": False if nodes is not None and not (model or mock or config) else None,
        },
    )
    logs.set_up(settings)

    def keep(detached: Callable[[], None] | None = None) -> int:
        keeper = os.getpid()
        return run_kept(lambda: guarded(lambda: run(ready, printer(), pid=keeper, detached=detached)))

    with only_one():
        ready = plan(settings, config_file=str(config) if config else default_file())
        raise typer.Exit(run_detached(keep, own_log()) if detach else keep())


def printer() -> Callable[[Event], None]:
    """Prints each event with the time since now."""
    started_s = time.monotonic()

    def tell(event: Event) -> None:
        name = f"{event.name}: " if event.name else ""
        print(f"[{time.monotonic() - started_s:7.1f} s] {name}{event.text}", flush=True)

    return tell
