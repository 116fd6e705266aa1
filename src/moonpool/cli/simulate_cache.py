"""`moonpool simulate cache`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ALL = "all"


def simulate_cache(
    trace: Annotated[Path, typer.Argument(help="Lines of timestamp, input_length, output_length, hash_ids.")],
    policy: Annotated[
        str, typer.Option(metavar="NAME,...", help="Which caches; all: each, and the clairvoyant bound.")
    ] = ALL,
    blocks: Annotated[
        str, typer.Option(metavar="COUNT,...", help="Capacities, in blocks of 512 tokens.")
    ] = "1000,3000,5859,10000,20000,30000,50000,100000",
    whole: Annotated[
        bool, typer.Option("--whole", help="Never keep a prompt's partial last block; engines do not.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="Caches at the same time.")] = 1,
    plot: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Draw it: .png or .html; may be repeated.")
    ] = None,
    json: Annotated[str, typer.Option("--json", metavar="FILE|-", help="Write the figures there.")] = "",
) -> int:
    """Draw hit rate over capacity of one cache, for each way to choose what goes.

    A hit is a token of a leading block that the cache holds when the prompt comes; the rate is of all prompt
    tokens. `clairvoyant` knows the future and is the bound of all others.
    """
    from moonpool.cli.options import check_writable, write_text
    from moonpool.cli.simulate import make_console
    from moonpool.disagg_proxy.tools.simulator import cache_report, plots
    from moonpool.disagg_proxy.tools.simulator.eviction.study import CACHES, CLAIRVOYANT, Question, study
    from moonpool.disagg_proxy.tools.simulator.trace import read_trace

    known = (*CACHES, CLAIRVOYANT)
    names = known if policy == ALL else tuple(filter(None, (part.strip() for part in policy.split(","))))
    if not names or set(names) - set(known):
        raise typer.BadParameter(f"--policy takes {ALL} or names of {', '.join(known)}, not {policy}")
    capacities = _counts(blocks)
    drawn = plot or []
    plots.check(drawn)
    check_writable(json, "simulate")
    console = make_console(to_stderr=json == "-")
    read = read_trace(trace)
    questions = [Question(name, blocks_max, whole) for name in names for blocks_max in capacities]
    rates = []
    with console.status(f"{len(questions)} caches") as status:
        for rate in study(read, questions, processes=processes):
            rates.append(rate)
            asked = questions[len(rates) - 1]
            status.update(f"{len(rates)} of {len(questions)}: {asked.cache}, {asked.blocks_max:,} blocks")
    found = cache_report.Found(read.name, len(read), dict(zip(questions, rates, strict=True)))
    console.print(cache_report.table(found), highlight=False)
    for path in drawn:
        cache_report.draw(path, found)
        console.print(f"drawn: {path}", highlight=False)
    if json:
        write_text(json, cache_report.as_json(found), "simulate")
    return 0


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise typer.BadParameter(f"--blocks takes whole numbers: {error}") from error
    if counts[0] < 0:
        raise typer.BadParameter(f"--blocks cannot be negative: {counts[0]}")
    return counts
