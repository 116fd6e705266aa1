"""`moonpool drain`: copies of what only one node has, before it stops."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.cli.options import AsJson, ConfigFile, examples
from moonpool.core.service.exit_codes import EXIT_INTERRUPTED, EXIT_MISS

if TYPE_CHECKING:
    from moonpool.core.config.config import Config
    from moonpool.core.service.drain import DrainProgress

ASK_EVERY_S = 0.25
TIMEOUT_S = 15.0  # of one request
TRIES = 3  # of a look, before the node counts as gone


def register(app: typer.Typer) -> None:
    """Adds ``drain`` to the top level of ``moonpool``."""
    app.command(
        epilog=examples(
            "moonpool drain",
            "moonpool drain --leave --for 60s --rate 500MB/s",
            "moonpool drain second --url http://127.0.0.1:7712",
            "moonpool drain --evict --json",
        )
    )(drain)


def drain(
    node: Annotated[str, typer.Argument(metavar="[NODE]", help="Its name; default: the host's first.")] = "",
    for_: Annotated[str, typer.Option("--for", metavar="TIME", help="At most so long; 60s, 10min.")] = "",
    rate: Annotated[str, typer.Option(metavar="SIZE/s", help="At most so fast; 500MB/s.")] = "",
    evict: Annotated[
        bool,
        typer.Option("--evict", help="Also to full nodes: they evict what was not used for longest."),
    ] = False,
    leave: Annotated[
        bool, typer.Option("--leave", help="The node's /readyz answers 503 from now on.")
    ] = False,
    url: Annotated[str, typer.Option(metavar="URL", help="The node's HTTP address.")] = "",
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Copy what no other host has from a node to other nodes, so that it can be stopped.

    It changes and removes nothing. Exit code 1 when something was left, 130 after Ctrl-C; what was copied
    stays.
    """
    import msgspec

    from moonpool.core.config.config import load
    from moonpool.core.errors import Unavailable
    from moonpool.core.service.drain import DrainRequest

    asked = DrainRequest(for_s=_seconds(for_), rate=_rate(rate), evict=evict, leave=leave)
    page = _Page(load(config), node, url)
    interrupted = False
    show = sys.stderr.isatty()
    try:
        page.ask("POST", "/drain", msgspec.json.encode(asked))
        progress = page.watch(show)
    except KeyboardInterrupt:
        interrupted = True
        try:
            page.ask("POST", "/drain-stop")
        except Unavailable:  # it had not begun
            return EXIT_INTERRUPTED
        progress = page.watch(False)
    if show:
        print("\r\x1b[K", end="", file=sys.stderr)
    if as_json:
        print(msgspec.json.encode(progress).decode())
    else:
        for text in summary(progress, evict=evict):
            print(text)
    if progress.state == "done":
        return 0
    return EXIT_INTERRUPTED if interrupted else EXIT_MISS


def line(progress: DrainProgress) -> str:
    """How far it is, while it runs."""
    from moonpool.core.config.units import format_size

    rate = progress.copied_bytes / progress.seconds if progress.seconds else 0.0
    return (
        f"node {progress.node}: {progress.copied_objects:,} objects copied "
        f"({format_size(progress.copied_bytes)}, {format_size(rate)}/s), "
        f"{progress.there_objects:,} elsewhere already, {progress.left_objects:,} left "
        f"({format_size(progress.left_bytes)})"
    )


def summary(progress: DrainProgress, *, evict: bool) -> list[str]:
    """What became of it, a sentence each."""
    from moonpool.core.config.units import format_duration, format_size
    from moonpool.core.printable import printable

    texts = [f"{line(progress)}, after {format_duration(progress.seconds)}"]
    if progress.left_objects:
        texts.append(f"it ended early: {progress.why}")
    if progress.nowhere_objects:
        remedy = "" if evict else "; with --evict other nodes evict what was not used for longest"
        texts.append(
            f"no other node took {progress.nowhere_objects:,} objects "
            f"({format_size(progress.nowhere_bytes)}): {progress.why}{remedy}"
        )
    if progress.damaged_objects:
        texts.append(f"{progress.damaged_objects:,} objects are damaged, and were not copied")
    return [printable(text) for text in texts]


