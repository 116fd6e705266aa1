"""`moonpool bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli.options import check_writable, examples, write_text
from moonpool.core.service.exit_codes import EXIT_INTERRUPTED, EXIT_UNAVAILABLE

if TYPE_CHECKING:
    from moonpool.disagg_proxy.tools.replay.results import Results
    from moonpool.disagg_proxy.tools.serve_bench.run import Load

BASELINES = ("fresh", "none")


def register(group: typer.Typer) -> None:
    """Adds ``serve`` to the group ``bench``."""
    group.command(
        epilog=examples(
            "moonpool bench serve --url http://127.0.0.1:8080",
            "moonpool bench serve --url http://127.0.0.1:8080 --compare-url http://127.0.0.1:8001",
            "moonpool bench serve --url http://127.0.0.1:8080 --sessions 64 --turns 6 --prefix-tokens 4096 "
            "--concurrency 16 --json serve.json",
        )
    )(serve)


def serve(
    url: Annotated[str, typer.Option(metavar="URL", help="A proxy or an engine with the OpenAI API.")],
    compare_url: Annotated[
        str, typer.Option(metavar="URL", help="The baseline: the same prompts, sent there afterwards.")
    ] = "",
    baseline: Annotated[
        str,
        typer.Option(metavar="fresh|none", help="Without --compare-url: prompts with nothing in common."),
    ] = "fresh",
    model: Annotated[str, typer.Option(help="Default: the first that each URL names.")] = "",
    sessions: Annotated[int, typer.Option(help="Conversations.")] = 16,
    turns: Annotated[int, typer.Option(help="Requests of each; a prompt begins with the one before.")] = 4,
    prefixes: Annotated[int, typer.Option(help="Shared prefixes; conversations have them in turn.")] = 2,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of each of them; 0: nothing is shared.")] = 1024,
    turn_tokens: Annotated[int, typer.Option(help="Tokens that each turn adds.")] = 256,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 32,
    concurrency: Annotated[int, typer.Option(help="Conversations at one time.")] = 8,
    token_ids: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="Token ids that prompts are made of.")
    ] = "1000:29999",
    seed: Annotated[
        int | None, typer.Option(help="Of the token ids; default: another one each time, so caches are cold.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds for one request.")] = 600.0,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its first line is the API key.")
    ] = None,
    json: Annotated[str, typer.Option("--json", metavar="FILE|-", help="Write the figures there.")] = "",
) -> int:
    """Send conversations that share prefixes, and a baseline, and show TTFT, tokens/s and the cached share.

    The baseline is the same load without shared prefixes, or --compare-url. The bench takes the engine's own
    count of cached tokens. Exit code 3 says that every request to one of them failed.
    """
    import secrets
    import sys

    from rich.console import Console

    from moonpool.cli.replay import id_range
    from moonpool.disagg_proxy.tools.replay.client import Ended
    from moonpool.disagg_proxy.tools.replay.run import read_api_key
    from moonpool.disagg_proxy.tools.serve_bench import report, run
    from moonpool.disagg_proxy.tools.serve_bench.conversations import Conversations, Shape

    if baseline not in BASELINES:
        raise typer.BadParameter(f"--baseline is {' or '.join(BASELINES)}, not {baseline}")
    check_writable(json, "bench")
    first_id, last_id = id_range(token_ids)
    shape = Shape(
        sessions,
        turns,
        prefixes,
        prefix_tokens,
        turn_tokens,
        answer_tokens,
        first_id,
        last_id,
        secrets.randbits(31) if seed is None else seed,
    )
    api_key = "" if api_key_file is None else read_api_key(api_key_file)
    targets = run.with_models(
        [run.Target(each, model, api_key, concurrency, deadline) for each in (url, compare_url) if each]
    )
    plans = [(f"at {each.root}" if compare_url else "shared", each, False) for each in targets]
    if not compare_url and baseline == "fresh":
        plans.append(("fresh prompts", targets[0], True))
    console = Console(file=sys.stderr if json == "-" else sys.stdout)
    loads: list[Load] = []
    for name, target, fresh in plans:
        with console.status(f"{name}: {shape.requests} requests") as status:

            def tell(results: Results, name: str = name) -> None:
                status.update(f"{name}: {len(results)} of {shape.requests} ended, {results.progress}")

            loads.append(run.run(target, Conversations(shape, fresh=fresh), tell))
        if loads[-1].stopped:
            break
    compared = (plans[1][0], loads[1].results) if len(loads) > 1 else None
    console.print(
        f"model {targets[0].model}, {shape.sessions} conversations of {shape.turns} turns, "
        f"{shape.prefixes} prefixes of {shape.prefix_tokens} tokens, seed {shape.seed}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(report.table(plans[0][0], loads[0].results, compared), highlight=False)
    stopped = any(load.stopped for load in loads)
    if json:
        from dataclasses import asdict

        about = {
            "url": url,
            "compare_url": compare_url,
            "model": targets[0].model,
            "shape": asdict(shape),
            "concurrency": concurrency,
            "stopped": stopped,
        }
        other = None if compared is None else compared[1]
        write_text(json, report.as_json(loads[0].results, other, about), "bench")
    if stopped:
        return EXIT_INTERRUPTED
    failed = any(load.results.ended[Ended.FAILED] == len(load.results) > 0 for load in loads)
    return EXIT_UNAVAILABLE if failed else 0
