"""The command `moonpool`: one module per group of subcommands, each a thin layer over moonpool.core.

Only typer is imported before a command runs; a command imports what it needs in its body, so that `moonpool
--help` answers at once and `moonpool vllm` loads nothing that the engine does not need.

Exit codes: 0 done; 1 a miss, or not stored; 2 called or configured wrongly; 3 a process is not there; 70 our
mistake.
"""

from moonpool.cli.entry import main, run

__all__ = ["main", "run"]
