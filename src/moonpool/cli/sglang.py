"""`moonpool sglang`: a server of SGLang with the flags that the pool and the hand-over need."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.options import NodeSocket, examples


def register(app: typer.Typer) -> None:
    """Adds ``sglang``. Options that it does not define pass to SGLang unchanged."""
    app.command(
        context_settings={"ignore_unknown_options": True},
        epilog=examples(
            "moonpool sglang Qwen/Qwen3-0.6B --kv-pool -- --port 30000",
            "moonpool sglang MODEL --kv-pool --node second -- --tp-size 2 --page-size 32",
            "moonpool sglang MODEL --pd prefill -- --port 30001 --disaggregation-bootstrap-port 8998",
            "moonpool sglang MODEL --pd decode --kv-pool -- --port 30002",
            "moonpool sglang MODEL --kv-pool --dry-run",
        ),
    )(sglang)


def sglang(
    model: Annotated[str, typer.Argument(help="A folder, or a name on the hub.")],
    flags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- FLAGS]", help="SGLang's own flags, unchanged; the dashes may be left out."
        ),
    ] = None,
    kv_pool: Annotated[
        bool, typer.Option("--kv-pool", help="The pool is the third tier of its cache (HiCache).")
    ] = False,
    pd: Annotated[
        str, typer.Option(metavar="prefill|decode", help="Hand KV over to decode, or take it from prefill.")
    ] = "",
    node: NodeSocket = None,
    require_pool: Annotated[
        bool, typer.Option("--require-pool", help="Refuse to start without a node.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command instead of running it.")
    ] = False,
    python: Annotated[
        str, typer.Option(metavar="PROGRAM", help="The Python that has SGLang, instead of this one.")
    ] = "",
) -> None:
    """Run an SGLang server (python -m sglang.launch_server) with the pool, as half of a prefill-decode pair,
    or both. What FLAGS say goes before what this command chooses: page size, memory layout, copies."""
    import os
    import shlex
    import sys

    from moonpool.launch.sglang_command import Server, find_python, launch, look

    server = Server(
        model=model,
        kv_pool=kv_pool,
        pd=pd,
        node=node or "",
        require_pool=require_pool,
        flags=tuple(flags or ()),
    )
    arguments, added = server.arguments(), server.environment()
    if dry_run:
        words = [f"{name}={value}" for name, value in added.items()]
        print(shlex.join([*words, *launch(python or "python", arguments)]))
        return
    program = find_python(python)
    look(program).check(python=program, pd=bool(pd))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, launch(program, arguments), os.environ | added)
