"""`moonpool replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli.options import check_writable, examples, write_text
from moonpool.core.service.exit_codes import EXIT_INTERRUPTED, EXIT_UNAVAILABLE

if TYPE_CHECKING:
    from moonpool.disagg_proxy.tools.replay.results import Results


def register(app: typer.Typer) -> None:
    """Adds ``replay`` to the top level of ``moonpool``."""
    app.command(
        epilog=examples(
            "moonpool replay conversation_trace.jsonl --url http://127.0.0.1:8080",
            "moonpool replay trace.jsonl --url http://127.0.0.1:8080 --speed 2 --requests 500 --plot r.html",
            "moonpool replay trace.jsonl --url http://127.0.0.1:8000 --block-tokens 32 --max-input 2000 "
            "--token-ids 0:255",
        )
    )(replay)


def replay(
    trace: Annotated[Path, typer.Argument(help="Lines of timestamp, input_length, output_length, hash_ids.")],
    url: Annotated[
        list[str], typer.Option(metavar="URL", help="A proxy, or an engine; several get their turns.")
    ],
    model: Annotated[str, typer.Option(help="Default: the first that the first URL names.")] = "",
    speed: Annotated[float, typer.Option(help="How many times faster requests come.")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, help="So many at most; 0: all.")] = 0,
    block_tokens: Annotated[
        int, typer.Option(help="Tokens of a prompt for a block of 512 of the trace; scales lengths.")
    ] = 512,
    max_input: Annotated[int, typer.Option(min=0, help="Prompts are cut to so many; 0: not.")] = 0,
    max_output: Annotated[int, typer.Option(min=0, help="Answers are limited to so many; 0: not.")] = 0,
    token_ids: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="Token ids that prompts are made of.")
    ] = "1000:29999",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that are out at once at most.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of the token ids and of rounded arrivals.")] = 0,
    deadline: Annotated[float, typer.Option(min=0.001, help="Seconds for one request.")] = 600.0,
    ttft_slo: Annotated[float, typer.Option(min=0.0, help="Seconds to the first token; 0: any.")] = 30.0,
    gap_slo: Annotated[
        float, typer.Option(min=0.0, help="Seconds, mean of the longest tenth of the gaps; 0: any.")
    ] = 0.0,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its first line is the API key.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Draw it.")] = None,
    lines: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Gets a JSON line for each request at its end.")
    ] = None,
    json: Annotated[str, typer.Option("--json", metavar="FILE|-", help="Write the figures there.")] = "",
) -> int:
    """Send a trace's requests to live engines, with made-up prompts that share what the trace's share.

    Times count from a request's sending. Ctrl-C ends it with the report so far. Exit code 3 says that every
    request failed.
    """
    import sys

    from rich.console import Console

    from moonpool.disagg_proxy.tools.replay import plots, report, run
    from moonpool.disagg_proxy.tools.replay.client import Ended
    from moonpool.disagg_proxy.tools.replay.prompts import Prompts
    from moonpool.disagg_proxy.tools.replay.sender import Bounds
    from moonpool.disagg_proxy.tools.simulator.results import Slo
    from moonpool.disagg_proxy.tools.simulator.trace import read_trace

    if plot is not None:
        plots.check(plot)
    check_writable(json, "replay")
    first_id, last_id = id_range(token_ids)
    prompts = Prompts(
        block_tokens=block_tokens, first_id=first_id, last_id=last_id, input_max=max_input, seed=seed
    )
    plan = run.Plan(
        url,
        model,
        "" if api_key_file is None else run.read_api_key(api_key_file),
        speed,
        seed,
        requests,
        Bounds(concurrency, max_output),
        deadline,
    )
    slo = Slo.of(ttft_slo, gap_slo)
    read = read_trace(trace)
    total = min(len(read), requests or len(read))
    console = Console(file=sys.stderr if json == "-" else sys.stdout)
    with _Lines(lines) as written, console.status(f"replaying {total} requests") as status:

        def tell(sent: int, in_flight: int, results: Results) -> None:
            status.update(f"{sent} of {total} sent, {in_flight} in flight, {results.progress}")

        done = run.replay(plan, read, prompts, each=lambda each: written.add(report.line(each)), tell=tell)
    console.print(report.table(done.results, slo), highlight=False)
    if plot is not None:
        plots.draw(plot, f"{trace.name}: {len(done.results)} requests, {speed:g}x", done.results, slo)
        console.print(f"drawn: {plot}", highlight=False)
    if json:
        about = {
            "trace": trace.name,
            "urls": list(url),
            "model": done.model,
            "speed": speed,
            "block_tokens": block_tokens,
            "stopped": done.stopped,
        }
        write_text(json, report.as_json(done.results, slo, about), "replay")
    if done.stopped:
        return EXIT_INTERRUPTED
    failed = done.results.ended[Ended.FAILED] == len(done.results) > 0
    return EXIT_UNAVAILABLE if failed else 0


class _Lines:
    """A file of lines, each there at once, or nothing."""

    def __init__(self, path: Path | None) -> None:
        from moonpool.core.errors import ConfigError

        try:
            self._file = None if path is None else path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}", operation="replay") from error

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, line: bytes) -> None:
        if self._file is not None:
            self._file.write(line + b"\n")


def id_range(text: str) -> tuple[int, int]:
    """The two ends of an option LOW:HIGH. Raises typer.BadParameter."""
    low, _, high = text.partition(":")
    try:
        return int(low), int(high)
    except ValueError as error:
        raise typer.BadParameter(f"--token-ids takes LOW:HIGH, not {text}") from error
