"""The entry point: runs one subcommand and turns whatever goes wrong into one sentence and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import typer

from moonpool.core.cli import (
    bench,
    configuration,
    master,
    mock_engine,
    node,
    objects,
    plan,
    proxy,
    replay,
    sglang,
    simulate,
    status,
    up,
    vllm,
)
from moonpool.core.errors import AuthError, ConfigError, Error, InvalidArgument

EXIT_MISS = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_BUG = 70
EXIT_INTERRUPTED = 130

# typer's own base of everything that a command line can get wrong (click's ClickException).
_UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]


def make_app() -> typer.Typer:
    app = typer.Typer(
        name="moonpool",
        help="One shared pool of computed KV cache for LLM engines.",
        epilog="Start a node:  moonpool node --dram 2GiB\n\n"
        "Everything on this host:  moonpool up --config up.toml\n\n"
        "An engine with the pool:  moonpool vllm serve MODEL --kv-connector Mooncake",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    serving = (node, master, proxy, mock_engine, up, vllm, sglang)
    for module in (*serving, status, objects, bench, simulate, replay, plan, configuration):
        module.register(app)

    @app.command(epilog="Example:  moonpool version")
    def version() -> None:
        """Print the version."""
        import moonpool

        print(f"moonpool {moonpool.__version__}")

    return app


def main() -> NoReturn:
    """Runs this process's command line, and exits."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs `moonpool ARGUMENTS` and returns the exit code."""
    command = typer.main.get_command(make_app())
    return guarded(lambda: command.main(args=list(arguments), prog_name="moonpool", standalone_mode=False))


def guarded(run: Callable[[], object]) -> int:
    """Runs ``run``; its result, or what it raises, as an exit code. Says on standard error what is wrong."""
    try:
        code = run()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except Error as error:
        return _report(error, str(error), EXIT_USAGE if _is_ours_to_fix(error) else EXIT_UNAVAILABLE)
    except _UsageProblem as error:
        return _report_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit complains
        return 0
    except Exception as error:
        return _report(
            error, f"internal error: {type(error).__name__}: {error}; MOONPOOL_DEBUG=1 shows where", EXIT_BUG
        )


def _is_ours_to_fix(error: Error) -> bool:
    return isinstance(error, ConfigError | InvalidArgument | AuthError)


def _report(error: Exception, message: str, code: int) -> int:
    if os.environ.get("MOONPOOL_DEBUG") == "1":
        traceback.print_exception(error)
    print(f"moonpool: {message}", file=sys.stderr)
    return code


def _report_usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    place = "moonpool" if context is None else context.command_path
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
