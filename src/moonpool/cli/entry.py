"""The entry point: runs one subcommand; what was called wrongly is one sentence and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from moonpool.cli import (
    bench,
    configuration,
    doctor,
    down,
    drain,
    logs,
    master,
    mock_engine,
    node,
    objects,
    plan,
    proxy,
    replay,
    saved,
    sglang,
    simulate,
    status,
    tenants,
    topology,
    up,
    vllm,
)
from moonpool.core.service.exit_codes import EXIT_INTERRUPTED, EXIT_USAGE, guarded

# typer's own base of everything that a command line can get wrong (click's ClickException).
_UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]


def make_app() -> typer.Typer:
    """A new application with all subcommands. Importing their modules opens nothing; each command imports
    what it runs when it is called.
    """
    app = typer.Typer(
        name="moonpool",
        help="One shared pool of computed KV cache for LLM engines, in CPU memory and on SSD.",
        epilog="Start a node:  moonpool node --dram 2GiB\n\n"
        "Everything on this host:  moonpool up --config up.toml\n\n"
        "An engine with the pool:  moonpool vllm serve MODEL --kv-connector Mooncake",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    serving = (node, master, proxy, mock_engine, up, down, logs, vllm, sglang)
    for module in (
        *serving,
        status,
        saved,
        topology,
        doctor,
        drain,
        tenants,
        objects,
        bench,
        simulate,
        replay,
        plan,
        configuration,
    ):
        module.register(app)

    @app.command(epilog="Example:  moonpool version")
    def version() -> None:
        """Print the version."""
        _print_version()

    @app.callback()
    def _(
        version: Annotated[
            bool,
            typer.Option(
                "--version", "-V", help="Print the version.", is_eager=True, callback=_print_version_and_end
            ),
        ] = False,
    ) -> None:
        pass

    return app


def _print_version() -> None:
    import moonpool

    print(f"moonpool {moonpool.__version__}")


def _print_version_and_end(wanted: bool) -> None:
    if wanted:
        _print_version()
        raise typer.Exit


def main() -> NoReturn:
    """Runs this process's command line, and exits."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs `moonpool ARGUMENTS` and returns the exit code."""
    command = typer.main.get_command(make_app())

    def act() -> object:
        try:
            return command.main(args=list(arguments), prog_name="moonpool", standalone_mode=False)
        except _UsageProblem as error:
            return _report_usage(error)
        except typer.Abort:
            return EXIT_INTERRUPTED
        except SystemExit:
            if (
                type(sys.stdout).__name__ == "PacifyFlushWrapper"
            ):  # typer's, once the reader of a pipe has gone
                return 0
            raise

    return guarded(act)


def _report_usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    place = "moonpool" if context is None else context.command_path
    place = place.replace("moonpool simulate run", "moonpool simulate")  # as it is called
    if type(error).__name__ == "NoArgsIsHelpError":
        print(getattr(error, "message", ""), end="", file=sys.stderr)  # with rich it is printed already
        return EXIT_USAGE
    message = str(getattr(error, "message", error))
    if type(error).__name__ != "NoSuchOption":
        message = str(getattr(error, "format_message", lambda: message)())
    possibilities = getattr(error, "possibilities", None)
    if possibilities:
        message = f"{message.rstrip('.')}; did you mean {possibilities[0]}?"
    message = message[:1].lower() + message[1:].rstrip(".")
    print(f"{place}: {message} (see {place} --help)", file=sys.stderr)
    return EXIT_USAGE
