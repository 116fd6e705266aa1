"""`moonpool vllm`: vLLM's own command line with our short options for the pool."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.options import examples


def register(app: typer.Typer) -> None:
    """Adds ``vllm``. Only options in front of ``serve`` are parsed here; the command translates the rest and
    runs vLLM.
    """
    app.command(
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        epilog=examples(
            "moonpool vllm serve Qwen/Qwen3-0.6B --kv-connector Mooncake --port 8100",
            "moonpool vllm serve MODEL --kv-connector Mooncake --kv-role kv_producer --max-model-len 4096",
            "moonpool vllm serve MODEL --dry-run",
        ),
    )(vllm)


def vllm(
    arguments: Annotated[
        list[str], typer.Argument(metavar="serve MODEL [OPTIONS]", help="What vLLM is to do.")
    ],
    executable: Annotated[
        str, typer.Option(metavar="PROGRAM", help="The program vllm; give it before serve.")
    ] = "",
) -> None:
    """Run `vllm serve MODEL` with the pool; any option of vLLM may be given, and goes to it unchanged.

    After serve MODEL, anywhere among vLLM's options:

    --kv-connector Mooncake | Moonpool: the connector (the default; two names of one)

    --kv-role kv_both | kv_producer | kv_consumer: save and load, only save, only load

    --kv-load-failure-policy recompute | fail: what a failed load costs, time or the request

    --kv-node SOCKET: the node, default the host's first one

    --require-pool: refuse to start without a node

    --dry-run: print the command instead of running it
    """
    import os
    import shlex
    import sys

    from moonpool.launch.vllm_command import find_vllm, translate

    translation = translate(arguments)
    for warning in translation.warnings:
        print(f"moonpool: warning: {warning}", file=sys.stderr)
    if translation.dry_run:
        print(shlex.join([executable or "vllm", *translation.arguments]))
        return
    program = find_vllm(executable)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, [program, *translation.arguments])