class _Page:
    """The node's pages of a drain."""

    def __init__(self, settings: Config, node: str, url: str) -> None:
        from moonpool.core.config.cluster_token import secrets_of
        from moonpool.core.service.http_tls import client_context

        self._place = (url or _url_of(settings, node)).rstrip("/")
        self._tls = client_context(settings) if self._place.startswith("https:") else None
        self._token = secrets_of(settings.read_admin_token())[0].decode("ascii")
        if node and not url:
            self._check_name(node)

    def _check_name(self, node: str) -> None:
        from moonpool.core.errors import InvalidArgument
        from moonpool.core.service.http_get import get_json

        found = str(get_json(f"{self._place}/health", tls=self._tls).get("name"))
        if found != node:
            raise InvalidArgument(
                f"drain: the node at {self._place} is called {found}, not {node}; give the HTTP address of "
                f"{node}: --url",
                operation="drain",
            )

    def watch(self, show: bool) -> DrainProgress:
        """Until it is over."""
        from moonpool.core.errors import Unavailable

        failed = 0
        while True:
            try:
                progress = self.ask("GET", "/drain")
                failed = 0
            except Unavailable:
                failed += 1
                if failed == TRIES:
                    raise
                time.sleep(ASK_EVERY_S)
                continue
            if progress.state != "running":
                return progress
            if show:
                print(f"\r\x1b[K{line(progress)}", end="", file=sys.stderr, flush=True)
            time.sleep(ASK_EVERY_S)

    def ask(self, method: str, path: str, body: bytes = b"") -> DrainProgress:
        """Raises a moonpool Error where there is no answer, or it is a refusal."""
        import http.client

        import msgspec

        from moonpool.core.errors import AuthError, Unavailable
        from moonpool.core.service.drain import DrainProgress
        from moonpool.core.service.http_get import exchange

        place = f"{self._place}{path}"
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            answer = exchange(method, place, body=body, headers=headers, timeout_s=TIMEOUT_S, tls=self._tls)
            if answer.status == 200:
                return msgspec.json.decode(answer.body, type=DrainProgress)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(
                f"drain: no node answers at {place} ({error}); give its HTTP address: --url",
                operation="drain",
            ) from error
        text = answer.body.decode(errors="replace").strip()
        if answer.status == 401:
            raise AuthError(
                f"drain: the node at {self._place} has another admin token; see cluster.admin_token_file",
                operation="drain",
            )
        if answer.status == 404 and "not drained" not in text:
            text = f"the node at {self._place} is of a release that cannot be drained"
        raise Unavailable(f"drain: {text}", operation="drain")


def _url_of(settings: Config, node: str) -> str:
    """Where the node's pages are: as `moonpool up` says, else the configuration."""
    from moonpool.core.errors import ConfigError
    from moonpool.core.service.http_tls import scheme
    from moonpool.launch.up import read_state

    up = read_state()
    rows: list[Any] = [] if up is None else list(up.nodes)
    for row in rows:
        if not node or Path(row.socket).name == f"node-{node}.sock":
            return str(row.url)
    if settings.node.http == "off":
        raise ConfigError(
            "drain: node.http is off, and a node is drained by its HTTP pages; set node.http, or give the "
            "node's address: --url",
            operation="drain",
            key="node.http",
        )
    return f"{scheme(settings)}://{settings.node.http}"


def _seconds(text: str) -> float:
    from moonpool.core.config.units import parse_duration

    try:
        return parse_duration(text) if text else 0.0
    except ValueError as error:
        raise typer.BadParameter(f"--for: {error}") from error


def _rate(text: str) -> int:
    from moonpool.core.config.units import parse_size

    if not text:
        return 0
    try:
        rate = parse_size(text.removesuffix("/s"))
        if rate > 0:
            return rate
    except ValueError:
        pass
    raise typer.BadParameter(f"--rate: {text!r} is no rate; write for example 500MB/s")
