"""`moonpool doctor`: what keeps this machine, or the way to a peer, from moving bytes well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli.options import AsJson, ConfigFile, TokenFile, examples
from moonpool.core.service.exit_codes import EXIT_UNAVAILABLE

if TYPE_CHECKING:
    from rich.text import Text

    from moonpool.core.config.config import Config
    from moonpool.core.doctor import Finding, Report
    from moonpool.core.doctor.peer import Peer
    from moonpool.core.errors import ConfigError

EXIT_BROKEN = 1
_STYLES = {"works": "green", "absent": "dim", "weak": "yellow", "broken": "bold red"}


def register(app: typer.Typer) -> None:
    """Adds ``doctor`` to the top level of ``moonpool``."""
    app.command(
        epilog=examples(
            "moonpool doctor",
            "moonpool doctor 10.0.0.7:7720 --token-file token",
            "moonpool doctor 10.0.0.7:7710 --json",
        )
    )(doctor)


def doctor(
    peer: Annotated[
        str, typer.Argument(metavar="[PEER]", help="host:port of a transfer engine, a node or a master.")
    ] = "",
    as_json: AsJson = False,
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> int:
    """Say what works here, what does not, why, and what to do, within 3 s.

    With PEER: also whether it is reached, which path its host memory and the memory of its GPUs would take,
    and how fast reads are: of an engine's memory, or of an object that a node stores meanwhile. Exit code 1
    when something here is broken, 3 when something at or on the way to PEER is.
    """
    from moonpool.core.doctor import Host, examine

    report = examine(Host(), _settings(config, token_file), peer)
    if as_json:
        import msgspec

        from moonpool.core.printable import printable_all

        shown = printable_all(msgspec.to_builtins(report))
        print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    else:
        from rich.console import Console

        console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
        for line in lines(report):
            console.print(line)
    if report.peer_is_broken:
        return EXIT_UNAVAILABLE
    return EXIT_BROKEN if report.is_broken else 0


def _settings(config: Path | None, token_file: Path | None) -> Config | ConfigError:
    """Or why they cannot be read."""
    from moonpool.core.config.config import load
    from moonpool.core.errors import ConfigError

    try:
        return load(config, arguments={"cluster.token_file": None if token_file is None else str(token_file)})
    except ConfigError as error:
        return error


def lines(report: Report) -> Iterator[Text]:
    """The report, a line each. A peer chose some of the text: it is made safe first."""
    from rich.text import Text

    for finding in report.findings:
        yield from _shown(finding)
    if report.peer is not None:
        yield Text()
        yield from _peer(report.peer)
    everything = [*report.findings, *(report.peer.findings if report.peer else [])]
    counts = {state: sum(finding.state == state for finding in everything) for state in _STYLES}
    yield Text()
    yield Text(
        f"{counts['broken']} broken, {counts['weak']} weak, {counts['works']} work, {counts['absent']} "
        f"absent; {report.seconds:.1f} s"
    )


def _shown(finding: Finding) -> Iterator[Text]:
    from rich.text import Text

    from moonpool.core.printable import printable

    mark = Text(f"{finding.state.value:<8}", _STYLES[finding.state])
    yield mark + Text(f"{finding.check + ':':<20} {printable(finding.what)}")
    if finding.remedy:
        yield Text(f"{'':<8}{'':<20} -> {printable(finding.remedy)}")


def _peer(peer: Peer) -> Iterator[Text]:
    from rich.text import Text

    from moonpool.core.printable import printable

    kind = {"engine": "transfer engine"}.get(peer.kind, peer.kind)
    yield Text(f"peer {printable(peer.address)}" + (f", {kind}" if kind else ""), "bold")
    for finding in peer.findings:
        yield from _shown(finding)
    for memory, transport in peer.chosen.items():
        what = f"by {transport}" if transport else "by no path"
        yield Text(f"{'path':<8}{memory + ' memory:':<20} {what}")
    for rate in peer.rates:
        yield Text(
            f"{'rate':<8}{rate.memory + ' memory:':<20} {rate.gb_per_s:.2f} GB/s read by {rate.transport}, "
            f"{rate.latency_us:.0f} us at least, {rate.bytes / 1e6:.0f} MB measured"
        )
    for row in peer.paths:
        shown = printable(row.path or f"none: {row.why}")
        yield Text(f"{'':<8}{row.transport + ':':<20} {shown}")
        if row.remarks:
            yield Text(f"{'':<8}{'':<20} {printable(row.remarks)}")
        for unreached, why in row.unreached.items():
            yield Text(f"{'':<8}{'':<20} not {unreached} memory: {printable(why)}")
