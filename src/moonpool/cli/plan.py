"""`moonpool plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moonpool.cli.options import examples, write_text

POOLS = "64GiB,256GiB,1TiB,4TiB,16TiB"
PREFIXES = "1024,8192,32768,131072"


def register(app: typer.Typer) -> None:
    """Adds ``plan``. The command itself imports what it computes with, so that --help is quick."""
    app.command(
        epilog=examples(
            "moonpool plan meta-llama/Llama-3.1-70B --gpu h100 --gpus 8 --link 50",
            "moonpool plan models/qwen --dtype fp8 --trace conversation_trace.jsonl --pool 512GiB,1TiB,2TiB",
            "moonpool plan config.json --tflops 500 --efficiency 0.5 --json -",
        )
    )(plan)


def plan(
    model: Annotated[str, typer.Argument(help="A config.json, the folder of a model, or ORGANISATION/NAME.")],
    dtype: Annotated[
        str, typer.Option(help="Of the KV cache: bfloat16, fp8, ...; auto: the model's.")
    ] = "auto",
    gpu: Annotated[
        str, typer.Option(help="That computes prompts: a100, a800, h100, h800, h20, ...")
    ] = "h100",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of an instance.")] = 1,
    tflops: Annotated[
        float, typer.Option(min=0.0, help="10^12 operations a second of all of them, instead of --gpu.")
    ] = 0.0,
    efficiency: Annotated[float, typer.Option(help="Share of that peak which prefill reaches.")] = 0.5,
    prefix: Annotated[str, typer.Option(metavar="TOKENS,...", help="Lengths to look at.")] = PREFIXES,
    link: Annotated[
        float, typer.Option(min=0.0, metavar="GB/S", help="What fetching takes over a link of this speed.")
    ] = 0.0,
    pool: Annotated[str, typer.Option(metavar="SIZE,...", help="Memory of all nodes together.")] = POOLS,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Whose prompts to expect: the hit rate of each pool.")
    ] = None,
    json: Annotated[str, typer.Option("--json", metavar="FILE|-", help="Write the figures there.")] = "",
) -> int:
    """Say how much KV cache a model makes, when fetching it beats computing it, and what a pool would hold.

    Computing is counted as in section 2.2 of the Mooncake paper, on one GPU at half of its peak unless --gpus
    and --efficiency say otherwise.
    """
    import math
    import sys

    from rich.console import Console

    from moonpool.disagg_proxy.tools.simulator.trace import read_trace
    from moonpool.disagg_proxy.tools.sizing import hits as expected
    from moonpool.disagg_proxy.tools.sizing import report
    from moonpool.disagg_proxy.tools.sizing.gpus import TFLOPS
    from moonpool.disagg_proxy.tools.sizing.model import read_model
    from moonpool.disagg_proxy.tools.sizing.source import read_config

    if gpu.lower() not in TFLOPS:
        raise typer.BadParameter(f"--gpu knows {', '.join(TFLOPS)}, not {gpu}; --tflops takes any speed")
    if not 0 < efficiency <= 1:
        raise typer.BadParameter(f"--efficiency is above 0 and at most 1, not {efficiency}")
    compute = report.Compute(f"{gpus} x {gpu.lower()}", gpus * TFLOPS[gpu.lower()] * 1e12, efficiency)
    if tflops:
        compute = report.Compute("as given", tflops * 1e12, efficiency)
    prefixes, sizes = _prefixes(prefix), _sizes(pool)
    read = None if trace is None else read_trace(trace)
    of = read_model(read_config(model), model, dtype)
    rates = [math.nan] * len(sizes)
    if read is not None:
        blocks = [report.pool_blocks(of, size) for size in sizes]
        rates = [row.hits for row in expected.hits(read, blocks)]
    made = report.Plan(
        of,
        compute,
        prefixes,
        link * 1e9,
        list(zip(sizes, rates, strict=True)),
        "" if trace is None else trace.name,
        math.nan if read is None else expected.endless(read),
    )
    report.show(made, Console(file=sys.stderr if json == "-" else sys.stdout))
    if json:
        write_text(json, report.as_json(made), "plan")
    return 0


def _prefixes(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--prefix takes numbers of tokens: {error}") from error
    if not all(0 < tokens <= 1 << 31 for tokens in found):
        raise typer.BadParameter("--prefix takes positive numbers of tokens")
    return found


def _sizes(text: str) -> list[int]:
    from moonpool.core.config.units import parse_size

    try:
        found = [parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--pool: {error}") from error
    if not all(0 < size < 1 << 60 for size in found):
        raise typer.BadParameter("--pool takes sizes above 0")
    return found
